"""Benches: each prints for people, writes rows to bench/results/NAME.jsonl and ends with a JSON object with `ok`."""

"""Benches: each prints for people, appends rows to bench/results/NAME.jsonl, and ends with one JSON object with `ok`."""

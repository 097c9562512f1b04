"""Ranks samples: pairs of responses to one prompt, of which a noisy annotator prefers the pleasanter one.

Purpose: the annotator of `make demo-pipeline`. It reads a file of `generate` with several samples per prompt, and
         writes rows for `--algorithm reward_model` and `dpo`; those of every eighth prompt into a file of their own.
Cost:    none.
Command: python -m tools rank-pairs SAMPLES.jsonl --out pairs.jsonl --held-out pairs_held_out.jsonl
"""

import argparse
import json
from pathlib import Path

from tools.embedded.pairs import pairs_of_samples
from tools.embedded.stages import read_rows, write_rows

HELD_OUT = 8  # every so many prompts


def split(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Returns the pairs to train on, and those of every eighth prompt."""
    place = {prompt: number for number, prompt in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    parts: tuple[list[dict], list[dict]] = ([], [])
    for row in rows:
        parts[place[row["prompt"]] % HELD_OUT == HELD_OUT - 1].append(row)
    return parts


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools rank-pairs", description=__doc__.partition("\n")[0])
    parser.add_argument("samples", type=Path, metavar="SAMPLES.jsonl", help="of `generate` with samples_per_prompt=2N")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--held-out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        samples = read_rows(options.samples)
    except (OSError, ValueError) as error:
        parser.error(f"{options.samples} can't be read: {error}")
    if not all(isinstance(row, dict) and {"prompt", "response"} <= row.keys() for row in samples):
        parser.error(f"{options.samples} has rows without prompt and response; give a file that `generate` wrote")
    kept, held_out = split(pairs_of_samples(samples, options.seed))
    write_rows(options.out, kept)
    write_rows(options.held_out, held_out)
    print(json.dumps({"bench": "rank-pairs", "pairs": len(kept), "held_out": len(held_out), "ok": bool(kept)}))
    return 0 if kept and held_out else 1

"""The demo on five fixed seeds: does PPO raise the mean reward by an initial standard deviation at <= 10 nats of KL?

Cost: about five times the demo. Command: python -m bench demo-seeds
"""

import argparse
import json
import tempfile

from bench.rows import train, write

SEEDS = (0, 1, 2, 3, 4)
NUM_RANKS = 4
LARGEST_KL = 10.0  # nats per response


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench demo-seeds", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parsed = parser.parse_args(arguments)
    rows = []
    print("seed  reward first  std    reward last  gain/std  KL last  seconds")
    with tempfile.TemporaryDirectory() as runs:
        for seed in SEEDS:
            result, metrics = train(NUM_RANKS, ["--runs", runs, f"seed={seed}", *parsed.overrides])
            first, last = metrics[0], metrics[-1]
            gain = (last["reward"] - first["reward"]) / first["reward_std"]
            row = {
                "bench": "demo-seeds",
                "seed": seed,
                "ranks": NUM_RANKS,
                "iterations": result["iterations"],
                "reward_first": first["reward"],
                "reward_std_first": first["reward_std"],
                "reward_last": last["reward"],
                "gain_in_std": gain,
                "kl_last": last["kl"],
                "kl_largest": max(row["kl"] for row in metrics),
                "parity_max_abs": result["parity_max_abs"],
                "wall_s": result["wall_s"],
                "ok": gain >= 1.0 and max(row["kl"] for row in metrics) <= LARGEST_KL,
            }
            rows.append(row)
            print(
                f"{seed:4}  {row['reward_first']:12.3f}  {row['reward_std_first']:5.3f}  {row['reward_last']:11.3f}  "
                f"{gain:8.2f}  {row['kl_last']:7.2f}  {row['wall_s']:7.1f}",
                flush=True,
            )
    write("demo_seeds", rows)
    ok = all(row["ok"] for row in rows)
    print(json.dumps({"bench": "demo-seeds", "seeds": len(rows), "passed": sum(r["ok"] for r in rows), "ok": ok}))
    return 0 if ok else 1

"""Tokens and metrics of the embedded model under flattening, interleaving1, interleaving2 and separation, compared.

Three iterations in float32 with seeds 0 to 2, at 1, 2, 4, 5 and 8 ranks and ZeRO 0 to 3, against one rank. One mpirun
for each number of ranks executes all its cases. Where a token differs, the smallest distance between a random number
and the edge of a token's interval shows whether rounding can explain it.

Cost: ten minutes on two cores. Command: python -m bench invariance
"""

import argparse
import json
import tempfile
from pathlib import Path

from bench.rows import REPOSITORY, on_ranks, write
from rlhf_spmd import presets
from rlhf_spmd.config import Config, make_workload
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.instructions import Program, communicators
from rlhf_spmd.strategy import load_strategy

SEEDS = (0, 1, 2)
CASES = [(ranks, "flattening", {}) for ranks in (1, 2, 4, 5, 8)]
CASES += [(4, "flattening", {"zero": str(stage)}) for stage in (1, 2, 3)]
for _name in ("interleaving1", "interleaving2", "separation"):
    CASES += [(ranks, _name, {}) for ranks in (2, 4, 5, 8)] + [(4, _name, {"zero": "2"})]
CASES += [(4, "interleaving2", {"zero": "3"})]
COMPARED = ("policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm", "kl", "reward")
TOLERANCE = 1e-5  # times max(1, |value|)


def load(seed: int) -> Config:
    return presets.load("tiny", ["iterations=3", f"seed={seed}", "num_samples=0"])


def programs(num_ranks: int) -> list[tuple[str, dict, Program]]:
    """Strategy, options and program of the cases with this number of ranks."""
    workload, cluster = make_workload(load(0)), Cluster.parse(f"1x{num_ranks}")
    return [
        (name, options, load_strategy(name).compile(workload, cluster, options))
        for ranks, name, options in CASES
        if ranks == num_ranks
    ]


def run_cases(folder: Path) -> None:
    """The main function of each rank; rank 0 writes a JSON line and the weights of actor and critic for each case."""
    from rlhf_spmd.runtime.world.world import World

    world = World.discover()
    world.use_device("cpu")
    try:
        cases = programs(world.size)
        world.start_torch(*communicators(program for _, _, program in cases), threads=1)
        for name, options, program in cases:
            for seed in SEEDS:
                run_case(folder, world, name, options, program, seed)
        world.shutdown()
    except BaseException as error:
        world.fail(error)


def run_case(folder: Path, world, name: str, options: dict, program: Program, seed: int) -> None:
    from safetensors.torch import save_file

    from tests.edges import Replay
    from tests.runs import RunOf

    run = RunOf(load(seed), world, program) if world.size > 1 else Replay(load(seed))
    metrics = run.iterations()
    weights = {f"{model}.{key}": w for model in ("actor", "critic") for key, w in run.weights(model).items()}
    if world.rank == 0:  # all these strategies train both models on rank 0
        case = {"ranks": world.size, "strategy": name, "options": options, "seed": seed}
        file = f"{world.size}-{name}-{'-'.join(options.values())}-{seed}"
        save_file({key: w.contiguous() for key, w in weights.items()}, folder / f"{file}.safetensors")
        closest = [min(map(min, rows.values())) for rows in run.distances] if world.size == 1 else None
        (folder / f"{file}.json").write_text(json.dumps(case | {"metrics": metrics, "closest": closest}))
        print(f"{world.size:5} {name:<14} {' '.join(options.values()):<4} seed {seed}", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench invariance", description=__doc__)
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.on_ranks:
        run_cases(parsed.on_ranks)
        return 0
    with tempfile.TemporaryDirectory() as name:
        for num_ranks in sorted({ranks for ranks, _, _ in CASES}):
            on_ranks(num_ranks, ["invariance", "--on-ranks", name], limit_s=3600.0)
        rows = compare(Path(name))
    print("ranks  strategy        options   tokens     largest error  weights")
    for row in rows:
        same = "identical" if row["same_tokens"] else "DIFFERENT"
        errors = f"{row['metrics_error']:13.1e}  {row['weights_error']:.1e}"
        print(f"{row['ranks']:5}  {row['strategy']:<14}  {row['options']:<8}  {same}  {errors}")
        for text in row["flips"]:
            print(f"       {text}")
    path = write("invariance", rows)
    ok = all(row["ok"] for row in rows)
    shown = str(path.relative_to(REPOSITORY))
    print(json.dumps({"bench": "invariance", "cases": len(rows), "seeds": len(SEEDS), "rows": shown, "ok": ok}))
    return 0 if ok else 1


def compare(folder: Path) -> list[dict]:
    """One row per case: the worst of all seeds against one rank."""
    from safetensors.torch import load_file

    found: dict[tuple, dict[int, dict]] = {}
    for file in folder.glob("*.json"):
        case = json.loads(file.read_text()) | {"weights": load_file(file.with_suffix(".safetensors"))}
        found.setdefault((case["ranks"], case["strategy"], str(case["options"])), {})[case["seed"]] = case
    base = found[1, "flattening", "{}"]
    closest = min(min(base[seed]["closest"]) for seed in SEEDS)
    rows = []
    for ranks, strategy, options in CASES:
        cases = found[ranks, strategy, str(options)]
        flips = [text for seed in SEEDS if (text := flip(cases[seed], base[seed]))]
        row = {
            "bench": "invariance",
            "ranks": ranks,
            "strategy": strategy,
            "options": " ".join(f"{name}={value}" for name, value in options.items()),
            "seeds": list(SEEDS),
            "same_tokens": not flips,
            "flips": flips,
            "closest_edge": closest,
            "metrics_error": max(metrics_error(cases[seed], base[seed]) for seed in SEEDS),
            "weights_error": max(weights_error(cases[seed], base[seed]) for seed in SEEDS),
        }
        row["ok"] = row["same_tokens"] and max(row["metrics_error"], row["weights_error"]) <= TOLERANCE
        rows.append(row)
    return rows


def flip(case: dict, base: dict) -> str | None:
    """The first iteration whose tokens differ, and how close a random number came to an edge there."""
    pairs = zip(case["metrics"], base["metrics"], base["closest"], strict=True)
    for number, (mine, expected, closest) in enumerate(pairs):
        if mine["tokens_sha256"] != expected["tokens_sha256"]:
            return f"seed {case['seed']}, iteration {number}: the closest random number was {closest:.1e} from an edge"
    return None


def metrics_error(case: dict, base: dict) -> float:
    """Largest |value - expected| / max(1, |expected|) of losses, norms, KL and reward."""
    pairs = zip(case["metrics"], base["metrics"], strict=True)
    return max(abs(m[name] - b[name]) / max(1.0, abs(b[name])) for m, b in pairs for name in COMPARED)


def weights_error(case: dict, base: dict) -> float:
    """The same of the final weights of actor and critic."""
    return max(
        float(((weight.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)).max())
        for weight, expected in ((case["weights"][name], w) for name, w in base["weights"].items())
    )

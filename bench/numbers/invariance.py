"""Tokens and metrics of the embedded model under the strategies of papers, compared with those of one rank.

Three iterations in float32 with seeds 0 to 2: PPO at 1, 2, 4, 5 and 8 ranks and ZeRO 0 to 3, also with adapters
(LoRA), and PPO and GRPO with the embedded mixture of experts, whose models all are mixtures; the other algorithms on
the same numbers of ranks, all of which split groups of three responses. One mpirun for
each number of ranks executes all its cases. Where a token differs, the smallest distance between a random number and
the edge of a token's interval shows whether rounding can explain it.

Cost: ten minutes on two cores for PPO, as long for the others. Command: python -m bench invariance [ALGORITHM ...]
"""

import argparse
import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.rows import Arguments, keep, on_ranks, one_world
from bench.tables import ended
from rlhf_spmd import embedded
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.program.transfers import communicators

SEEDS = (0, 1, 2)
GROUPS = ("rollout_batch=40", "samples_per_prompt=3", "mini_batch=40", "micro_batch=20")
LORA, JOINED = "+lora", "+joined"  # behind the name of an algorithm: with adapters; generating with joined copies
MIXTURE = "+mixture"  # with the embedded mixture of experts as all models that are none of a user
ACTOR = str(embedded.path_of("mixture/actor"))
# the preset's rate lets rounding grow a hundredfold in three iterations, also with the dense model of the same sums
BALANCED = ("experts.balance_coef=0.01", "experts.z_coef=0.001", "optimizer.actor_lr=2e-5")
WORDS = {  # options of an algorithm beside those of the preset
    "ppo": (),
    f"ppo{LORA}": ("lora.rank=8",),
    f"ppo{LORA}{JOINED}": ("lora.rank=8", "lora.generate=joined"),
    "grpo": (*GROUPS, "grpo.kl_coef=0.001", "grpo.drop_equal_groups=true", "grpo.epochs=2"),
    "rloo": (*GROUPS, "rloo.epochs=2"),
    "remax": (),
    "reinforce_plus_plus": (),
    f"ppo{MIXTURE}": ("rollout_batch=40", "mini_batch=20", "micro_batch=10", f"models.critic={ACTOR}", *BALANCED),
    f"grpo{MIXTURE}": (*GROUPS, "grpo.kl_coef=0.001", "grpo.epochs=2", *BALANCED),
}
KEYS = ("algorithm", "ranks", "strategy", "options")  # what tells rows apart
COMPARED = ("policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm", "kl", "reward")
TOLERANCE = 1e-5  # times max(1, |value|)


@dataclass(frozen=True, slots=True)
class Case:
    """A placement.

    algorithm: name of a page, perhaps with what of WORDS trains.
    """

    ranks: int
    strategy: str
    options: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = "ppo"

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.algorithm, self.ranks, self.strategy, " ".join(f"{k}={v}" for k, v in self.options.items())


def _cases() -> list[Case]:
    cases = [Case(ranks, "flattening") for ranks in (1, 2, 4, 5, 8)]
    cases += [Case(4, "flattening", {"zero": str(stage)}) for stage in (1, 2, 3)]
    for name in ("interleaving1", "interleaving2", "separation"):
        cases += [Case(ranks, name) for ranks in (2, 4, 5, 8)] + [Case(4, name, {"zero": "2"})]
    cases += [Case(4, "interleaving2", {"zero": "3"})]
    lora = f"ppo{LORA}"  # ZeRO 2 means 1, and 3 is refused
    cases += [Case(ranks, "flattening", algorithm=lora) for ranks in (1, 2, 4, 5, 8)]
    cases += [Case(4, "flattening", {"zero": str(stage)}, lora) for stage in (1, 2)]
    for name in ("interleaving1", "interleaving2", "separation", "reallocation"):
        cases += [Case(ranks, name, algorithm=lora) for ranks in (2, 4, 5, 8)] + [Case(4, name, {"zero": "1"}, lora)]
    cases += [Case(4, "reallocation", options, lora) for options in SPLIT]
    for page in (f"ppo{MIXTURE}", f"grpo{MIXTURE}"):
        cases += [Case(ranks, "flattening", algorithm=page) for ranks in (1, 2, 4, 5, 8)]
        for name in ("interleaving1", "interleaving2", "separation", "reallocation"):
            cases += [Case(ranks, name, algorithm=page) for ranks in (2, 4, 5, 8)]
        cases += [Case(4, "reallocation", options, page) for options in SPLIT]
    for page in WORDS:
        if page not in ("ppo", lora) and not page.endswith(MIXTURE):
            cases += [Case(ranks, "flattening", algorithm=page) for ranks in (1, 2, 4, 5, 8)]
            cases += [Case(ranks, name, algorithm=page) for ranks, name in OTHERS]
    return cases


OTHERS = ((2, "interleaving2"), (4, "interleaving1"), (5, "separation"), (8, "separation"), (8, "interleaving2"))
# by default training is split by tp alone, and generation is not
SPLIT = ({"training_tp": "1", "generation_tp": "2"}, {"training_tp": "1", "training_pp": "2", "generation_pp": "2"})
CASES = _cases()


def load(algorithm: str, seed: int) -> Config:
    words, (page, *_) = ["iterations=3", f"seed={seed}", "num_samples=0", *WORDS[algorithm]], algorithm.split("+")
    if algorithm.endswith(MIXTURE):
        return presets.load("arithmetic", words, ACTOR, algorithm=page)
    return presets.load("tiny", words, algorithm=page)


def programs(algorithms: Collection[str], num_ranks: int) -> list[tuple[Case, Program]]:
    """Returns the cases of these algorithms with this number of ranks, compiled."""
    cluster = Cluster.parse(f"1x{num_ranks}")
    return [
        (case, load_strategy(case.strategy).compile(make_workload(load(case.algorithm, 0)), cluster, case.options))
        for case in CASES
        if case.ranks == num_ranks and case.algorithm in algorithms
    ]


def run_cases(folder: Path, algorithms: Collection[str]) -> None:
    """Runs the cases on each rank; rank 0 writes a JSON line and the weights of the trained models for each case."""
    with one_world() as world:
        cases = programs(algorithms, world.size)
        world.start_torch(*communicators(program for _, program in cases), threads=1)
        for case, program in cases:
            for seed in SEEDS:
                run_case(folder, world, case, program, seed)


def run_case(folder: Path, world, case: Case, program: Program, seed: int) -> None:
    from safetensors.torch import save_file

    from tests.edges import Replay
    from tests.runs import RunOf

    config = load(case.algorithm, seed)
    run = RunOf(config, world, program) if world.size > 1 else Replay(config)
    metrics = run.iterations()
    trained = program.workload.workflow.trained_models
    weights = {f"{model}.{key}": w for model in trained for key, w in run.weights(model).items()}
    if world.rank == 0:  # all these strategies train all models on rank 0
        file = "-".join([*map(str, case.key), str(seed)])
        save_file({key: w.contiguous() for key, w in weights.items()}, folder / f"{file}.safetensors")
        closest = [min(map(min, rows.values())) for rows in run.distances] if world.size == 1 else None
        found = {"key": case.key, "seed": seed, "metrics": metrics, "closest": closest}
        (folder / f"{file}.json").write_text(json.dumps(found), encoding="utf-8")
        print(f"{' '.join(map(str, case.key))} seed {seed}", flush=True)


def main(arguments: list[str]) -> int:
    parser = Arguments("invariance", __doc__)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help="measured anew; none: all")
    parser.add_argument("--on-ranks", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    algorithms = parsed.algorithms or list(WORDS)
    if unknown := set(algorithms) - set(WORDS):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(WORDS)}")
    if parsed.on_ranks:
        run_cases(parsed.on_ranks, algorithms)
        return 0
    with tempfile.TemporaryDirectory() as name:
        for num_ranks in sorted({case.ranks for case in CASES}):
            on_ranks(num_ranks, ["invariance", "--on-ranks", name, *algorithms], limit_s=3600.0)
        rows = compare(Path(name), algorithms)
    for row in rows:
        print(
            "".join(f"{row['algorithm']}, {row['strategy']}, {row['ranks']} ranks: {text}\n" for text in row["flips"]),
            end="",
        )
    keep("invariance", rows, KEYS, lambda row: list(WORDS).index(row["algorithm"]))
    return ended("invariance", rows, cases=len(rows), seeds=len(SEEDS))


def compare(folder: Path, algorithms: Collection[str]) -> list[dict]:
    """Compares the worst of all seeds against one rank: one row per case."""
    from safetensors.torch import load_file

    found: dict[tuple, dict[int, dict]] = {}
    for file in folder.glob("*.json"):
        case = json.loads(file.read_text(encoding="utf-8")) | {"weights": load_file(file.with_suffix(".safetensors"))}
        found.setdefault(tuple(case["key"]), {})[case["seed"]] = case
    rows = []
    for case in CASES:
        if case.algorithm not in algorithms:
            continue
        cases, base = found[case.key], found[Case(1, "flattening", algorithm=case.algorithm).key]
        flips = [text for seed in SEEDS if (text := flip(cases[seed], base[seed]))]
        row = {
            "bench": "invariance",
            "algorithm": case.algorithm,
            "ranks": case.ranks,
            "strategy": case.strategy,
            "options": case.key[-1],
            "seeds": list(SEEDS),
            "same_tokens": not flips,
            "flips": flips,
            "closest_edge": min(min(base[seed]["closest"]) for seed in SEEDS),
            "metrics_error": max(metrics_error(cases[seed], base[seed]) for seed in SEEDS),
            "weights_error": max(weights_error(cases[seed], base[seed]) for seed in SEEDS),
        }
        row["ok"] = row["same_tokens"] and max(row["metrics_error"], row["weights_error"]) <= TOLERANCE
        rows.append(row)
    return rows


def flip(case: dict, base: dict) -> str | None:
    """Returns the first iteration whose tokens differ, and how close a random number came to an edge there."""
    pairs = zip(case["metrics"], base["metrics"], base["closest"], strict=True)
    for number, (mine, expected, closest) in enumerate(pairs):
        if mine["tokens_sha256"] != expected["tokens_sha256"]:
            return f"seed {case['seed']}, iteration {number}: the closest random number was {closest:.1e} from an edge"
    return None


def metrics_error(case: dict, base: dict) -> float:
    """Returns the largest |value - expected| / max(1, |expected|) of losses, norms, KL and reward."""
    pairs = zip(case["metrics"], base["metrics"], strict=True)
    return max(abs(m[name] - b[name]) / max(1.0, abs(b[name])) for m, b in pairs for name in COMPARED if name in b)


def weights_error(case: dict, base: dict) -> float:
    """Returns the largest relative error of the final weights of the trained models: of the first slice of the first
    stage, which rank 0 has."""
    pairs = [(w.double(), base["weights"][name].double()) for name, w in case["weights"].items()]
    found = [(weight, expected[tuple(map(slice, weight.shape))]) for weight, expected in pairs]
    return max(float(((one - expected).abs() / expected.abs().clamp(min=1.0)).max()) for one, expected in found)

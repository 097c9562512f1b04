"""Tokens and metrics of the embedded model under the strategies of papers, compared with those of one rank.

Three iterations in float32 with seeds 0 to 2: PPO at 1, 2, 4, 5 and 8 ranks and ZeRO 0 to 3, also with adapters
(LoRA), and PPO and GRPO with the embedded mixture of experts, whose models all are mixtures; the other algorithms on
the same numbers of ranks, all of which split groups of three responses. One mpirun for
each number of ranks executes all its cases. Where a token differs, the smallest distance between a random number and
the edge of a token's interval shows whether rounding can explain it.

Cost: ten minutes on two cores for PPO, as long for the others. Command: python -m bench invariance [ALGORITHM ...]
"""

import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.ranks import rows_of_ranks
from bench.rows import Arguments, keep
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


OTHERS = ((2, "interleaving2"), (4, "interleaving1"), (5, "separation"), (8, "separation"), (8, "interleaving2"))
# by default training is split by tp alone, and generation is not
SPLIT = ({"training_tp": "1", "generation_tp": "2"}, {"training_tp": "1", "training_pp": "2", "generation_pp": "2"})
STRATEGIES = ("interleaving1", "interleaving2", "separation", "reallocation")
ZERO = {  # at four ranks; with adapters ZeRO 2 means 1, and 3 is refused
    "ppo": {"flattening": "123", "interleaving1": "2", "interleaving2": "23", "separation": "2"},
    f"ppo{LORA}": {"flattening": "12"} | dict.fromkeys(STRATEGIES, "1"),
}


def _cases(page: str) -> Iterator[Case]:
    """Yields the cases of an algorithm."""
    everywhere = STRATEGIES[: 3 if page == "ppo" else 4] if page in ZERO or page.endswith(MIXTURE) else ()
    places = [(ranks, name) for name in everywhere for ranks in (2, 4, 5, 8)] or OTHERS
    for ranks, name in (*((ranks, "flattening") for ranks in (1, 2, 4, 5, 8)), *places):
        yield Case(ranks, name, algorithm=page)
    for name, stages in ZERO.get(page, {}).items():
        yield from (Case(4, name, {"zero": stage}, page) for stage in stages)
    if STRATEGIES[-1] in everywhere:
        yield from (Case(4, STRATEGIES[-1], options, page) for options in SPLIT)


CASES = [case for page in WORDS for case in _cases(page)]


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


def run_cases(world: Any, _: Path, weights: str, *algorithms: str) -> list[dict]:
    """Runs the cases on each rank. Returns what each of them and its seeds come to.

    weights: a folder for those of the trained models.
    """
    cases = programs(algorithms, world.size)
    world.start_torch(*communicators(program for _, program in cases), threads=1)
    return [run_case(Path(weights), world, case, program, seed) for case, program in cases for seed in SEEDS]


def run_case(folder: Path, world: Any, case: Case, program: Program, seed: int) -> dict[str, Any]:
    from safetensors.torch import save_file

    from tests.edges import Replay
    from tests.runs import RunOf

    config = load(case.algorithm, seed)
    run = RunOf(config, world, program) if world.size > 1 else Replay(config)
    metrics = run.iterations()
    trained, file = program.workload.workflow.trained_models, folder / "-".join([*map(str, case.key), str(seed)])
    weights = {f"{model}.{key}": w.contiguous() for model in trained for key, w in run.weights(model).items()}
    if world.rank == 0:  # all these strategies train all models on rank 0
        save_file(weights, file)
        print(f"{' '.join(map(str, case.key))} seed {seed}", flush=True)
    closest = [min(map(min, rows.values())) for rows in run.distances] if world.size == 1 else None
    return {"key": case.key, "seed": seed, "metrics": metrics, "closest": closest, "weights": str(file)}


def main(arguments: list[str]) -> int:
    parser = Arguments("invariance", __doc__)
    parser.add_some("algorithms", WORDS, "ALGORITHM")
    algorithms = parser.parse_args(arguments).algorithms
    with tempfile.TemporaryDirectory() as name:
        sizes = sorted({case.ranks for case in CASES})
        found = [one for num_ranks in sizes for one in rows_of_ranks(__name__, num_ranks, name, *algorithms)]
        rows = compare(found, algorithms)
    for row in rows:
        for text in row["flips"]:
            print(f"{row['algorithm']}, {row['strategy']}, {row['ranks']} ranks: {text}")
    keep("invariance", rows, KEYS, lambda row: list(WORDS).index(row["algorithm"]))
    return ended("invariance", rows, cases=len(rows), seeds=len(SEEDS))


def compare(found: list[dict], algorithms: Collection[str]) -> list[dict]:
    """Compares the worst of all seeds against one rank: one row per case."""
    named = {(*one["key"], one["seed"]): one for one in found}
    rows = []
    for case in CASES:
        if case.algorithm not in algorithms:
            continue
        alone = Case(1, "flattening", algorithm=case.algorithm)
        pairs = [(named[*case.key, seed], named[*alone.key, seed]) for seed in SEEDS]
        flips = [text for pair in pairs if (text := flip(*pair))]
        row = {
            "bench": "invariance",
            "algorithm": case.algorithm,
            "ranks": case.ranks,
            "strategy": case.strategy,
            "options": case.key[-1],
            "seeds": list(SEEDS),
            "same_tokens": not flips,
            "flips": flips,
            "closest_edge": min(min(base["closest"]) for _, base in pairs),
            "metrics_error": max(metrics_error(*pair) for pair in pairs),
            "weights_error": max(weights_error(*pair) for pair in pairs),
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
    from safetensors.torch import load_file

    expected_of = load_file(base["weights"])
    pairs = [(w.double(), expected_of[name].double()) for name, w in load_file(case["weights"]).items()]
    found = [(weight, expected[tuple(map(slice, weight.shape))]) for weight, expected in pairs]
    return max(float(((one - expected).abs() / expected.abs().clamp(min=1.0)).max()) for one, expected in found)

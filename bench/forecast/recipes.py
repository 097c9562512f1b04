"""Recipes: which strategy to begin with, for a size of model, a number of GPUs and their memory, as forecasts.

For each place every shipped strategy has the best of its options (bench/forecast/tuning.py). The recipe is the first
of STRATEGIES within NEAR of the fastest: forecasts err by more, and the first ones are the simplest. docs/recipes.md is
made from the rows. **Nothing is measured on a GPU**: seconds come from the derived calibrations of A100s, or from
that of --calibration or --device-type.

Cost: about five minutes of a core, on all cores. Command: python -m bench recipes [--device-type h100-80g]
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

from tqdm import tqdm

from bench.columns import FAST, LORA
from bench.forecast.own_ideas import add_machine, calibration_of
from bench.forecast.scan import machine
from bench.forecast.suites import Case, grid_of
from bench.forecast.tuning import Found, best_options
from bench.rows import Arguments, write
from bench.tables import ended
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.config.presets import load
from rlhf_spmd.machines.calibration_file import with_reserve
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cost.memory import most_bytes

MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "llama-70b")
LAYOUTS = ("1x1", "1x8", "2x8", "8x8")
MACHINES = ("a100-40g-derived", "a100-80g-derived")
SLOW = "200g-per-node"  # between nodes
STRATEGIES = ("flattening", "interleaving1", "interleaving2", "reallocation", "separation")  # the simplest first
NEAR = 1.02  # of the fewest seconds
MOST = 12  # forecasts of a grid
SPLIT: dict[str, tuple] = {  # fewer than the scan searches: there are more places
    "training_tp": (1, 2, 4, 8),
    "training_pp": (1, 4),
    "generation_tp": (1, 2, 4, 8),
    "zero": (1, 2, 3),
    "recompute": (False, True),
    "micro_batch": (1, 2, 4, 8),
}
DECODED = {"decode_mini_batches": (4,)}  # of separation, tried last
LENGTHS = ("data.max_prompt=512", "generation.max_new_tokens=1024")
# algorithm -> options of its run. PPO: four models of one size; GRPO: the actor alone.
ALGORITHMS = {"ppo": LENGTHS, "grpo": (*LENGTHS, "reward_function=rlhf_spmd.rewards:numeric_answer")}
ALGORITHMS |= {f"{name}{LORA}": (*words, "lora.rank=32") for name, words in ALGORITHMS.items()}
LORA_MODELS = ("qwen2.5-7b", "qwen2.5-14b", "llama-70b")
LORA_LAYOUTS = ("1x1", "1x8", "8x8")


@dataclass(frozen=True, slots=True)
class Place:
    """What a recipe is for: one of ALGORITHMS, and a machine. One node has no network between nodes."""

    algorithm: str
    preset: str
    layout: str
    machine: str  # its calibration
    network: str = FAST

    @property
    def case(self) -> Case:
        """The forecast of the first strategy here."""
        calibration = self.machine + (f"+{self.network}" if self.network == SLOW else "")
        return Case(self.preset, self.layout, STRATEGIES[0], {}, algorithm=self.page, calibration=calibration)

    @property
    def page(self) -> str:
        """The name of its page."""
        return self.algorithm.partition("+")[0]


def places(machine: str | None = None) -> Iterator[Place]:
    """Yields all places, then those with the slow network (two nodes, the last machine), last those with adapters.

    machine: a calibration instead of MACHINES.
    """
    machines = MACHINES if machine is None else (machine,)
    adapted = [name for name in ALGORITHMS if name.endswith(LORA)]
    full = [name for name in ALGORITHMS if name not in adapted]
    for algorithm, *where in product(full, MODELS, LAYOUTS, machines):
        yield Place(algorithm, *where)
    for algorithm, preset in product(full, MODELS):
        yield Place(algorithm, preset, LAYOUTS[2], machines[-1], SLOW)
    for algorithm, *where in product(adapted, LORA_MODELS, LORA_LAYOUTS, machines):
        yield Place(algorithm, *where)


def row_of(place: Place) -> dict:
    """Returns the row of a place: its recipe, and the seconds of each strategy."""
    config = load(place.preset, ALGORITHMS[place.algorithm], algorithm=place.page)
    workload, (cluster, calibration) = make_workload(config), machine(place.case)
    cluster = with_reserve(cluster, config.reserve, calibration)
    found = {}
    for name in STRATEGIES:
        later = DECODED if name == "separation" else None
        searched = grid(name, cluster.num_devices)
        if place.algorithm.endswith(LORA):  # ZeRO 2 means 1, and 3 is refused
            searched["zero"] = (0, 1)
        tuned = best_options(load_strategy(name), workload, cluster, calibration, searched, later, most=MOST)
        found[name] = _about(name, tuned)
    seconds = {name: about["iteration_s"] for name, about in found.items() if "iteration_s" in about}
    chosen = recipe(seconds)
    return {
        "bench": "recipes",
        "kind": "forecast",
        "algorithm": place.algorithm,
        "preset": place.preset,
        "devices": cluster.num_devices,
        "layout": place.layout,
        "device_type": cluster.device_types[0],
        "device_gib": (cluster.device_bytes(0) or 0) // 2**30,
        "network": place.network,
        "calibration": calibration.name,
        "overrides": " ".join(ALGORITHMS[place.algorithm]),
        "strategy": chosen,
        **(found[chosen] if chosen else {}),
        "strategies": found,
    }


def grid(strategy: str, num_devices: int) -> dict[str, tuple]:
    """Returns the options that are searched over: option -> values."""
    searched = grid_of(strategy, num_devices)
    if strategy == "flattening" and num_devices == 1:
        searched |= dict.fromkeys(("offload", "offload_optimizer"), (False, True))
    if "training_tp" not in searched:
        return searched
    searched |= SPLIT
    if strategy == "separation":  # a quarter or half of the ranks generate
        searched |= {"generation_ranks": searched["generation_ranks"][:2], "micro_batch": (1, 4)}
    return searched


def recipe(seconds: Mapping[str, float]) -> str | None:
    """Returns the first strategy that is within NEAR of the fastest; None if there is none."""
    most_s = NEAR * min(seconds.values(), default=0.0)
    return next((name for name in STRATEGIES if seconds.get(name, float("inf")) <= most_s), None)


def _about(strategy: str, tuned: Found) -> dict:
    """Describes a strategy: seconds, bytes of the fullest device and options, or why it cannot run. Options are
    arguments; beside them zero, micro_batch, and tp of training and of generation are numbers."""
    if tuned.program is None or tuned.forecast is None:
        return {"why_not": tuned.why}
    layouts = tuned.program.placement.layouts
    trained, generated = layouts["actor_train"], layouts["actor_generate"]
    return {
        "iteration_s": tuned.forecast.makespan_s,
        "peak_bytes": most_bytes(tuned.program),
        "zero": trained.zero,
        "tp": [trained.tp, generated.tp],
        "micro_batch": trained.micro_batch,
        "options": arguments(strategy, tuned.options),
    }


def arguments(strategy: str, options: Mapping[str, Any]) -> str:
    """Formats the options of a strategy that differ from their defaults as arguments of the program."""
    known = load_strategy(strategy).parameters
    given = {name: value for name, value in options.items() if value != known[name].default}
    texts = {name: ",".join(value) if isinstance(value, tuple) else str(value).lower() for name, value in given.items()}
    return " ".join(f"strategy.{name}={text}" for name, text in texts.items())


def main(arguments: list[str]) -> int:
    parser = Arguments("recipes", __doc__)
    add_machine(parser)
    calibration = calibration_of(parser.parse_args(arguments))
    every = list(places(calibration))
    with ProcessPoolExecutor() as pool:
        rows = list(tqdm(pool.map(row_of, every), total=len(every), unit="place", leave=False))
    write("recipes", rows)
    return ended("recipes", rows, ok=True, fit=sum(bool(row["strategy"]) for row in rows))

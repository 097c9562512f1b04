"""Suites as data: which presets, layouts and strategies are forecast, over which options, and what is claimed of them.

`python -m bench scan --suite NAME` runs one. Every suite has the same rows (bench/forecast/scan.py) and shows other
columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from bench.baseline_tables import DEEPSPEED_CHAT, PER_TOKEN
from bench.forecast.claims import (
    INTERLEAVING,
    LARGE,
    SMALL,
    Claims,
    ahead_gains,
    ahead_of_zero3,
    eleven_times,
    frozen_halved,
    orders,
    planner_first,
)
from bench.rows import STRATEGIES
from bench.stage_tables import ZERO3
from rlhf_spmd.machines.calibration_file import NETWORKS

PRESETS = ("llama-7b", "llama-13b", "llama-33b", "llama-65b")
LAYOUTS = ("1x8", "2x8", "4x8", "8x8")
DEVICE = "a100-80g"  # a type, and the calibration of this name
H100 = "h100-80g-derived"


@dataclass(frozen=True, slots=True)
class Case:
    """One forecast.

    options: of the strategy; a value that is a tuple is searched over, and so is what grid_of() says of the others.
    exact: these options and no others, whether they fit or not.
    algorithm: name of a page.
    calibration: of the devices, perhaps with a network.
    overrides: options of the run.
    called: the strategy in rows, if not by its name.
    """

    preset: str
    layout: str
    strategy: str
    options: Mapping[str, Any]
    exact: bool = False
    algorithm: str = "ppo"
    calibration: str = DEVICE
    overrides: tuple[str, ...] = ()
    called: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases with options that all have, the claims that are made of their rows, and which of these make `ok`.

    decoded: how many sequences a copy of the actor decodes at once, of which each case has the best; (): as the preset.
    """

    title: str
    cases: tuple[Case, ...]
    claims: Callable[[Sequence[Mapping]], Claims]
    promised: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    decoded: tuple[int, ...] = ()


# ---- what is searched over ------------------------------------------------------------------------------------------

HALVES, EITHER = (1, 2, 4, 8), (False, True)
SPLIT: dict[str, tuple] = {"training_tp": HALVES, "training_pp": HALVES, "generation_tp": HALVES}
SPLIT |= {"zero": (0, 1, 2, 3), "recompute": EITHER, "micro_batch": (2, 8, 32)}
ZEROS, ROWS = {"zero": (0, 1, 2, 3)}, {"micro_batch": (1, 2, 4, 8, 16, 32, 64)}
GRIDS: dict[str, dict[str, tuple]] = {  # strategy -> option -> values
    "flattening": {**ZEROS, "tp": HALVES, "recompute": EITHER, **ROWS},
    **dict.fromkeys(INTERLEAVING, {**ZEROS, **ROWS}),
    "reallocation": SPLIT | {"offload": EITHER},
    "separation": SPLIT | {"ratios": ((), ("actor=1",))},  # models apart where there is room, or all on all ranks
}


def grid_of(strategy: str, num_devices: int) -> dict[str, tuple]:
    """Returns the options that are searched over: option -> values. Points that a strategy refuses cost nothing."""
    if strategy != "separation":
        return dict(GRIDS[strategy])
    return {"generation_ranks": tuple(num_devices * quarters // 4 for quarters in (1, 2, 3)), **GRIDS[strategy]}


def later_grid_of(strategy: str, num_devices: int) -> dict[str, tuple]:
    """Returns the options that are chosen one after another, once those of grid_of() are known."""
    if strategy != "separation":
        return {}
    ranks = tuple(num_devices * eighths // 8 for eighths in range(1, 8)) if num_devices >= 8 else ()
    return {"generation_ranks": ranks, "decode_mini_batches": (1, 4, 8), "in_flight": (1, 4), "stream": (False,)}


def cases(
    presets: Sequence[str], layouts: Sequence[str], options: Mapping[str, Mapping[str, Any]], **more: Any
) -> tuple[Case, ...]:
    """Combines models, layouts, and strategies with their options; `more` are fields of every case."""
    where = product(presets, layouts, options)
    return tuple(Case(preset, layout, name, options[name], **more) for preset, layout, name in where)


TUNED: dict[str, dict[str, Any]] = {name: {} for name in STRATEGIES}  # each with its best options
TWO_PHASE = {"method": "two_phase", "keep": 5}  # of the planner, for the sake of time

# ---- the stages of alignment that generate nothing -------------------------------------------------------------------

STAGES = {"sft": (1024, 1024), "reward_model": (512, 512), "dpo": (512, 512)}  # tokens of prompts, of responses
STAGE_MODELS = ("llama-7b", "llama-13b", "llama-33b", "llama-70b")
FEW_ROWS = {"micro_batch": (1, 2, 4, 8)}  # as many as the planner tries for workloads of MICRO_BATCH
MICRO_BATCH = 4
OF_STAGES: dict[str, dict[str, Any]] = {  # strategy of rows -> options, beside those of grid_of()
    ZERO3: FEW_ROWS | {"zero": 3, "tp": 1, "recompute": False},
    "flattening": FEW_ROWS,
    "reallocation": FEW_ROWS | {"generation_tp": 1},
    "separation": FEW_ROWS | {"generation_tp": HALVES, "ratios": ((),)},  # without a reference, nothing is separate
    "planner": {},
}


def stages(algorithms: Iterable[str], presets: Sequence[str], layouts: Sequence[str]) -> tuple[Case, ...]:
    """Combines stages, models and layouts, the first layout of several nodes also with a slow network."""
    found = []
    for algorithm, preset, layout in product(algorithms, presets, layouts):
        prompt, response = STAGES[algorithm]
        words = f"data.max_prompt={prompt}", f"generation.max_new_tokens={response}", f"micro_batch={MICRO_BATCH}"
        about = {"algorithm": algorithm, "overrides": words}
        slow = [f"{DEVICE}+200g-per-node"] if algorithm == "sft" and layout != "1x8" else []
        for calibration, (name, options) in product([DEVICE, *slow], OF_STAGES.items()):
            if name == ZERO3:
                found.append(Case(preset, layout, "flattening", options, **about, calibration=calibration, called=name))
            elif name != "separation" or algorithm == "dpo":
                found.append(Case(preset, layout, name, options, **about, calibration=calibration))
    return tuple(found)


# ---- other systems, lengths, one iteration ahead ---------------------------------------------------------------------

FEW_SPLITS = {"training_tp": (2, 4, 8), "training_pp": (1, 2), "generation_tp": (2, 4, 8)}
COMPARED = {"llama-7b": LAYOUTS, "llama-13b": LAYOUTS, "llama-33b": LARGE, "llama-65b": LARGE[1:]}  # where they fit
COMPARED_OPTIONS: dict[str, dict[str, Any]] = {  # fewer than elsewhere, for the sake of time
    **{name: {} for name in (DEEPSPEED_CHAT, PER_TOKEN, "flattening", "interleaving1")},
    "reallocation": FEW_SPLITS | {"zero": (0, 2, 3), "micro_batch": (8, 32)},
    "planner": TWO_PHASE,
}
LENGTHS = ("256", "256,0.5", "256,1")  # forecast_lengths; no publication gives sigmas, so these are assumed
SPREAD_OPTIONS: dict[str, dict[str, Any]] = {
    "flattening": {},
    "interleaving1": {},
    "separation": FEW_SPLITS | {"generation_tp": (1, 2, 4), "zero": (1, 3)},
    "reallocation": COMPARED_OPTIONS["reallocation"] | {"recompute": EITHER, "generation_tp": HALVES},
    "planner": TWO_PHASE,  # of the smallest model alone, for the sake of time
}
# Where drawing one iteration ahead is forecast: a place for each size, with devices by published and by counted
# constants; how long responses are, and how often a batch trains.
AHEAD_PLACES = (
    *(("llama-7b", "1x8", DEVICE), ("llama-7b", "4x8", DEVICE), ("llama-13b", "4x8", DEVICE)),
    *(("llama-33b", "8x8", DEVICE), ("llama-70b", "16x8", DEVICE)),
    *(("llama-7b", "1x8", H100), ("llama-13b", "4x8", H100)),
)
AHEAD_WORKS = (  # all responses alike, or a lognormal with this sigma of the logarithm
    ("forecast_lengths=512", "ppo.epochs=1"),
    ("forecast_lengths=512,1.0", "ppo.epochs=1"),
    ("forecast_lengths=512,1.0", "ppo.epochs=2"),
)
AHEAD_STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {  # the strategy in rows -> that of the case, its options
    "flattening": ("flattening", {}),
    "planner": ("planner", TWO_PHASE),
    "one iteration ahead": ("planner", TWO_PHASE | {"ahead": 1}),
}
FAMILY = ("grpo", "rloo", "remax", "reinforce_plus_plus")

SUITES = {
    "all": Suite(
        "every strategy on every model and layout", cases(PRESETS, LAYOUTS, TUNED), orders, ("planner_first",)
    ),
    "quick": Suite("the same for 7B on one and two nodes", cases(PRESETS[:1], SMALL, TUNED), orders),
    "app-memory": Suite(
        "what each strategy holds on a device",
        tuple(
            Case(preset, layout, strategy, {"zero": zero, "micro_batch": 8}, exact=True)
            for preset, layout in (("llama-7b", "1x8"), ("llama-13b", "4x8"))
            for zero, strategy in product((0, 2, 3), ("flattening", "interleaving1", "separation"))
        ),
        frozen_halved,
        ("replicas_halved", "shards_unchanged", "shadows_cost"),
    ),
    "algorithms": Suite(
        "GRPO and its relatives for 7B on one node",
        tuple(case for name in FAMILY for case in cases(PRESETS[:1], LAYOUTS[:1], TUNED, algorithm=name)),
        planner_first,
        ("planner_first",),
    ),
    "stages": Suite(
        "supervised fine-tuning, reward model and DPO, beside ZeRO 3",
        stages(STAGES, STAGE_MODELS, LAYOUTS),
        ahead_of_zero3,
        ("planner_first",),
    ),
    "baselines": Suite(
        "DeepSpeed-Chat, and ZeRO 3 without a hybrid engine, beside the strategies",
        tuple(
            case
            for preset, layouts in COMPARED.items()
            for layout in layouts
            for network in (list(NETWORKS)[:1] if layout == "1x8" else NETWORKS)
            for case in cases([preset], [layout], COMPARED_OPTIONS, calibration=f"{DEVICE}+{network}")
        ),
        eleven_times,  # what comes out is in bench/RESULTS.md
    ),
    "spread": Suite(
        "responses that all have 256 tokens, and responses whose mean is 256 and whose limit is 1,024",
        tuple(
            case
            for preset, layout in zip(PRESETS, LAYOUTS, strict=True)
            for lengths in LENGTHS
            for case in cases([preset], [layout], SPREAD_OPTIONS, overrides=(f"forecast_lengths={lengths}",))
            if case.strategy != "planner" or preset == PRESETS[0]
        ),
        planner_first,
        ("planner_first",),
        ("generation.max_new_tokens=1024",),
        (16, 64),
    ),
    "ahead": Suite(
        "separation one iteration ahead beside flattening and the fastest plan without, by lengths and epochs",
        tuple(
            Case(preset, layout, name, options, calibration=machine, overrides=work, called=row)
            for preset, layout, machine in AHEAD_PLACES
            for work in AHEAD_WORKS
            for row, (name, options) in AHEAD_STRATEGIES.items()
        ),
        ahead_gains,  # what comes out is in bench/RESULTS.md
        overrides=("generation.max_new_tokens=2048", "generation.max_sequences=64"),
    ),
}

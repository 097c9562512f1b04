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
    mixed_ahead,
    orders,
    overlapping,
    planner_first,
    planner_first_for_each,
    planner_first_for_lengths,
    planner_first_on_each,
    traffic_small,
)
from bench.forecast.stages import SEARCHED, STAGES, overrides_of, strategies_of
from bench.rows import STRATEGIES
from bench.stage_tables import ZERO3
from rlhf_spmd.machines.calibration_file import NETWORKS

PRESETS = ("llama-7b", "llama-13b", "llama-33b", "llama-65b")
LAYOUTS = ("1x8", "2x8", "4x8", "8x8")
DEVICE, OTHER_DEVICE = "a100-80g", "h100-80g"  # types, and the calibrations of these names
SLOW = f"{DEVICE}+200g-per-node"
SHARES = ((), ("actor=1",))  # of the ranks that generate: models apart where there is room, or all of them everywhere


@dataclass(frozen=True, slots=True)
class Case:
    """One forecast. nodes: device type of each node, of 8 devices; () : all are DEVICE, as many as the layout says.

    options: of the strategy; a value that is a tuple is searched over, and so is what grid_of() says of the others.
    exact: these options and no others, whether they fit or not. algorithm: name of a page. calibration: of the devices,
    perhaps with a network; "": that of DEVICE. overrides: options of the run. called: the strategy in rows, if not by
    its name.
    """

    preset: str
    layout: str
    strategy: str
    options: Mapping[str, Any]
    nodes: tuple[str, ...] = ()
    exact: bool = False
    algorithm: str = "ppo"
    calibration: str = ""
    overrides: tuple[str, ...] = ()
    called: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """claims(rows): what comes out. promised: the claims that make `ok`. overrides: options of all cases. decoded: how
    many sequences a copy of the actor decodes at once, of which each case has the best; (): as the preset."""

    title: str
    cases: tuple[Case, ...]
    claims: Callable[[Sequence[Mapping]], Claims]
    promised: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    decoded: tuple[int, ...] = ()


def grid_of(strategy: str, num_devices: int) -> dict[str, tuple]:
    """What is searched over: option -> values. Points that a strategy refuses cost nothing."""
    zero, halves, recompute = (0, 1, 2, 3), (1, 2, 4, 8), (False, True)
    if strategy in ("flattening", *INTERLEAVING):
        sliced = {"tp": halves, "recompute": recompute} if strategy == "flattening" else {}
        return {"zero": zero, **sliced, "micro_batch": (1, 2, 4, 8, 16, 32, 64)}
    split = {"training_tp": halves, "training_pp": halves, "generation_tp": halves}
    split |= {"zero": zero, "recompute": recompute, "micro_batch": (2, 8, 32)}
    if strategy == "reallocation":
        return split | {"offload": recompute}
    split["ratios"] = SHARES
    if strategy == "heterogeneous":
        return split
    return {"generation_ranks": tuple(num_devices * quarters // 4 for quarters in (1, 2, 3)), **split}


def later_grid_of(strategy: str, num_devices: int) -> dict[str, tuple]:
    """Options that are chosen one after another, once those of grid_of() are known."""
    if strategy not in ("separation", "heterogeneous"):
        return {}
    ranks = tuple(num_devices * eighths // 8 for eighths in range(1, 8)) if num_devices >= 8 else ()
    splits = {"generation_ranks": ranks} if strategy == "separation" else {}
    return splits | {"decode_mini_batches": (1, 4, 8), "in_flight": (1, 4), "stream": (False,)}


def tuned(presets: Sequence[str], layouts: Sequence[str], strategies: Sequence[str]) -> tuple[Case, ...]:
    """All combinations, each with its best options."""
    return tuple(Case(*names, options={}) for names in product(presets, layouts, strategies))


def stages(algorithms: Iterable[str], presets: Sequence[str], layouts: Sequence[str]) -> tuple[Case, ...]:
    """The stages that generate nothing, on all combinations, and the first one of several nodes on a slow network."""
    return tuple(
        Case(
            preset,
            layout,
            "flattening" if name == ZERO3 else name,
            SEARCHED[name],
            algorithm=algorithm,
            calibration=calibration,
            overrides=overrides_of(algorithm),
            called=name if name == ZERO3 else "",
        )
        for algorithm, preset, layout in product(algorithms, presets, layouts)
        for calibration in ("", SLOW)[: 1 if algorithm != "sft" or layout == "1x8" else 2]
        for name in strategies_of(algorithm)
    )


FAMILY = ("grpo", "rloo", "remax", "reinforce_plus_plus")
MIXED = tuple((DEVICE,) * (4 - number) + (OTHER_DEVICE,) * number for number in (1, 2, 3))
COMPARED = {  # layouts on which a preset fits
    "llama-7b": LAYOUTS,
    "llama-13b": LAYOUTS,
    "llama-33b": LARGE,
    "llama-65b": LARGE[1:],
}
COMPARED_OPTIONS: dict[str, dict[str, Any]] = {  # strategy -> options; fewer than elsewhere, for the sake of time
    DEEPSPEED_CHAT: {},
    PER_TOKEN: {},
    "flattening": {},
    "interleaving1": {},
    "reallocation": {
        "training_tp": (2, 4, 8),
        "training_pp": (1, 2),
        "generation_tp": (2, 4, 8),
        "zero": (0, 2, 3),
        "micro_batch": (8, 32),
    },
    "planner": {"method": "two_phase", "keep": 5},
}
LONG = {"llama-7b": ("1x8", "2x8"), "llama-13b": ("2x8",), "llama-33b": ("4x8",)}  # layouts on which they fit
LONG_SPLIT: dict[str, Any] = {"training_tp": (2, 4, 8), "training_pp": (1, 2), "generation_tp": (1, 2, 4)}
LONG_SPLIT |= {"zero": (1, 3), "micro_batch": (1, 2), "recompute": True}
LONG_OPTIONS: dict[str, dict[str, Any]] = {  # strategy -> options, fewer than elsewhere: each is tried several times
    "flattening": {"zero": (2, 3), "micro_batch": (1, 2, 4)},
    **dict.fromkeys(INTERLEAVING, {"zero": (2, 3), "micro_batch": (1, 2, 4)}),
    **dict.fromkeys(("separation", "reallocation"), LONG_SPLIT),
    "planner": {"method": "two_phase", "keep": 5},
}
SPREAD_IN = dict(zip(PRESETS, LAYOUTS, strict=True))
SPREAD_LENGTHS = ("256", "256,0.5", "256,1")  # forecast_lengths; no publication gives sigmas, so these are assumed
SPREAD_OPTIONS: dict[str, dict[str, Any]] = {  # strategy -> options
    "flattening": {},
    "interleaving1": {},
    "separation": LONG_SPLIT | {"micro_batch": (2, 8, 32), "recompute": (False, True)},
    "reallocation": COMPARED_OPTIONS["reallocation"] | {"recompute": (False, True), "generation_tp": (1, 2, 4, 8)},
    "planner": {"method": "two_phase", "keep": 5},  # of the smallest model alone, for the sake of time
}
# Where drawing one iteration ahead is forecast: a place for each size, with devices by published and by counted
# constants; how long responses are, and how often a batch trains.
AHEAD_PLACES = (
    *(("llama-7b", "1x8", ""), ("llama-7b", "4x8", ""), ("llama-13b", "4x8", ""), ("llama-33b", "8x8", "")),
    *(("llama-70b", "16x8", ""), ("llama-7b", "1x8", f"{OTHER_DEVICE}-derived")),
    ("llama-13b", "4x8", f"{OTHER_DEVICE}-derived"),
)
AHEAD_WORKS = (  # all responses alike, or a lognormal with this sigma of the logarithm
    ("forecast_lengths=512", "ppo.epochs=1"),
    ("forecast_lengths=512,1.0", "ppo.epochs=1"),
    ("forecast_lengths=512,1.0", "ppo.epochs=2"),
)
AHEAD_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {  # the strategy in rows -> that of the case, its options
    "flattening": ("flattening", {}),
    "planner": ("planner", {"method": "two_phase", "keep": 5}),
    "one iteration ahead": ("planner", {"method": "two_phase", "keep": 5, "ahead": 1}),
}
SUITES = {
    "ahead": Suite(
        "separation one iteration ahead beside flattening and the fastest plan without, by lengths and epochs",
        tuple(
            Case(*place, name, options, calibration=machine, overrides=work, called=row)
            for *place, machine in AHEAD_PLACES
            for work in AHEAD_WORKS
            for row, (name, options) in AHEAD_OPTIONS.items()
        ),
        ahead_gains,
        (),  # what comes out is in bench/RESULTS.md
        ("generation.max_new_tokens=2048", "generation.max_sequences=64"),
    ),
    "all": Suite(
        "every strategy on every model and layout",
        tuned(PRESETS, LAYOUTS, STRATEGIES),
        orders,
        ("planner_first",),
    ),
    "quick": Suite("the same for 7B on one and two nodes", tuned(PRESETS[:1], SMALL, STRATEGIES), orders, ()),
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
    "app-communication": Suite(
        "what interleaving moves between devices",
        tuned(PRESETS[:2], ("1x8", "2x8", "4x8"), INTERLEAVING),
        traffic_small,
        ("traffic_below_1_percent",),
    ),
    "app-separation": Suite(
        "separation of large models, against the strategies on all ranks",
        tuned(("llama-33b",), ("4x8",), STRATEGIES[:-1]) + tuned(("llama-65b",), ("8x8",), STRATEGIES[:-1]),
        overlapping,
        ("separation_fits", "generation_and_training_overlap", "sync_below_5_percent"),
    ),
    "app-planner": Suite(
        "which plan is best for 13B on two nodes",
        tuned(("llama-13b",), ("2x8",), STRATEGIES),
        planner_first,
        ("planner_first",),
    ),
    "algorithms": Suite(
        "GRPO and its relatives for 7B on one node",
        tuple(Case("llama-7b", "1x8", strategy, {}, algorithm=name) for name, strategy in product(FAMILY, STRATEGIES)),
        planner_first_for_each,
        ("planner_first",),
    ),
    "stages": Suite(
        "supervised fine-tuning, reward model and DPO, beside ZeRO 3",
        stages(STAGES, ("llama-7b", "llama-13b", "llama-33b", "llama-70b"), LAYOUTS),
        ahead_of_zero3,
        ("planner_first",),
    ),
    "networks": Suite(
        "two networks between nodes, for A100 and H100",
        tuple(
            Case(preset, layout, strategy, {}, calibration=f"{device}+{network}")
            for preset, layout in (("llama-7b", "2x8"), ("llama-13b", "4x8"))
            for device, network in product((DEVICE, OTHER_DEVICE), NETWORKS)
            for strategy in STRATEGIES
        ),
        planner_first_on_each,
        ("planner_first",),
    ),
    "graphs": Suite(
        "ReaL's runtime, which starts every kernel, and this one's CUDA graphs, for A100 and H100",
        tuple(
            Case(preset, layout, strategy, {}, calibration=f"{device}{runtime}")
            for preset, layout in (("llama-7b", "2x8"), ("llama-13b", "4x8"))
            for device, runtime in product((DEVICE, OTHER_DEVICE), ("", "-derived"))
            for strategy in STRATEGIES
        ),
        planner_first_on_each,
        ("planner_first",),
    ),
    "baselines": Suite(
        "DeepSpeed-Chat, and ZeRO 3 without a hybrid engine, beside the strategies",
        tuple(
            Case(preset, layout, strategy, options, calibration=f"{DEVICE}+{network}")
            for preset, layouts in COMPARED.items()
            for layout in layouts
            for network in (list(NETWORKS)[:1] if layout == "1x8" else NETWORKS)
            for strategy, options in COMPARED_OPTIONS.items()
        ),
        eleven_times,
        (),  # what comes out is in bench/RESULTS.md
    ),
    "long-context": Suite(
        "prompts of 1,024 and responses of 7,168 tokens",
        tuple(
            Case(preset, layout, strategy, options)
            for preset, layouts in LONG.items()
            for layout in layouts
            for strategy, options in LONG_OPTIONS.items()
        ),
        planner_first,
        ("planner_first",),
        ("rollout_batch=128", "mini_batch=32", "data.max_prompt=1024", "generation.max_new_tokens=7168"),
        (4, 16),
    ),
    "spread": Suite(
        "responses that all have 256 tokens, and responses whose mean is 256 and whose limit is 1,024",
        tuple(
            Case(preset, layout, strategy, options, overrides=(f"forecast_lengths={lengths}",))
            for preset, layout in SPREAD_IN.items()
            for lengths in SPREAD_LENGTHS
            for strategy, options in SPREAD_OPTIONS.items()
            if strategy != "planner" or preset == PRESETS[0]
        ),
        planner_first_for_lengths,
        ("planner_first",),
        ("generation.max_new_tokens=1024",),
        (16, 64),
    ),
    "four-70b": Suite(
        "four models of 70B on 16 nodes",
        tuple(
            Case("llama-70b", "16x8", strategy, COMPARED_OPTIONS.get(like, {}))
            for strategy, like in zip(STRATEGIES, (*STRATEGIES[:3], "reallocation", *STRATEGIES[4:]), strict=True)
        ),
        planner_first,
        ("planner_first",),
    ),
    "heterogeneous": Suite(
        "two types of device: how many of each, and which of them generates",
        tuple(
            Case("llama-13b", "4x8", strategy, options, nodes)
            for nodes in MIXED
            for strategy, options in (
                ("flattening", {}),
                ("heterogeneous", {"generation_device": DEVICE}),
                ("heterogeneous", {"generation_device": OTHER_DEVICE}),
            )
        ),
        mixed_ahead,
        (),  # what comes out is in the README
    ),
}

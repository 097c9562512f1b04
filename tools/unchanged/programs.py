"""The goldens of `tools unchanged` that need no run: programs, and plans of the planner, as lists of lines.

A line says what an instruction, a message or a forecast is in words of this file, not by class names or field names. So
whoever renames a class or a field changes this file with it, and the lines stay as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.machines.calibration_file import load_calibration
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import DEVICE_BYTES, Cluster, Node
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import call_s
from rlhf_spmd.plan.cost.memory import least_bytes, peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.instructions import (
    BUCKET_BYTES,
    Agree,
    Instruction,
    Load,
    Offload,
    Post,
    Program,
    Run,
    Transfer,
    Wait,
)
from rlhf_spmd.plan.program.pipeline import expand, usual_number
from rlhf_spmd.plan.program.reallocate import Reallocation
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.search.planner import SearchResult, search
from rlhf_spmd.plan.text.strategy_module import strategy_source
from tests.reallocations import lower_bound_bytes

DEVICES = ("a100-80g", "h100-80g")  # the second one is for clusters of two types
NUM_TOKENS = 3  # of a generation in stages, where its steps are listed
KEPT = 5  # plans of a search that are listed


@dataclass(frozen=True, slots=True)
class Case:
    """A program.

    layout: NxG, or two of them joined by + for nodes of two types.
    words: overrides of the preset.
    """

    strategy: str
    layout: str
    preset: str
    options: Mapping[str, str]
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join(["program", self.preset, self.strategy, self.layout, *options, *self.words])


SEVEN = "llama-7b"
SPLIT = {"training_tp": "4", "training_pp": "2", "zero": "1"}
STAGES = {"training_tp": "2", "training_pp": "2"}
CASES = (
    Case("flattening", "1x1", "tiny", {}),
    Case("flattening", "1x4", "tiny", {"zero": "1"}, ("ppo.old_logprobs=recompute",)),
    Case("flattening", "1x5", "tiny", {"zero": "2"}, ("samples_per_prompt=2",)),
    Case("flattening", "2x4", "tiny", {"zero": "3"}),
    Case("flattening", "8x8", SEVEN, {"zero": "3", "micro_batch": "2"}),
    Case("interleaving1", "1x3", "tiny", {}),
    Case("interleaving1", "2x4", "tiny", {"zero": "3", "ratios": "reference=1/4,reward=3/4"}),
    Case("interleaving2", "1x4", "tiny", {}, ("generation.top_k=20",)),
    Case("interleaving2", "1x8", SEVEN, {}),  # which does not fit: a finding
    Case("separation", "1x2", "tiny", {}, ("models.reward=", "reward_function=some.module:score")),
    Case("separation", "1x8", "tiny", {"in_flight": "1"}),
    Case("separation", "1x4", "tiny", {}, ("ppo.whiten=batch",)),
    Case("separation", "2x8", SEVEN, {"generation_tp": "2", **STAGES, "zero": "1"}),
    Case("separation", "8x8", SEVEN, {"training_tp": "8", "zero": "1", "recompute": "true", "tokens": "8192"}),
    Case("reallocation", "1x4", "tiny", STAGES),
    Case("reallocation", "1x4", "tiny", {"training_tp": "2", "offload": "true", "recompute": "true", "tokens": "256"}),
    Case("reallocation", "1x4", "tiny", {"generation_pp": "2", "training_tp": "1", "zero": "2"}),
    Case("reallocation", "4x8", SEVEN, {"generation_tp": "2", **SPLIT, "inference_pp": "2"}),
    Case("heterogeneous", "1x4+1x4", "tiny", {"in_flight": "2"}),
    Case("heterogeneous", "1x8+2x8", SEVEN, {"generation_tp": "2", **SPLIT}),
)
PLANNED = (("tiny", "1x4"), (SEVEN, "1x8"))


def goldens() -> dict[str, list[str]]:
    """Returns the lines of every case by its name."""
    found = {str(case): lines_of(case) for case in CASES}
    return found | {f"plan {preset} {layout}": plan_lines(preset, layout) for preset, layout in PLANNED}


def lines_of(case: Case) -> list[str]:
    """Returns a program, what `check` finds about it, its bytes and its seconds."""
    config = presets.load(case.preset, [*case.words, *(f"strategy.{k}={v}" for k, v in case.options.items())])
    strategy = load_strategy(case.strategy)
    program = strategy.compile(make_workload(config), cluster_of(case.layout), config.strategy)
    lines = [*placement_lines(program.placement), *program_lines(program)]
    if any(layout.pp > 1 for layout in program.placement.layouts.values()):
        whole = expand(program, lambda step: usual_number(program, step), lambda step: NUM_TOKENS)
        lines += [f"in stages: {line}" for line in program_lines(whole)]
    return [*lines, *findings(program), *forecast_lines(program)]


def cluster_of(layout: str) -> Cluster:
    """Returns the cluster of a layout in the notation of Case."""
    nodes: list[Node] = []
    for part, device in zip(layout.split("+"), DEVICES, strict=False):
        num_nodes, num_devices = map(int, part.split("x"))
        nodes += [Node(num_devices, device, DEVICE_BYTES[device])] * num_nodes
    return Cluster(tuple(nodes))


def calibration_of(cluster: Cluster) -> Calibration:
    """Returns the constants of the first type of device, and beside them those of the second one where the cluster has
    it."""
    first, *others = (load_calibration(device) for device in DEVICES[: len(cluster.device_types)])
    devices = dict(first.devices)
    for other in others:
        devices |= other.devices
    return replace(first, devices=devices)


# ---- what a program is -----------------------------------------------------------------------------------------------


def placement_lines(placement: Placement) -> Iterator[str]:
    """Yields the layout of every call, and what overlaps."""
    for call, layout in placement.layouts.items():
        yield f"placed {call}: {layout_text(layout)}"
    joint = "; ".join(" ".join(calls) for calls in placement.joint)
    yield f"own first: {' '.join(placement.own_first)}, joint: {joint}"
    yield f"stream: {placement.stream}, in flight: {placement.in_flight}"


def layout_text(layout: Layout) -> str:
    """Returns everything that a layout says."""
    grid = f"dp {layout.dp} pp {layout.pp} tp {layout.tp} zero {layout.zero}"
    limits = f"micro-batch {layout.micro_batch} tokens {layout.tokens}"
    return f"ranks {list(layout.ranks)} {grid} {limits} recompute {layout.recompute} offload {layout.offload}"


def program_lines(program: Program) -> Iterator[str]:
    """Yields groups, transfers with their messages, and the instructions of every rank."""
    for name, ranks in program.groups.items():
        yield f"group {name}: {list(ranks)}"
    for name, pairs in program.pairs.items():
        yield f"pairs of {name}: {pairs}"
    for number, transfer in enumerate(program.transfers):
        yield from transfer_lines(number, transfer)
    for rank, steps in enumerate(program.instructions):
        for position, step in enumerate(steps):
            yield f"rank {rank} {position}: {instruction_text(program, rank, step)}"
        yield f"rank {rank} trains {list(program.trained(rank))}"
        for (model, shard), calls in program.copies(rank).items():
            tp, stage = f"{shard.tp_index} of {shard.tp}", f"{shard.stage} of {shard.pp}"
            yield f"rank {rank} copy of {model} slice {tp} stage {stage}: {list(calls)}"


def instruction_text(program: Program, rank: int, step: Instruction) -> str:
    """Returns everything that an instruction does on a rank."""
    match step:
        case Run():
            columns = program.columns_of(step, rank)
            where = f"columns {columns.start}-{columns.stop} group {step.group} reader {step.consumer}"
            what = f"mini-batch {step.mini_batch} epoch {step.epoch} phase {step.phase or None} unit {step.micro_batch}"
            keys = f"reads {list(program.reads(step, rank))} makes {list(program.makes(step, rank))}"
            call = program.workload.workflow.call(step.call)
            return f"run {call.name} {call.kind} {call.function} of {call.model} {what} {where} {keys}"
        case Post() | Wait():
            peers = sorted(program.transfers[step.transfer].peers(rank))
            return f"{'post' if isinstance(step, Post) else 'wait'} transfer {step.transfer} peers {peers}"
        case Load() | Offload():
            return f"{'load' if isinstance(step, Load) else 'offload'} {step.model}"
        case Agree():
            return f"agree {step.what}"
    raise AssertionError(f"what kind of instruction is {step}?")


def transfer_lines(number: int, transfer: Transfer) -> Iterator[str]:
    """Yields a transfer, its messages, and the route of every weight in it."""
    about = f"model {transfer.model} mini-batch {transfer.mini_batch} call {transfer.call}"
    yield f"transfer {number}: {transfer.what}, {about} ranks {list(transfer.ranks)}"
    for one in transfer.messages:
        size = f"columns {one.columns.start}-{one.columns.stop} bytes {one.num_bytes} parts {one.num_parts}"
        yield f"transfer {number} message {one.source} -> {one.destination} {list(one.keys)} {size}"
    if transfer.reallocation is not None:
        yield from (f"transfer {number} {line}" for line in reallocation_lines(transfer.reallocation))


def reallocation_lines(moved: Reallocation) -> Iterator[str]:
    """Yields what stays on its rank, what travels along which chain, and in how many buckets."""
    yield f"weights {moved.num_bytes} bytes, {lower_bound_bytes(moved)} at least"
    for copy in moved.local:
        rank = moved.targets[copy.target][0]
        yield f"local rank {rank} target {copy.target} {copy.piece.weight} {copy.piece.box}"
    for route in moved.routes:
        buckets = moved.buckets(route, BUCKET_BYTES)
        yield f"route {list(route.ranks)} {route.num_numbers} numbers in {len(buckets)} buckets"
        yield from (f"route {list(route.ranks)} {piece.weight} {piece.box}" for piece in route.pieces)


# ---- what is said about it -------------------------------------------------------------------------------------------


def findings(program: Program) -> list[str]:
    """Returns what `check` says, in its order."""
    return [f"finding {finding}" for finding in check(program)]


LATER = "copies with adapters"  # a kind of bytes that earlier commits lack


def forecast_lines(program: Program) -> Iterator[str]:
    """Yields bytes of every rank, and seconds; to the last bit."""
    for rank in program.cluster.ranks:
        static, working = static_bytes(program, rank), working_bytes(program, rank)
        sizes = ", ".join(f"{name} {size!r}" for name, size in (static | working).items() if size or name != LATER)
        peak, least = peak_bytes(static, working), least_bytes(program, rank)
        yield f"rank {rank} bytes: {sizes}; peak {peak!r} least {least!r}"
    found = forecast(program, calibration_of(program.cluster))
    yield f"simulated {found.makespan_s!r} s"
    yield from (f"simulated {call}: {seconds!r} s" for call, seconds in call_s(found).items())
    for rank, times in enumerate(found.times):
        yield f"simulated rank {rank}: {len(times)} instructions, sum of ends {sum(end for _, end in times)!r}"


def plan_lines(preset: str, layout: str) -> list[str]:
    """Returns what the exact search proposes, and the module of its best plan but for its imports."""
    workload, cluster = make_workload(presets.load(preset, ())), cluster_of(layout)
    found: SearchResult = search(workload, cluster, calibration_of(cluster), keep=KEPT)
    lines = [f"gap {found.gap!r}, {found.num_scored} scored"]
    for number, plan in enumerate(found.plans):
        seconds = f"simulated {plan.forecast.makespan_s!r} s, by calls {plan.call_level_s!r} s"
        lines.append(f"plan {number} {plan.name}: {seconds}")
        lines += [f"plan {number} {line}" for line in placement_lines(plan.placement)]
    source = strategy_source(found.plans[0].placement, workload, cluster, "The best plan.")
    return lines + [line for line in source.splitlines() if line and not line.startswith(("from ", "import "))]

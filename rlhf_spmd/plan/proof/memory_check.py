"""Findings of `check` about memory: whether a program fits the devices; and about ranks and options without use."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_spmd.plan.calls import Compute, Train
from rlhf_spmd.plan.cost.memory import least_bytes, offloaded_bytes, peak_bytes, room, static_bytes, working_bytes
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.program.instructions import Program, Run

MORE_ROOM = "raise the ZeRO stage, tp or pp, split the models, lower micro_batch (or tokens), or use more devices"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about a program; with an `error` it must not start."""

    severity: str  # error | warning
    message: str
    rank: int | None = None
    position: int | None = None  # of the instruction in the rank's list

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", instruction {self.position}"
        return f"{self.severity}: {where + ': ' if where else ''}{self.message}"


def memory(program: Program, resident: Program | None = None) -> list[Finding]:
    """Returns a finding for peaks of bytes beyond what a program may use of a device's memory, one for all equal ranks.
    It is an error, unless a smaller KV cache makes it fit: then generation decodes fewer sequences at the same time.

    resident: the program whose models are in memory all the time; None: this one.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank in program.cluster.ranks:
        limit, whole = program.cluster.usable_bytes(rank), program.cluster.device_bytes(rank)
        static, working = static_bytes(resident or program, rank), working_bytes(program, rank)
        need = peak_bytes(static, working)
        if limit is None or whole is None or need <= limit:
            continue
        stays = sum(static.values()) - static.pop("offloaded")
        text = (
            f"{_gib(need)}, and may use {_gib(limit)} ({_gib(whole)} less {_gib(whole - limit)} that are reserved): "
            f"resident {_gib(stays)} ({_parts(static)}), at the peak also {_parts(working)}"
        )
        if least_bytes(program, rank, resident) > limit:
            severity, what = "error", MORE_ROOM
        else:
            severity, what = "warning", _decoded(program, rank, resident)
        ranks_of.setdefault((severity, f"{text}; {what}"), []).append(rank)
    found = [Finding(severity, f"{_ranks(ranks, 'need')} {text}") for (severity, text), ranks in ranks_of.items()]
    return found + host_memory(resident or program)


def host_memory(program: Program) -> list[Finding]:
    """Returns an error for each node that is known to have less memory than its ranks offload."""
    found = []
    for index, node in enumerate(program.cluster.nodes):
        if node.host_bytes is not None and (need := offloaded_bytes(program, index)) > node.host_bytes:
            text = f"node {index} offloads {_gib(need)} to its host, which has {_gib(node.host_bytes)} for it"
            found.append(Finding("error", f"{text}; offload less, raise the ZeRO stage, or use more nodes"))
    return found


def _decoded(program: Program, rank: int, resident: Program | None) -> str:
    """Says how many sequences a rank decodes at a time for want of memory."""
    calls = [
        call for call in program.workload.workflow.generate_calls if rank in program.placement.layouts[call.name].ranks
    ]
    number = min(room(program, call, rank, resident) for call in calls)
    return f"generation decodes {number} of {program.workload.max_sequences} sequences at a time"


def _ranks(ranks: Sequence[int], do: str) -> str:
    """Returns the beginning of a sentence: `rank 7 needs`, `ranks 6-7 need`."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranks(tuple(ranks))} {do}{'s' * (len(ranks) == 1)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _parts(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if _gib(size) != _gib(0)) or "nothing"


def vain_streaming(program: Program) -> list[str]:
    """Returns why the streaming that a placement asks for has no effect, as predicates; empty if it has one."""
    reasons, workload = [], program.workload
    rows = "samples_per_prompt" + " x episode.rows" * (workload.episode_rows > 1)
    asks = program.placement.stream and not program.placement.ahead
    if asks and not program.placement.streams(workload):
        whole = [call for call in workload.workflow.calls if workload.needs_batch(call)]
        names = ", ".join(call.name for call in whole)
        fix = "choose options by which a mini-batch is enough"
        if workload.rounds == 1 and any(isinstance(call, Compute) and call.scope == "group" for call in whole):
            fix = f"make mini_batch a multiple of {rows}, {workload.samples_per_prompt}"
        reasons.append(f"is off, because {names} needs all rows of the iteration before the first step; {fix}")
    if asks and workload.num_mini_batches == 1:
        reasons.append(
            "has nothing to overlap, because an iteration is one mini-batch (mini_batch = rollout_batch x "
            f"{rows} = {workload.mini_batch}): lower mini_batch or raise rollout_batch"
        )
    return reasons


def waste(program: Program) -> list[Finding]:
    """Returns warnings: streaming without effect, ranks without rows or calls, slow layouts."""
    texts = [f"streaming {text}" for text in vain_streaming(program)]
    for call in program.workload.workflow.placed_calls:
        layout = program.placement.layouts[call.name]
        empty = [rank for rank in layout.ranks if not layout.columns(rank, program.workload.mini_batch)]
        if empty:
            texts.append(
                f"{call.name}: {_ranks(empty, 'get')} no sequence, because mini_batch "
                f"{program.workload.mini_batch} is smaller than dp {layout.dp}; raise mini_batch"
            )
        shape = program.workload.models[call.model]
        if isinstance(call, Train) and layout.zero == 2 and shape is not None and shape.adapters is not None:
            text = f"ZeRO 2 means 1 for {call.model}, because gradients of adapters are summed whole"
            texts.append(f"{call.name}: {text}; use zero=1")
        types = {program.cluster.nodes[program.cluster.node_of(rank)].device for rank in layout.ranks}
        if len(types) > 1:
            texts.append(f"{call.name} runs on {' and '.join(sorted(types))}: the slower type sets the pace")
        if any(len({program.cluster.node_of(r) for r in layout.tensor_ranks(rank)}) > 1 for rank in layout.ranks):
            text = "tensor-parallel ranks on several nodes exchange activations in every layer; lower tp"
            texts.append(f"{call.name}: {text}")
    idle = [
        rank
        for rank, instructions in enumerate(program.instructions)
        if not any(isinstance(s, Run) for s in instructions)
    ]
    if idle:
        texts.append(f"{_ranks(idle, 'run')} no call in this placement")
    return [Finding("warning", text) for text in texts]

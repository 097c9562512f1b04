"""Whether a program fits the devices, and what it wastes; findings are what `check` says."""

from dataclasses import dataclass

from rlhf_spmd.plan.cost.memory import least_bytes, peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.program.instructions import Program, Run


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know about a program; an `error` makes it unfit to start."""

    severity: str  # error | warning
    message: str
    rank: int | None = None
    position: int | None = None  # of the instruction in the rank's list

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", instruction {self.position}"
        return f"{self.severity}: {where + ': ' if where else ''}{self.message}"


def memory(program: Program) -> list[Finding]:
    """The peak of bytes against the device; one finding per set of equal ranks. Too much is an error, unless a smaller
    KV cache makes it fit: then generation decodes fewer sequences at the same time."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank in program.cluster.ranks:
        limit = program.cluster.device_bytes(rank)
        static, working = static_bytes(program, rank), working_bytes(program, rank)
        need = peak_bytes(static, working)
        if limit is None or need <= limit:
            continue
        stays = sum(static.values()) - static["offloaded"]
        text = (
            f"{_gib(need)} at most: {_gib(stays)} all the time ({_parts(static)}), besides {_parts(working)}; "
            f"the device has {limit >> 30} GiB"
        )
        severity = "error" if least_bytes(program, rank) > limit else "warning"
        found.setdefault((severity, text), []).append(rank)
    mends = {
        "error": "raise the ZeRO stage, tp or pp, split the models, lower micro_batch, or use more devices",
        "warning": "generation will decode fewer sequences at a time than generation.max_sequences allows",
    }
    return [
        Finding(severity, f"ranks {format_ranks(tuple(ranks))} need {text}: {mends[severity]}")
        for (severity, text), ranks in found.items()
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _parts(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size) or "nothing"


def vain_streaming(program: Program) -> list[str]:
    """What is wrong with the streaming that a placement asks for, as predicates; empty if nothing is."""
    found, workload = [], program.workload
    if program.placement.stream and not program.placement.streams(workload):
        whole = [call for call in workload.workflow.calls if workload.needs_batch(call)]
        names = ", ".join(call.name for call in whole)
        mend = "choose options by which a mini-batch is enough"
        if any(call.scope == "group" for call in whole):
            mend = f"make mini_batch a multiple of samples_per_prompt, {workload.samples_per_prompt}"
        found.append(f"is off, because {names} needs all rows of the iteration before the first step; {mend}")
    if program.placement.stream and workload.num_mini_batches == 1:
        found.append(
            "has nothing to overlap, because an iteration is one mini-batch (mini_batch = rollout_batch x "
            f"samples_per_prompt = {workload.mini_batch}): lower mini_batch or raise rollout_batch"
        )
    return found


def waste(program: Program) -> list[Finding]:
    """Ranks without work, and streaming that was asked for and cannot be."""
    found = [Finding("warning", f"streaming {text}") for text in vain_streaming(program)]
    for call in program.workload.workflow.placed_calls:
        layout = program.placement.layouts[call.name]
        empty = [rank for rank in layout.ranks if not layout.columns(rank, program.workload.mini_batch)]
        if empty:
            text = (
                f"{call.name}: ranks {format_ranks(tuple(empty))} get no sequence, because mini_batch "
                f"{program.workload.mini_batch} is smaller than dp {layout.dp}; raise mini_batch"
            )
            found.append(Finding("warning", text))
        types = {program.cluster.nodes[program.cluster.node_of(rank)].device for rank in layout.ranks}
        if len(types) > 1:
            text = f"{call.name} runs on {' and '.join(sorted(types))}: the slower type sets the pace"
            found.append(Finding("warning", text))
        if any(len({program.cluster.node_of(r) for r in layout.tensor_ranks(rank)}) > 1 for rank in layout.ranks):
            text = f"{call.name}: tensor-parallel ranks on several nodes exchange activations in every layer; lower tp"
            found.append(Finding("warning", text))
    idle = [rank for rank, steps in enumerate(program.instructions) if not any(isinstance(s, Run) for s in steps)]
    if idle:
        found.append(Finding("warning", f"ranks {format_ranks(tuple(idle))} run no call in this placement"))
    return found

"""A program as text: the ranks of each call, the transfers, and the instructions of one rank in an iteration."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from rlhf_spmd.plan.calls import Train, is_gate
from rlhf_spmd.plan.cost.memory import (
    STATIC,
    WORKING,
    num_trained,
    offloaded_bytes,
    packed_bytes,
    peak_bytes,
    static_bytes,
    working_bytes,
)
from rlhf_spmd.plan.layout import Layout, format_ranks, group_name
from rlhf_spmd.plan.placement import group_of
from rlhf_spmd.plan.program.instructions import Program, Run, Transfer, Wait
from rlhf_spmd.plan.program.pipeline import is_pipelined, largest_number, order_of_passes
from rlhf_spmd.plan.proof import token_lags
from rlhf_spmd.plan.proof.memory_check import Finding

NUM_INSTRUCTIONS = 40  # longer lists are shortened


def format_bytes(num: float) -> str:
    """Formats bytes: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num < 1024 or unit == "GiB":
            return f"{num:.0f} {unit}" if unit == "B" else f"{num:.1f} {unit}"
        num /= 1024
    raise AssertionError


def table(rows: Sequence[tuple[str, ...]], columns: int | None = None) -> str:
    """Aligns the columns of rows, of which the first is the heading.

    columns: how wide lines may be (None: no limit). The columns of a wider table are put in several tables, each of
        which begins with the first column.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    ends = list(accumulate(2 + width for width in widths))  # an indent, and two spaces between columns
    if columns is not None and ends[-1] > columns and len(widths) > 2:
        fit = max(2, bisect_right(ends[:-1], columns))
        parts = [row[:fit] for row in rows], [(row[0], *row[fit:]) for row in rows]
        return "\n\n".join(table(part, columns) for part in parts)
    lines = []
    for row in (rows[0], ["-" * width for width in widths], *rows[1:]):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def show_program(program: Program, *, title: str, rank: int, columns: int | None = None) -> str:
    """Lists the placement as a table, the transfers, bytes per rank, and the instructions of one rank.

    columns: of `table`.
    """
    workload, placement = program.workload, program.placement
    parts = [title, table(_calls(program), columns), "", "Transfers per iteration"]
    parts.append(_transfers(program, columns))
    parts += ["", "Gradients summed per iteration", table(_gradients(program), columns)]
    parts += [
        "",
        "Memory per rank: resident, and what calls need besides at their peak",
        memory_table(program, columns),
    ]
    for call in workload.workflow.placed_calls:
        layout = placement.layouts[call.name]
        if isinstance(call, Train) and is_pipelined(call, layout):
            num = largest_number(replace(layout, tokens=None), workload, call)
            parts += [
                "",
                f"Stages of {call.name} with {num} micro-batches (F forward, B backward)",
                _stages(layout, num),
            ]
    parts += ["", f"What rank {rank} executes in one iteration", _instructions(program, rank)]
    return "\n".join(parts)


def chain_note(program: Program, meets: str) -> str:
    """Says in a line which ranks begin an iteration while a model still trains in the one before, if a placement asks
    for that, or why none does; empty if it does not ask.

    meets: what all ranks do together after every iteration.
    """
    workflow, placement = program.workload.workflow, program.placement
    if not placement.chain or placement.ahead or not workflow.train_calls:
        return ""
    if not program.chains:
        return f"iterations do not overlap, because all ranks meet after each of them: {meets}"
    first = workflow.placed_calls[0].name
    still, ranks = set(workflow.trained_models), placement.layouts[first].ranks
    for rank in ranks:
        begins = False
        for step in program.instructions[rank]:
            begins = begins or isinstance(step, Run)
            if isinstance(step, Wait) and not (begins and step.delay):
                still.discard(str(program.transfers[step.transfer].model))
        still -= set(program.trained(rank))
    names = [model for model in workflow.trained_models if model in still]
    when = (
        f"while {' and '.join(names)} still train{'s' * (len(names) == 1)}" if names else "when all models have trained"
    )
    where = f"rank{'s' * (len(ranks) > 1)} {format_ranks(tuple(sorted(ranks)))}"
    return f"iterations follow one another: {first} of the next one begins on {where} {when}"


def lag_note(program: Program) -> str:
    """Says how old tokens are where responses take several iterations; else empty."""
    if not program.workload.partial_steps:
        return ""
    num, old = program.workload.num_parts, token_lags.most(program)
    return f"a response takes at most {num} iterations, and its tokens are at most {old} iterations old when they train"


def show_evaluation(program: Program, columns: int | None = None) -> str:
    """Lists where the calls of an evaluation run, and what moves between them.

    columns: of `table`.
    """
    workload = program.workload
    samples = workload.samples_per_prompt // workload.episode_rows
    title = f"An evaluation of {workload.rollout_batch} prompts, with {samples} sample{'s' * (samples > 1)} of each"
    parts = ["", title, table(_calls(program), columns)]
    return "\n".join([*parts, *(["", _transfers(program, columns)] if program.transfers else [])])


def _calls(program: Program) -> list[tuple[str, ...]]:
    """Returns where each call runs, and how many rows each rank has."""
    workload, placement = program.workload, program.placement
    rows: list[tuple[str, ...]] = [("call", "model", "ranks", "layout", "group", "sequences per rank")]
    for call in workload.workflow.calls:
        for layout in (placement.layouts[site] for site in placement.sites(call, workload.workflow)):
            num = 1 if is_gate(call) else workload.num_mini_batches
            counts = {len(layout.columns(r, workload.mini_batch)) * num for r in layout.ranks}
            share = str(counts.pop()) if len(counts) == 1 else f"{min(counts)}-{max(counts)}"
            meets = group_of(call, layout, workload, placement, layout.ranks[0])
            group = group_name(meets) if meets else "-"
            rows.append((call.name, call.model or "-", format_ranks(layout.ranks), str(layout), group, share))
    return rows


def _stages(layout: Layout, num_micro_batches: int) -> str:
    """Returns the passes of each stage in their order."""
    lines = []
    for stage in range(layout.pp):
        passes = order_of_passes(stage, layout.pp, num_micro_batches, train=True)
        words = " ".join(f"{kind[0].upper()}{index}" for kind, index in passes[:NUM_INSTRUCTIONS])
        more = f" ... {len(passes) - NUM_INSTRUCTIONS} more" if len(passes) > NUM_INSTRUCTIONS else ""
        ranks = format_ranks(tuple(sorted(rank for rank in layout.ranks if layout.coordinates(rank)[1] == stage)))
        lines.append(f"  stage {stage} (ranks {ranks}): {words}{more}")
    return "\n".join(lines)


def _transfers(program: Program, columns: int | None) -> str:
    """Returns the transfers, with one line for the same move of all mini-batches."""
    if not program.transfers:
        return "  nothing moves between layouts: 0 bytes"
    same: dict[tuple[str, tuple[tuple[int, int, range], ...]], list[Transfer]] = {}
    for transfer in program.transfers:
        ends = tuple((message.source, message.destination, message.columns) for message in transfer.messages)
        same.setdefault((transfer.what, ends), []).append(transfer)
    rows: list[tuple[str, ...]] = [("what", "times", "messages", "bytes")]
    for what, found in [*((what, found) for (what, _), found in same.items()), ("all", program.transfers)]:
        messages, num_bytes = sum(t.num_messages for t in found), sum(t.num_bytes for t in found)
        rows.append((what, str(len(found)), str(messages), f"{num_bytes:,}"))
    return table(rows, columns)


def _gradients(program: Program) -> list[tuple[str, ...]]:
    """Returns bytes that n replicas send of their gradients, each: (n - 1) / n of them per optimizer step, and as much
    again where all have to have the sums."""
    workload = program.workload
    rows: list[tuple[str, ...]] = [("model", "replicas", "steps", "bytes sent per rank")]
    steps = workload.epochs * workload.num_mini_batches
    for call in workload.workflow.train_calls:
        shape = workload.models.get(call.model)
        if shape:
            layout = program.placement.layouts[call.name]
            largest = max(num_trained(shape, layout.shard(rank)) for rank in layout.model_ranks(layout.ranks[0]))
            num_bytes = (2 - (layout.zero > 0)) * (layout.dp - 1) * 4 * largest * steps // layout.dp
            rows.append((call.model, str(layout.dp), str(steps), f"{num_bytes:,}"))
    return rows


def call_table(
    program: Program, seconds: Mapping[str, float], limits: Mapping[str, str], columns: int | None = None
) -> str:
    """Lists, for each placed call, its forecast seconds, what limits it, and where it runs.

    columns: of `table`.
    """
    cells: list[tuple[str, ...]] = [("call", "seconds", "limited by", "ranks", "layout")]
    for name, layout in program.placement.layouts.items():
        ranks = format_ranks(layout.ranks)
        ranks = ranks if len(ranks) < 30 else f"{len(layout.ranks)} of them"
        cells.append((name, f"{seconds[name]:.4g}", limits[name], ranks, str(layout)))
    return table(cells, columns)


def memory_table(program: Program, columns: int | None = None) -> str:
    """Lists the bytes of ranks by kind, with the reserve and the memory of their devices: a row for each set of equal
    ranks.

    columns: of `table`.
    """
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank in program.cluster.ranks:
        static, working = static_bytes(program, rank), working_bytes(program, rank)
        whole = program.cluster.device_bytes(rank) or 0
        ends = peak_bytes(static, working), whole - (program.cluster.usable_bytes(rank) or 0), whole
        ranks_of.setdefault((*static.values(), *working.values(), *ends), []).append(rank)
    used = [any(column) for column in zip(*ranks_of, strict=True)]
    rows: list[tuple[str, ...]] = [("ranks", *STATIC, *WORKING, "peak", "reserve", "device")]
    for values, ranks in ranks_of.items():
        rows.append((format_ranks(tuple(ranks)), *(format_bytes(value) if value else "-" for value in values)))
    shown = [(row[0], *(cell for cell, is_used in zip(row[1:], used, strict=True) if is_used)) for row in rows]
    most = max(offloaded_bytes(program, node) for node in range(len(program.cluster.nodes)))
    told = f"\nWhat is offloaded takes up to {format_bytes(most)} of a host's memory, pinned for GPUs" if most else ""
    return table(shown, columns) + told


def show_packed(program: Program) -> str:
    """Says how many bytes packed copies of weights may take, with which ranks generate on CPUs; empty: there are
    none."""
    if set(program.cluster.device_types) != {"cpu"}:
        return ""
    most = max(packed_bytes(program, rank) for rank in program.cluster.ranks)
    if not most:
        return ""
    return f"\nWhile a rank generates, packed copies of weights may take up to {format_bytes(most)} more"


def _instructions(program: Program, rank: int) -> str:
    lines = []
    for position, instruction in enumerate(program.instructions[rank]):
        text = str(instruction) + " of the iteration before" * instruction.delay
        if not isinstance(instruction, Run) and hasattr(instruction, "transfer"):
            text += f": {program.describe(instruction.transfer)}"
        lines.append(f"  {position:4}  {text}")
    if len(lines) > NUM_INSTRUCTIONS:
        half = NUM_INSTRUCTIONS // 2
        lines = [*lines[:half], f"  ...   {len(lines) - 2 * half} more", *lines[-half:]]
    return "\n".join(lines)


def show_findings(findings: Sequence[Finding]) -> str:
    """Lists every finding, on a line of its own."""
    return "\n".join(["", "Findings", *(f"  {finding}" for finding in findings)])


def verdict(findings: Sequence[Finding]) -> str:
    """Says whether a program may start, in one line."""
    proved = "messages arrive, collectives match; no deadlock."
    errors = sum(one.severity == "error" for one in findings)
    warnings = len(findings) - errors
    told = [f"{num} {word}{'s' * (num > 1)}" for num, word in ((errors, "error"), (warnings, "warning")) if num]
    if errors:
        return f"Refused: {' and '.join(told)}."
    return f"Passed with {told[0]}: {proved}" if told else f"No findings: {proved}"

"""Proves that a program cannot deadlock (blocking.py), reads nothing that is not there, and fits the devices."""

from dataclasses import dataclass

from rlhf_spmd.plan.blocking import deadlocks, misorders
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.plan.memory import forecast_bytes
from rlhf_spmd.plan.placement import group_of
from rlhf_spmd.plan.program import Agree, Instruction, Message, Post, Program, Run, Transfer, Wait


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


def check(program: Program) -> list[Finding]:
    """Every finding about a program, errors first. What the later checks rely on is checked first."""
    found = _declarations(program) or _structure(program)
    if not found:
        hangs = [*misorders(program), *deadlocks(program)]
        found = [*_runs(program), *_data(program), *_weights(program)]
        found += [Finding("error", text, rank, position) for rank, position, text in hangs]
    found += _memory(program) + _idle(program)
    return sorted(found, key=lambda finding: finding.severity != "error")


# ---- what the instructions refer to --------------------------------------------------------------------------------


def _declarations(program: Program) -> list[Finding]:
    """Lists, groups and transfers stay inside the world, and transfers carry what the workflow makes."""
    size, workflow = program.cluster.num_devices, program.workload.workflow
    found = []
    if len(program.instructions) != size:
        found.append(f"there are {len(program.instructions)} instruction lists for {size} ranks")
    for name, ranks in program.groups.items():
        if not ranks or list(ranks) != sorted(set(ranks)) or not all(0 <= rank < size for rank in ranks):
            found.append(f"group {name!r} is no ascending list of ranks of this world (0-{size - 1}): {list(ranks)}")
    made = {key for call in workflow.calls for key in call.outputs}
    for number, transfer in enumerate(program.transfers):
        unknown = [key for key in transfer.keys if key not in made]
        if transfer.model is None and (unknown or not all(message.keys for message in transfer.messages)):
            found.append(f"transfer {number} carries {', '.join(unknown) or 'no keys'}, which no call makes")
        if transfer.mini_batch not in (None, *range(program.workload.num_mini_batches)):
            found.append(f"transfer {number} moves mini-batch {transfer.mini_batch}, which does not exist")
        if transfer.model is not None and workflow.train_call(transfer.model) is None:
            found.append(f"transfer {number} carries the weights of {transfer.model}, which no call trains")
        for message in transfer.messages:
            ends = (message.source, message.destination)
            if not all(0 <= rank < size for rank in ends) or ends[0] == ends[1]:
                found.append(f"transfer {number} has a message from rank {ends[0]} to rank {ends[1]}")
    return [Finding("error", text) for text in found]


def _structure(program: Program) -> list[Finding]:
    """Instructions name calls, groups and transfers that the rank takes part in; each transfer is used once."""
    found = []
    for rank, instructions in enumerate(program.instructions):
        posted: set[int] = set()
        waited: set[int] = set()
        for position, step in enumerate(instructions):
            if isinstance(step, Run):
                texts = _run_problems(program, step, rank)
            elif isinstance(step, Post | Wait):
                texts = _transfer_problems(program, step, rank, posted, waited)
                (posted if isinstance(step, Post) else waited).add(step.transfer)
            else:
                texts = [] if isinstance(step, Agree) else [f"{step!r} is no instruction"]
            found += [Finding("error", text, rank, position) for text in texts]
        for number, transfer in enumerate(program.transfers):
            if rank not in transfer.ranks:
                continue
            peers = format_ranks(tuple(sorted(transfer.peers(rank))))
            if number not in posted:
                text = f"never posts transfer {number} ({program.describe(number)}): ranks {peers} would wait for ever"
                found.append(Finding("error", text, rank))
            elif number not in waited:
                text = f"posts transfer {number} but never waits for it: its buffers could be freed in flight"
                found.append(Finding("error", text, rank))
    return found


def _run_problems(program: Program, step: Run, rank: int) -> list[str]:
    """What is wrong with a Run, taken by itself."""
    workload, layouts = program.workload, program.placement.layouts
    call = next((call for call in workload.workflow.calls if call.name == step.call), None)
    if call is None:
        return [f"{step}: the workflow has no call {step.call}"]
    site = step.reader or step.call
    if site not in layouts or (call.kind == "compute") != (step.reader is not None):
        return [f"{step}: {site} has no place to run at"]
    found = []
    if rank not in layouts[site].ranks:
        found.append(f"{step} runs here, but its place is ranks {format_ranks(layouts[site].ranks)}")
    group = group_of(call, layouts[site], workload, program.placement)
    if step.group is not None and rank not in program.groups.get(step.group, ()):
        found.append(f"{step} enters a group that this rank is not in")
    elif step.group != group:
        found.append(f"{step} enters {step.group or 'no group'}, but {_meant(group)}")
    elif group is not None and program.groups[group] != tuple(sorted(layouts[site].ranks)):
        there = format_ranks(program.groups[group])
        found.append(f"{step} enters a group of ranks {there}, but {_meant(group)}")
    return found


def _meant(group: str | None) -> str:
    return f"its collectives need all of {group}" if group else "it computes alone there"


def _transfer_problems(program: Program, step: Post | Wait, rank: int, posted: set[int], waited: set[int]) -> list[str]:
    """What is wrong with a Post or Wait after those that came before it."""
    if not 0 <= step.transfer < len(program.transfers):
        return [f"{step} does not exist"]
    found = []
    if rank not in program.transfers[step.transfer].ranks:
        found.append(f"{step} has nothing for this rank")
    if step.transfer in (posted if isinstance(step, Post) else waited):
        found.append(f"{step} appears twice")
    if isinstance(step, Wait) and step.transfer not in posted:
        found.append(f"{step} comes before its Post: it would wait for a message that it never started")
    return found


# ---- what is computed, read and sent -------------------------------------------------------------------------------


def _runs(program: Program) -> list[Finding]:
    """Every rank computes each row of its calls exactly once, trains in order, and agrees last."""
    found = []
    for rank, instructions in enumerate(program.instructions):
        due = _due(program, rank)
        done: set[tuple] = set()
        last: dict[str, tuple[int, int]] = {}
        trained: set[str] = set()
        for position, step in enumerate(instructions):
            if not isinstance(step, Run):
                continue
            call = program.workload.workflow.call(step.call)
            cells = _cells(program, step, rank)
            if cells & done:
                found.append(Finding("error", f"{step} is there a second time", rank, position))
            elif not cells <= due.keys():
                found.append(Finding("error", f"{step} belongs to no iteration of this workload", rank, position))
            elif call.kind == "train":
                turn = (step.epoch, step.mini_batch)
                if turn < last.get(step.call, turn):
                    epoch, mini_batch = last[step.call]
                    text = f"{step} comes after epoch {epoch} mini-batch {mini_batch}"
                    found.append(Finding("error", text, rank, position))
                last[step.call] = turn
                trained.add(call.model)
            elif call.model in trained:
                text = f"{step} comes after {call.model} began to train here: its weights are no longer the old ones"
                found.append(Finding("error", text, rank, position))
            done |= cells
        never = dict.fromkeys(text for cell, text in due.items() if cell not in done)
        found += [Finding("error", f"never executes {text}", rank) for text in never]
        found += _agreement(instructions, rank)
    return found


def _agreement(instructions: tuple[Instruction, ...], rank: int) -> list[Finding]:
    """An iteration ends with its one Agree, where the ranks exchange their numbers."""
    agrees = [position for position, step in enumerate(instructions) if isinstance(step, Agree)]
    if not agrees:
        return [Finding("error", "never agrees with the other ranks: its list must end with one Agree", rank)]
    last = len(instructions) - 1
    wrong = [position for position in agrees if position != last]
    text = f"is not the end of the list (instruction {last}); an iteration has one Agree, the last instruction"
    return [Finding("error", f"{instructions[position]} {text}", rank, position) for position in wrong]


def _cells(program: Program, step: Run, rank: int) -> set[tuple]:
    """What a Run computes: a train step as a whole, any other call row by row (a row is a mini-batch and a column)."""
    if program.workload.workflow.call(step.call).kind == "train":
        return {(step.call, step.epoch, step.mini_batch, step.columns)}
    rows = program.mini_batches_of(step)
    columns = program.columns_of(step, rank) or (None,)  # a rank without rows still runs the call, for its collectives
    return {(step.call, step.reader, row, column) for row in rows for column in columns}


def _due(program: Program, rank: int) -> dict[tuple, str]:
    """The cells that an iteration needs on a rank, each with the Run that it belongs to in words."""
    workload, placement = program.workload, program.placement
    due = {}
    for call in workload.workflow.calls:
        for site in placement.sites(call, workload.workflow):
            if rank not in placement.layouts[site].ranks:
                continue
            if call.kind == "train":
                steps = [
                    Run(call.name, None, mini_batch, epoch)
                    for epoch in range(workload.epochs)
                    for mini_batch in range(workload.num_mini_batches)
                ]
            else:
                steps = [Run(call.name, reader=site if call.kind == "compute" else None)]
            due |= {cell: str(step) for step in steps for cell in _cells(program, step, rank)}
    return due


def _data(program: Program) -> list[Finding]:
    """Every Run finds the rows it reads, every sender has what it sends."""
    found = []
    workload = program.workload
    rows = range(workload.num_mini_batches)
    for rank, instructions in enumerate(program.instructions):
        held = {(key, row): set(range(workload.mini_batch)) for key in workload.workflow.given for row in rows}
        for position, step in enumerate(instructions):
            if isinstance(step, Run):
                columns = set(program.columns_of(step, rank))
                for key in workload.workflow.call(step.call).inputs:
                    for row in program.mini_batches_of(step):
                        lacking = columns - held.get((key, row), set())
                        if lacking:
                            found.append(_unread(program, rank, position, key, row, lacking))
                            break
            elif isinstance(step, Post):
                transfer = program.transfers[step.transfer]
                for message in transfer.messages:
                    if message.source == rank:
                        found += _unsent(step, message, program.mini_batches_of(transfer), held, position)
            for key, row, columns in _made(program, step, rank):
                held.setdefault((key, row), set()).update(columns)
    return found


def _made(program: Program, step: Instruction, rank: int) -> list[tuple[str, int, range]]:
    """Keys, mini-batches and columns that a rank holds once it has passed an instruction."""
    if isinstance(step, Run):
        columns, call = program.columns_of(step, rank), program.workload.workflow.call(step.call)
        return [(key, row, columns) for key in call.outputs for row in program.mini_batches_of(step)]
    if isinstance(step, Wait):
        transfer = program.transfers[step.transfer]
        rows = program.mini_batches_of(transfer)
        here = [message for message in transfer.messages if message.destination == rank]
        return [(key, row, message.columns) for message in here for key in message.keys for row in rows]
    return []


def _unread(program: Program, rank: int, position: int, key: str, row: int, lacking: set[int]) -> Finding:
    """Says which later instruction brings the lacking columns."""
    step = program.instructions[rank][position]
    why = "nothing brings them"
    for number, later in enumerate(program.instructions[rank][position:], start=position):
        made = _made(program, later, rank)
        if any((name, index) == (key, row) and lacking & set(columns) for name, index, columns in made):
            why = f"they come only by instruction {number}, {later}"
            break
    names = format_ranks(tuple(sorted(lacking)))
    text = f"{step} reads {key} of columns {names}, which are not here: {why}"
    return Finding("error", text, rank, position)


def _unsent(step: Post, message: Message, rows: range, held: dict, position: int) -> list[Finding]:
    columns = set(message.columns)
    lacking = [key for key in message.keys if any(columns - held.get((key, row), set()) for row in rows)]
    text = f"{step} sends {', '.join(lacking)} to rank {message.destination} before it is here"
    return [Finding("error", text, message.source, position)] if lacking else []


def _weights(program: Program) -> list[Finding]:
    """Every copy outside of where its model trains gets the new weights once, when nothing uses the old ones."""
    found = []
    workflow, layouts = program.workload.workflow, program.placement.layouts
    trains = [call for call in workflow.calls if call.kind == "train"]
    for train in trains:
        moves = [(number, t) for number, t in enumerate(program.transfers) if t.model == train.model]
        arrivals = [message.destination for _, move in moves for message in move.messages]
        for rank in program.cluster.ranks:
            times = arrivals.count(rank)
            if rank in layouts[train.name].ranks or train.model not in program.copies(rank):
                continue
            if times != 1:
                text = f"gets the new weights of {train.model} {times} times an iteration instead of once"
                found.append(Finding("error", text, rank))
        for number, move in moves:
            for rank in move.ranks:
                found += _early(program, rank, number, move, layouts[train.name].ranks)
    return found


def _early(program: Program, rank: int, number: int, move: Transfer, home: tuple[int, ...]) -> list[Finding]:
    """Weights that leave a rank without them, or move while a call may still use or change them."""
    post = program.instructions[rank].index(Post(number))
    if rank not in home and any(message.source == rank for message in move.messages):
        text = f"Post transfer {number} sends the weights of {move.model}, which trains on ranks {format_ranks(home)}"
        return [Finding("error", text, rank, post)]
    for position, step in enumerate(program.instructions[rank][post:], start=post):
        if isinstance(step, Run) and program.workload.workflow.call(step.call).model == move.model:
            text = f"Post transfer {number} moves the weights of {move.model} before instruction {position}, {step}"
            return [Finding("error", text, rank, post)]
    return []


# ---- whether it fits -----------------------------------------------------------------------------------------------


def _memory(program: Program) -> list[Finding]:
    """Static bytes per rank against the device; one finding per set of equal ranks."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank in program.cluster.ranks:
        limit = program.cluster.device_bytes(rank)
        need = sum(forecast_bytes(program, rank).values())
        if limit is not None and need > limit:
            found.setdefault((need, limit), []).append(rank)
    return [
        Finding(
            "error",
            f"ranks {format_ranks(tuple(ranks))} need {need / 2**30:.1f} GiB for weights, gradients and optimizer "
            f"state, but the device has {limit / 2**30:.0f} GiB: raise the ZeRO stage, split the models, or use more "
            "devices",
        )
        for (need, limit), ranks in found.items()
    ]


def _idle(program: Program) -> list[Finding]:
    """Ranks without work, and streaming that was asked for and cannot be."""
    found = []
    if program.placement.stream and not program.placement.streams(program.workload):
        text = "streaming is off, because ppo.whiten=batch needs all advantages before the first step; use mini_batch"
        found.append(Finding("warning", text))
    if program.placement.stream and program.workload.num_mini_batches == 1:
        text = "nothing streams, because an iteration is one mini-batch: lower mini_batch or raise rollout_batch"
        found.append(Finding("warning", text))
    for call in program.workload.workflow.placed_calls:
        layout = program.placement.layouts[call.name]
        empty = [rank for rank in layout.ranks if not layout.columns(rank, program.workload.mini_batch)]
        if empty:
            text = (
                f"{call.name}: ranks {format_ranks(tuple(empty))} get no sequence, because mini_batch "
                f"{program.workload.mini_batch} is smaller than dp {layout.dp}; raise mini_batch"
            )
            found.append(Finding("warning", text))
    idle = [rank for rank, steps in enumerate(program.instructions) if not any(isinstance(s, Run) for s in steps)]
    if idle:
        found.append(Finding("warning", f"ranks {format_ranks(tuple(idle))} run no call in this placement"))
    return found

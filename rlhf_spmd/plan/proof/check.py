"""Proves that a program cannot deadlock (deadlock.py), reads nothing that is not there, and fits the devices."""

from collections import Counter

from rlhf_spmd.plan.layout import format_ranks, group_name
from rlhf_spmd.plan.placement import group_of, ranks_of
from rlhf_spmd.plan.program.compile import offloaded
from rlhf_spmd.plan.program.instructions import (
    Agree,
    Instruction,
    Load,
    Message,
    Offload,
    Post,
    Program,
    Run,
    Transfer,
    Wait,
)
from rlhf_spmd.plan.program.pipeline import bodies
from rlhf_spmd.plan.proof.deadlock import hangs
from rlhf_spmd.plan.proof.memory_check import Finding, memory, waste


def check(program: Program) -> list[Finding]:
    """Every finding about a program, errors first. What the later checks rely on is checked first."""
    found = _declarations(program) or _structure(program)
    if not found:
        found = [*_runs(program), *_data(program), *_weights(program), *_offloads(program), *_pipelines(program)]
        found += [Finding("error", text, rank, position) for rank, position, text in hangs(program)]
    found += memory(program) + waste(program)
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
        if transfer.call is not None:
            found.append(f"transfer {number} goes between the stages of a call, which a program leaves to its Runs")
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
                texts = [] if isinstance(step, Agree | Load | Offload) else [f"{step!r} is no instruction"]
            found += [Finding("error", text, rank, position) for text in texts]
        for number, transfer in enumerate(program.transfers):
            if rank not in transfer.ranks:
                continue
            if number not in posted:
                peers = format_ranks(tuple(sorted(transfer.peers(rank))))
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
    site = step.consumer or step.call
    if site not in layouts or (call.kind == "compute") != (step.consumer is not None):
        return [f"{step}: {site} has no place to run at"]
    place = ranks_of(call, layouts[site])
    if rank not in place:
        return [f"{step} runs here, but its place is ranks {format_ranks(place)}"]
    found = []
    meets = group_of(call, layouts[site], workload, program.placement, rank)
    group = group_name(meets) if meets else None
    if step.group is not None and rank not in program.groups.get(step.group, ()):
        found.append(f"{step} enters a group that this rank is not in")
    elif step.group != group:
        found.append(f"{step} enters {step.group or 'no group'}, but {_meant(group)}")
    elif group is not None and program.groups[group] != tuple(sorted(meets)):
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
    return {(step.call, step.consumer, row, column) for row in rows for column in columns}


def _due(program: Program, rank: int) -> dict[tuple, str]:
    """The cells that an iteration needs on a rank, each with the Run that it belongs to in words."""
    workload, placement = program.workload, program.placement
    due = {}
    for call in workload.workflow.calls:
        for site in placement.sites(call, workload.workflow):
            if rank not in ranks_of(call, placement.layouts[site]):
                continue
            if call.kind == "train":
                steps = [
                    Run(call.name, None, mini_batch, epoch)
                    for epoch in range(workload.epochs)
                    for mini_batch in range(workload.num_mini_batches)
                ]
            else:
                steps = [Run(call.name, consumer=site if call.kind == "compute" else None)]
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
                columns = set(program.columns_seen(step, rank))
                for key in program.reads(step, rank):
                    for row in program.mini_batches_of(step):
                        lacking = columns - held.get((key, row), set())
                        if lacking:
                            found.append(_unread(program, rank, position, key, row, lacking))
                            break
            elif isinstance(step, Post):
                transfer = program.transfers[step.transfer]
                for message in transfer.sent_by(rank):
                    found += _unsent(step, message, program.mini_batches_of(transfer), held, position)
            for key, row, columns in _made(program, step, rank):
                held.setdefault((key, row), set()).update(columns)
    return found


def _made(program: Program, step: Instruction, rank: int) -> list[tuple[str, int, range]]:
    """Keys, mini-batches and columns that a rank holds once it has passed an instruction."""
    if isinstance(step, Run):
        columns = program.columns_of(step, rank)
        return [(key, row, columns) for key in program.makes(step, rank) for row in program.mini_batches_of(step)]
    if isinstance(step, Wait):
        transfer = program.transfers[step.transfer]
        rows = program.mini_batches_of(transfer)
        here = transfer.received_by(rank)
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
        arrivals = Counter(target for _, move in moves if move.reallocation for target in move.reallocation.targets)
        for rank in program.cluster.ranks:
            for model, shard in program.copies(rank):
                times = arrivals[rank, shard]
                if model == train.model and times != 1:
                    text = f"gets the new weights of {model} ({shard}) {times} times an iteration instead of once"
                    found.append(Finding("error", text, rank))
        for number, move in moves:
            for rank in move.ranks:
                found += _early(program, rank, number, move)
            first = {route.ranks[0] for route in move.reallocation.routes} if move.reallocation else set()
            wrong = first - set(layouts[train.name].ranks)
            if wrong:
                training = format_ranks(layouts[train.name].ranks)
                text = f"Post transfer {number} sends the weights of {move.model}, which trains on ranks {training}"
                found.append(Finding("error", text, min(wrong)))
    return found


def _early(program: Program, rank: int, number: int, move: Transfer) -> list[Finding]:
    """Weights that move while a call may still use or change them."""
    post = program.instructions[rank].index(Post(number))
    for position, step in enumerate(program.instructions[rank][post:], start=post):
        if isinstance(step, Run) and program.workload.workflow.call(step.call).model == move.model:
            text = f"Post transfer {number} moves the weights of {move.model} before instruction {position}, {step}"
            return [Finding("error", text, rank, post)]
    return []


def _offloads(program: Program) -> list[Finding]:
    """Calls with weights that wait in host memory run between a Load and an Offload of them."""
    found = []
    for rank, steps in enumerate(program.instructions):
        away = offloaded(program.workload, program.placement, rank)
        loaded: set[str] = set()
        for position, step in enumerate(steps):
            if isinstance(step, Load | Offload):
                text = f"{step}: {step.model} does not wait in host memory here" if step.model not in away else ""
                text = text or (f"{step} comes twice" if (step.model in loaded) == isinstance(step, Load) else "")
                found += [Finding("error", text, rank, position)] if text else []
                (loaded.add if isinstance(step, Load) else loaded.discard)(step.model)
            elif isinstance(step, Run):
                absent = [model for model, calls in away.items() if step.call in calls and model not in loaded]
                found += [Finding("error", f"{step} comes before Load {m}", rank, position) for m in absent]
        found += [Finding("error", f"never offloads {model} again", rank) for model in sorted(loaded)]
    return found


def _pipelines(program: Program) -> list[Finding]:
    """The body of every call with stages, for the numbers of micro-batches or tokens that stand for all."""
    found = {}
    for call, number, small in bodies(program):
        for rank, _, text in hangs(small):
            words = f"{call.name} with {number} {'tokens' if call.kind == 'generate' else 'micro-batches'}: {text}"
            found.setdefault((call.name, rank), Finding("error", words, rank))
    return list(found.values())

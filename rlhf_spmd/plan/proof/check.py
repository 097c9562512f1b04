"""Proves that a program cannot deadlock (deadlock.py), reads nothing that is not there, and fits the devices.

Of programs whose iterations overlap (program/chain.py, program/ahead.py) one iteration alone is checked like any other
program, and some iterations in a row for deadlocks and for the versions of weights.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, product

from rlhf_spmd.plan.calls import Compute, Generate, Train, is_gate
from rlhf_spmd.plan.layout import HOST, format_ranks, group_name
from rlhf_spmd.plan.placement import group_of, ranks_of
from rlhf_spmd.plan.program.ahead import is_late
from rlhf_spmd.plan.program.chain import in_a_row, ranks_of_state, unrolled
from rlhf_spmd.plan.program.compile import offloaded
from rlhf_spmd.plan.program.instructions import Agree, Instruction, Load, Offload, Post, Program, Run, Wait
from rlhf_spmd.plan.program.pipeline import bodies
from rlhf_spmd.plan.program.rounds import prefix, repeated
from rlhf_spmd.plan.proof.deadlock import Hang, enough, hangs
from rlhf_spmd.plan.proof.memory_check import Finding, memory, waste
from rlhf_spmd.plan.proof.round_versions import round_problems
from rlhf_spmd.plan.proof.token_lags import lag_problems

Problem = Hang | tuple[int | None, int | None, str]  # rank, position of the instruction, what is wrong
Held = dict[tuple[str, int], set[int]]  # data key and mini-batch -> columns
Cell = tuple[object, ...]  # what one Run computes, or a row of it


def check(program: Program, beside: Program | None = None) -> list[Finding]:
    """Checks a program and returns every finding, errors first. What the later checks rely on is checked first.

    beside: the training program of the same run, if this one runs between its iterations, whose weights and optimizer
        state stay in memory meanwhile.
    """
    problems = _problems(program)
    errors = [Finding("error", text, rank, position) for rank, position, text in problems]
    wasted = waste(program) if beside is None else []
    return sorted([*errors, *memory(program, beside), *wasted], key=lambda finding: finding.severity != "error")


def _problems(program: Program) -> list[Problem]:
    """Returns the problems of a program's lists."""
    num, iteration = 0, program
    if problems := [*_declarations(program), *_delays(program)]:
        return problems
    if program.overlaps:
        num, iteration = enough(program), unrolled(program, 1)
    problems += _structure(iteration)
    is_sound = not problems
    for find in (_runs, _data, _weights, _offloads, _pipelines) if is_sound else ():
        problems += find(iteration)
    if program.overlaps:
        places = [[place for place, _, _ in in_a_row(program, rank, 1)] for rank in program.cluster.ranks]
        problems = [(r, at if r is None or at is None else places[r][at], text) for r, at, text in problems]
    if is_sound:
        problems += [
            *_versions(program, max(1, num)),
            *hangs(program, num),
            *_rounds(program, num),
            *lag_problems(program),
        ]
    return problems


def _rounds(program: Program, num: int) -> list[Problem]:
    """Checks the lists of each number of rounds after which a batch may be full; that all of them end is known. Returns
    the problems of the first lists that have any."""
    last = program.workload.rounds
    for rounds in range(1, last + 1) if last > 1 else ():
        some = prefix(program, rounds)
        ending = hangs(some, num) if rounds < last else ()
        if problems := [(rank, None, text) for rank, _, text in (*ending, *round_problems(some, rounds))]:
            return [(rank, at, f"if {rounds} of {last} rounds are executed: {text}") for rank, at, text in problems]
    return []


# ---- what the instructions refer to --------------------------------------------------------------------------------


def _declarations(program: Program) -> Iterator[Problem]:
    """Lists, groups and transfers stay inside the world, and transfers carry what the workflow makes."""
    size, workflow = program.cluster.num_devices, program.workload.workflow
    if len(program.instructions) != size:
        yield None, None, f"there are {len(program.instructions)} instruction lists for {size} ranks"
    for name, ranks in program.groups.items():
        if not ranks or list(ranks) != sorted(set(ranks)) or not all(0 <= rank < size for rank in ranks):
            text = f"group {name!r} is not an ascending list of ranks of this world (0-{size - 1}): {list(ranks)}"
            yield None, None, text
    made = {key for call in workflow.calls for key in call.outputs}
    for number, transfer in enumerate(program.transfers):
        messages, model = transfer.messages, transfer.model
        unknown = [key for key in transfer.keys if key not in made]
        bare = any(not message.keys and not message.through_host for message in messages)
        is_trained = model is None or workflow.train_call(model) is not None
        by_host = transfer.communicator == HOST
        texts = {
            f"carries {', '.join(unknown) or 'no keys'}, which no call makes": model is None and (unknown or bare),
            f"carries the weights of {model}, which no call trains": not is_trained,
            "goes between the stages of a call, which a program leaves to its Runs": transfer.call is not None,
            "goes partly through host memory": len({message.through_host for message in messages}) > 1,
            "goes through host memory, for which there is no group": by_host and program.host_group is None,
            "goes through host memory, that carries rows only": by_host and model is not None,
            f"moves mini-batch {transfer.mini_batch}, which does not exist": transfer.mini_batch
            not in (None, *range(program.workload.num_mini_batches)),
        }
        for message in messages:
            source, destination = message.source, message.destination
            is_outside = not 0 <= min(source, destination) <= max(source, destination) < size
            texts[f"has a message from rank {source} to rank {destination}"] = is_outside or source == destination
        yield from ((None, None, f"transfer {number} {text}") for text, applies in texts.items() if applies)


def _delays(program: Program) -> Iterator[Problem]:
    """Checks that nothing belongs to the iteration before but, in a chain, metrics and perhaps new weights, and one
    iteration ahead what trains."""
    weights = {number for number, transfer in enumerate(program.transfers) if transfer.model is not None}
    for rank, instructions in enumerate(program.instructions):
        for position, instruction in enumerate(instructions):
            metrics = isinstance(instruction, Agree) and not instruction.ranks
            may = metrics or (isinstance(instruction, Post | Wait) and instruction.transfer in weights)
            late, least, most = getattr(instruction, "delay", 0), program.chains * metrics, program.chains * may
            if program.placement.ahead:
                least = most = is_late(program, instruction)
            if not least <= late <= most:
                text = f"{instruction} comes {late} iterations late: in a chain metrics do by one, new weights may"
                yield rank, position, f"{text}; one iteration ahead all that trains does"


def _structure(program: Program) -> Iterator[Problem]:
    """Checks that instructions name calls, groups and transfers that the rank takes part in, and that each transfer is
    used once."""
    for rank, instructions in enumerate(program.instructions):
        before: set[Instruction] = set()
        for position, instruction in enumerate(instructions):
            texts: Iterable[str] = ()
            if isinstance(instruction, Run):
                texts = _run_problems(program, instruction, rank)
            elif isinstance(instruction, Post | Wait):
                texts = _transfer_problems(program, instruction, rank, before)
            elif not isinstance(instruction, Agree | Load | Offload):
                texts = [f"{instruction!r} is not an instruction"]
            yield from ((rank, position, text) for text in texts)
            before.add(instruction)
        for number, transfer in enumerate(program.transfers):
            if rank in transfer.ranks and Post(number) not in before:
                peers = format_ranks(tuple(sorted(transfer.peers(rank))))
                text = f"never posts transfer {number} ({program.describe(number)}): ranks {peers} would wait for ever"
                yield rank, None, text
            elif rank in transfer.ranks and Wait(number) not in before:
                text = f"posts transfer {number} but never waits for it: its buffers could be freed in flight"
                yield rank, None, text


def _run_problems(program: Program, run: Run, rank: int) -> list[str]:
    """Returns the problems of a Run by itself."""
    workload, layouts = program.workload, program.placement.layouts
    call = next((call for call in workload.workflow.calls if call.name == run.call), None)
    if call is None:
        return [f"{run}: the workflow has no call {run.call}"]
    site = run.consumer or run.call
    if site not in layouts or (isinstance(call, Compute)) != (run.consumer is not None):
        return [f"{run}: {site} has no ranks"]
    place = ranks_of(call, layouts[site])
    if rank not in place:
        return [f"{run} runs here, but its ranks are {format_ranks(place)}"]
    meets = group_of(call, layouts[site], workload, program.placement, rank)
    group = group_name(meets) if meets else None
    meant = f"its collectives need all of {group}" if group else "it computes alone there"
    if run.group is not None and rank not in program.groups.get(run.group, ()):
        return [f"{run} enters a group that this rank is not in"]
    if run.group != group:
        return [f"{run} enters {run.group or 'no group'}, but {meant}"]
    if meets and group is not None and program.groups[group] != tuple(sorted(meets)):
        return [f"{run} enters a group of ranks {format_ranks(program.groups[group])}, but {meant}"]
    return []


def _transfer_problems(
    program: Program, instruction: Post | Wait, rank: int, before: set[Instruction]
) -> Iterator[str]:
    """Yields the problems of a Post or Wait, given those before it."""
    number = instruction.transfer
    if not 0 <= number < len(program.transfers):
        yield f"{instruction} does not exist"
    elif rank not in program.transfers[number].ranks:
        yield f"{instruction} has nothing for this rank"
    if instruction in before:
        yield f"{instruction} appears twice"
    if isinstance(instruction, Wait) and Post(number) not in before:
        yield f"{instruction} comes before its Post: it would wait for a message that it never started"


# ---- what is computed, read and sent -------------------------------------------------------------------------------


def _runs(program: Program) -> Iterator[Problem]:
    """Checks that every rank computes each row of its calls exactly once, trains in order, and ends with its Agree."""
    agreeing = ranks_of_state(program.workload, program.placement)
    for rank, instructions in enumerate(program.instructions):
        due = _due(program, rank)
        done: set[Cell] = set()
        last: dict[str, tuple[int, int]] = {}
        trained: set[str] = set()
        for position, instruction in enumerate(instructions):
            if not isinstance(instruction, Run):
                continue
            call = program.workload.workflow.call(instruction.call)
            cells = _cells(program, instruction, rank)
            if cells & done:
                yield rank, position, f"{instruction} is there a second time"
            elif not cells <= due.keys():
                yield rank, position, f"{instruction} belongs to no iteration of this workload"
            elif isinstance(call, Train):
                turn = (instruction.epoch, instruction.mini_batch or 0)
                if turn < last.get(instruction.call, turn):
                    epoch, mini_batch = last[instruction.call]
                    yield rank, position, f"{instruction} comes after epoch {epoch} mini-batch {mini_batch}"
                last[instruction.call] = turn
                trained.add(call.model)
            elif call.model in trained:
                text = f"comes after {call.model} began to train here: its weights are no longer the old ones"
                yield rank, position, f"{instruction} {text}"
            done |= cells
        never = dict.fromkeys(text for cell, text in due.items() if cell not in done)
        yield from ((rank, None, f"never executes {text}") for text in never)
        agrees = [at for at, one in enumerate(instructions) if isinstance(one, Agree) and not one.round]
        num = 2 if program.placement.ahead else 1  # one of the prologue
        ends, on_state = agrees[rank in agreeing :], agrees[: rank in agreeing]
        if len(ends) != num or ends[-1] != len(instructions) - 1:
            yield rank, None, f"must end with its one Agree, and has one at each of the instructions {agrees}"
        counts = [at for at, step in enumerate(instructions) if isinstance(step, Run) and step.consumer]
        if any(at < max(counts, default=0) for at in on_state):
            text = f"{instructions[on_state[0]]} comes before instruction {counts[-1]}, {instructions[counts[-1]]}"
            yield rank, on_state[0], f"{text}, that counts for it"


def _cells(program: Program, run: Run, rank: int) -> set[Cell]:
    """Returns what a Run computes: a train run as a whole, any other call row by row (a row is a mini-batch and a
    column)."""
    if isinstance(program.workload.workflow.call(run.call), Train):
        return {(run.call, run.epoch, run.mini_batch, run.columns)}
    rows = program.mini_batches_of(run)
    columns = program.columns_of(run, rank) or (None,)  # a rank without rows still runs the call, for its collectives
    return {(run.call, run.consumer, run.round, row, column) for row in rows for column in columns}


def _due(program: Program, rank: int) -> dict[Cell, str]:
    """Returns the cells that an iteration needs on a rank, each with its Run in words."""
    workload, placement = program.workload, program.placement
    due: dict[Cell, str] = {}
    inside = repeated(workload.workflow)
    for call in workload.workflow.calls:
        for site in placement.sites(call, workload.workflow):
            if rank not in ranks_of(call, placement.layouts[site]):
                continue
            if isinstance(call, Train):
                turns = product(range(workload.epochs), range(workload.num_mini_batches))
                runs = [Run(call.name, None, mini_batch, epoch) for epoch, mini_batch in turns]
            else:
                piece, consumer = 0 if is_gate(call) else None, site if isinstance(call, Compute) else None
                rounds = range(workload.rounds if call.name in inside else 1)
                runs = [Run(call.name, None, piece, consumer=consumer, round=number) for number in rounds]
            due |= {cell: str(run) for run in runs for cell in _cells(program, run, rank)}
    return due


def _data(program: Program) -> Iterator[Problem]:
    """Checks that every Run finds the rows it reads, and every sender the data that it sends."""
    workload = program.workload
    every = range(workload.mini_batch)
    given: Held = {
        (key, row): set(every) for key in workload.workflow.given for row in range(workload.num_mini_batches)
    }
    for rank, instructions in enumerate(program.instructions):
        held = {place: set(columns) for place, columns in given.items()}
        for position, instruction in enumerate(instructions):

            def lacking(key: str, row: int, columns: range, held: Held = held) -> set[int]:
                return set(columns) - held.get((key, row), set())

            if isinstance(instruction, Run):
                columns = program.columns_seen(instruction, rank)
                for key in program.reads(instruction, rank):
                    row = next(
                        (row for row in program.mini_batches_of(instruction) if lacking(key, row, columns)), None
                    )
                    if row is not None:
                        absent = format_ranks(tuple(sorted(lacking(key, row, columns))))
                        yield rank, position, f"{instruction} reads {key} of columns {absent}, which are not here"
            elif isinstance(instruction, Post):
                transfer = program.transfers[instruction.transfer]
                rows = program.mini_batches_of(transfer)
                for message in transfer.sent_by(rank):
                    keys = [key for key in message.keys if any(lacking(key, row, message.columns) for row in rows)]
                    if keys:
                        text = f"{instruction} sends {', '.join(keys)} to rank {message.destination} before it is here"
                        yield rank, position, text
            for key, rows, columns in program.gains(instruction, rank):
                for row in rows:
                    held.setdefault((key, row), set()).update(columns)


def _weights(program: Program) -> Iterator[Problem]:
    """Checks that every copy of a trained model gets the new weights once, from ranks that train it."""
    workflow, layouts = program.workload.workflow, program.placement.layouts
    for train in (call for call in workflow.calls if isinstance(call, Train)):
        moves = [(number, t) for number, t in enumerate(program.transfers) if t.model == train.model]
        arrivals = Counter(target for _, move in moves if move.reallocation for target in move.reallocation.targets)
        for rank in program.cluster.ranks:
            for model, shard in program.copies(rank):
                times = arrivals[rank, shard]
                if model == train.model and times != 1:
                    yield (
                        rank,
                        None,
                        f"gets the new weights of {model} ({shard}) {times} times an iteration instead of once",
                    )
        for number, move in moves:
            first = {route.ranks[0] for route in move.reallocation.routes} if move.reallocation else set()
            wrong = first - set(layouts[train.name].ranks)
            if wrong:
                ranks = format_ranks(layouts[train.name].ranks)
                text = f"Post transfer {number} sends the weights of {move.model}, which trains on ranks {ranks}"
                yield min(wrong), None, text


def _versions(program: Program, num: int) -> Iterator[Problem]:
    """Checks, for some iterations in a row, that weights move when no call uses or changes them: they are complete
    before a call of the next iteration reads or trains them, and none of their own still does when they move. One
    iteration ahead, a call that samples reads those before, so that they are one iteration older."""
    weights = [(number, move) for number, move in enumerate(program.transfers) if move.model is not None]
    for rank in program.cluster.ranks:
        steps = list(in_a_row(program, rank, num))
        order = {step: at for at, (_, _, step) in enumerate(steps)}
        for number, move in weights:
            if rank in move.ranks:
                yield from islice(_clashes(program, rank, number, steps, order), 1)


def _clashes(
    program: Program,
    rank: int,
    number: int,
    steps: list[tuple[int, int, Instruction]],
    order: dict[Instruction, int],
) -> Iterator[Problem]:
    """Yields a problem for each Run before or during which new weights move too early or too late. steps: of in_a_row,
    and where each one is."""
    model, size = program.transfers[number].model, len(program.transfers)
    for at, (position, iteration, step) in enumerate(steps):
        call = program.workload.workflow.call(step.call) if isinstance(step, Run) else None
        if call is None or call.model != model:
            continue
        run, is_training = program.instructions[rank][position], isinstance(call, Train)
        version = iteration if run.delay else iteration - program.placement.ahead
        post = order[Post(number + version * size)] if version >= 0 else at
        which = f"iteration {iteration}" if program.overlaps else "the iteration"
        if post < at:
            reads = f"writes into a copy of {model} that {which} still reads"
            text = f"moves the weights of {model} before {which} has trained them" if is_training else reads
            yield rank, steps[post][0], f"Post transfer {number} {text}: instruction {position}, {run}"
        if version > 0 and order[Wait(number + (version - 1) * size)] > at:
            sent = f"trains while its weights of iteration {version - 1} are being sent"
            came = f"reads the weights of iteration {version - 1} before they came"
            yield rank, position, f"{run} {sent if is_training else came}: transfer {number}"


def _offloads(program: Program) -> Iterator[Problem]:
    """Calls with offloaded weights run between a Load and an Offload of them."""
    for rank, instructions in enumerate(program.instructions):
        away = offloaded(program.workload, program.placement, rank)
        loaded: set[str] = set()
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, Load | Offload):
                if instruction.model not in away:
                    yield rank, position, f"{instruction}: {instruction.model} does not wait in host memory here"
                elif (instruction.model in loaded) == isinstance(instruction, Load):
                    yield rank, position, f"{instruction} comes twice"
                (loaded.add if isinstance(instruction, Load) else loaded.discard)(instruction.model)
            elif isinstance(instruction, Run):
                absent = [model for model, calls in away.items() if instruction.call in calls and model not in loaded]
                yield from ((rank, position, f"{instruction} comes before Load {model}") for model in absent)
        yield from ((rank, None, f"never offloads {model} again") for model in sorted(loaded))


def _pipelines(program: Program) -> list[Problem]:
    """Checks the body of every call with stages, for each of `pipeline.numbers`. Returns one problem for each rank and
    call."""
    problems: dict[tuple[str, int], Problem] = {}
    for call, number, small in bodies(program):
        for rank, _, text in hangs(small):
            words = f"{call.name} with {number} {'tokens' if isinstance(call, Generate) else 'micro-batches'}: {text}"
            problems.setdefault((call.name, rank), (rank, None, words))
    return list(problems.values())

"""Pipeline parallelism as instructions: what the stages of a layout do in one Run, by micro-batch or, in generation, by
token.

Training follows 1F1B (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473): stage s of p runs
min(p - s - 1, m) forwards ahead, then one forward and one backward in turn, then the remaining backwards, so that no
stage ever holds the activations of more than p - s micro-batches. Inference is the forwards alone. In generation a
token goes through all stages, the last stage samples the next one and sends it to the others.

The number m of micro-batches follows from the data, so a program holds one Run, and its body is compiled for each m: by
the runtime for the m that the ranks agree on, by `check` for some (see `numbers`). A body ends for every m, also if a
communicator executes its transfers one after another: the passes of all stages are merged into one global order, in
which each comes after what it needs, and both ends of a transfer post it where that order makes its data. So both ends
queue their transfers in this order, and the earliest remaining transfer can always be executed. `check` runs bodies all
the same, as a check of this code. The number of tokens is known only afterwards, so the generation engine
(runtime/generation/engine.py) does not execute a body; its collectives and messages are those of `token_body`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from rlhf_spmd.plan.calls import Compute, Generate, ModelCall, Train
from rlhf_spmd.plan.layout import STAGES, Layout, group_name
from rlhf_spmd.plan.program.instructions import Instruction, Message, Post, Program, Run, Transfer, Wait
from rlhf_spmd.plan.workload import Workload

Pass = tuple[str, int]  # "forward" or "backward", micro-batch


@dataclass(frozen=True, slots=True)
class Body:
    """The instructions of one Run on the ranks of one data-parallel shard. Transfers are numbered from 0."""

    instructions: dict[int, tuple[Instruction, ...]]  # by world rank
    transfers: tuple[Transfer, ...]
    passes: tuple[tuple[Pass, int], ...] = ()  # of each transfer: the pass and stage that make its data; not of tokens


def is_pipelined(call: ModelCall, layout: Layout) -> bool:
    """Returns whether the runtime executes a body for each Run of a call."""
    return layout.pp > 1 and not isinstance(call, Generate)


def largest_number(layout: Layout, workload: Workload, call: ModelCall) -> int:
    """Returns the most micro-batches that a Run can have on one shard: with a budget of tokens each may have one
    row."""
    size = 1 if layout.tokens else layout.micro_batch or workload.micro_batch
    return _number(layout, workload, call, size)


def usual_number(program: Program, run: Run) -> int:
    """Counts the micro-batches of a Run, also with a budget of tokens as if each had the usual number of rows."""
    workload, layout = program.workload, program.layout_of(run)
    call = workload.workflow.placed_call(run.call)
    return _number(layout, workload, call, layout.micro_batch or workload.micro_batch)


def _number(layout: Layout, workload: Workload, call: ModelCall, size: int) -> int:
    rows = -(-workload.mini_batch // layout.dp)
    return max(1, -(-rows // size)) * (1 if isinstance(call, Train) else workload.num_mini_batches)


def order_of_passes(stage: int, num_stages: int, num_micro_batches: int, *, train: bool) -> list[Pass]:
    """Returns the passes of one stage in their order: 1F1B, or the forwards alone."""
    forwards: list[Pass] = [("forward", index) for index in range(num_micro_batches)]
    if not train:
        return forwards
    ahead = min(num_stages - stage - 1, num_micro_batches)
    passes = forwards[:ahead]
    for index, forward in enumerate(forwards[ahead:]):
        passes += [forward, ("backward", index)]
    return passes + [("backward", index) for index in range(num_micro_batches - ahead, num_micro_batches)]


def global_order(num_stages: int, num_micro_batches: int, *, train: bool) -> list[tuple[int, Pass]]:
    """Returns the passes of all stages in one order in which each comes after the pass that it needs: a forward after
    that of the previous stage, a backward after that of the next stage."""
    queues = [order_of_passes(s, num_stages, num_micro_batches, train=train) for s in range(num_stages)]
    done: set[tuple[int, Pass]] = set()
    order: list[tuple[int, Pass]] = []
    while any(queues):
        ready = []
        for stage, queue in enumerate(queues):
            if queue:
                kind, index = queue[0]
                before = stage - 1 if kind == "forward" else stage + 1
                if not 0 <= before < num_stages or (before, (kind, index)) in done:
                    ready.append((stage, queue.pop(0)))
        assert ready, "1F1B never waits in a circle"
        done.update(ready)
        order += ready
    return order


@cache
def body(layout: Layout, call: ModelCall, run: Run, dp_index: int, num_micro_batches: int, pass_bytes: int = 0) -> Body:
    """Returns the instructions of one shard's ranks.

    pass_bytes: of the message of one micro-batch, on each slice.
    """
    train, last = isinstance(call, Train), layout.pp - 1
    ranks = [[layout.rank_at(dp_index, stage, t) for t in range(layout.tp)] for stage in range(layout.pp)]
    lists: dict[int, list[Instruction]] = {rank: [] for stage in ranks for rank in stage}
    waited: set[tuple[int, int]] = set()  # rank, transfer
    transfers: list[Transfer] = []
    makers: list[tuple[Pass, int]] = []
    numbers: dict[tuple[str, int, int], int] = {}  # pass, and the stage that receives -> transfer
    for stage, (kind, index) in global_order(layout.pp, num_micro_batches, train=train):
        group = group_name(ranks[stage]) if layout.tp > 1 else None
        number = numbers.get((kind, index, stage))
        # a gradient proves that the next stage is done with the activations that this one sent
        sent = numbers.get(("forward", index, stage + 1)) if kind == "backward" else None
        due = [n for n in (sent, number) if n is not None]
        part = replace(run, group=group, phase=kind, micro_batch=index)  # the same on all slices
        instructions: list[Instruction] = [*map(Wait, due), part]
        for rank in ranks[stage]:
            waited.update((rank, n) for n in due)
            lists[rank] += instructions
        to = stage + 1 if kind == "forward" else stage - 1
        if not 0 <= to <= last:
            continue
        numbers[kind, index, to] = len(transfers)
        pairs = zip(ranks[stage], ranks[to], strict=True)
        what = "activations" if kind == "forward" else "gradients"
        messages = tuple(Message(source, there, (what,), range(0), pass_bytes) for source, there in pairs)
        post = Post(len(transfers))
        for rank in (*ranks[stage], *ranks[to]):
            lists[rank].append(post)
        name = f"{what} of {call.name} to stage {to}"
        transfers.append(Transfer(name, messages, mini_batch=run.mini_batch, call=call.name))
        makers.append(((kind, index), stage))
    for number, transfer in enumerate(transfers):  # Waits that are missing on the sending side
        for rank in transfer.ranks:
            if (rank, number) not in waited:
                lists[rank].append(Wait(number))
    if train:
        update = replace(run, phase="update")
        for rank in lists:
            lists[rank].append(update)
    return Body({rank: tuple(instructions) for rank, instructions in lists.items()}, tuple(transfers), tuple(makers))


@cache
def token_body(layout: Layout, call: ModelCall, run: Run, dp_index: int, num_tokens: int) -> Body:
    """Returns the instructions of one shard's ranks while they generate: the stages agree on the blocks of the cache;
    each token of a batch is a forward of every stage, then the last stage sends sampled tokens to the others; at the
    end it sends the results. As in `body`, all slices do the same.

    With episodes, one rank of the copy also broadcasts the openings, before each token the answers that have come, and
    at the end the rewards (runtime/generation/shared_episodes.py). All ranks of the copy make each broadcast, also an
    empty one, and nothing else is under way: a rank has ended the messages of a token before the next broadcast. A step
    in which every row waits is a broadcast alone. Whether there is another step depends on sampled tokens and answers,
    which are the same on all ranks. For the same reason slices without stages, which have no body, make the collectives
    of their one group in the same order."""
    ranks = [[layout.rank_at(dp_index, stage, t) for t in range(layout.tp)] for stage in range(layout.pp)]
    lists: dict[int, list[Instruction]] = {rank: [] for stage in ranks for rank in stage}
    transfers: list[Transfer] = []

    def all_stages(phase: str, token: int | None = None) -> None:
        for rank in lists:
            group = group_name(layout.stage_ranks(rank), STAGES)
            lists[rank].append(replace(run, group=group, phase=phase, micro_batch=token))

    def broadcast(phase: str, token: int | None = None) -> None:
        for rank in lists if isinstance(call, Generate) and call.has_turns else ():
            lists[rank].append(replace(run, group=group_name(lists), phase=phase, micro_batch=token))

    broadcast("openings")
    all_stages("begin")
    for token in range(num_tokens):
        broadcast("answers", token)
        for stage, here in enumerate(ranks):
            group = group_name(here) if layout.tp > 1 else None
            for rank in here:
                lists[rank].append(replace(run, group=group, phase="token", micro_batch=token))
            if stage == layout.pp - 1:
                continue
            pairs = zip(here, ranks[stage + 1], strict=True)
            messages = tuple(Message(source, there, ("activations",), range(0), 0) for source, there in pairs)
            for rank in (*here, *ranks[stage + 1]):  # both wait at once
                lists[rank] += [Post(len(transfers)), Wait(len(transfers))]
            name = f"a token's activations of {call.name} to stage {stage + 1}"
            transfers.append(Transfer(name, messages, mini_batch=run.mini_batch, call=call.name))
        all_stages("drawn", token)
    broadcast("answers", num_tokens)
    all_stages("end")
    broadcast("rewards")
    return Body({rank: tuple(instructions) for rank, instructions in lists.items()}, tuple(transfers))


def expand(
    program: Program, num_micro_batches: Callable[[Run], int], num_tokens: Callable[[Run], int] | None = None
) -> Program:
    """Replaces every pipelined Run of a program by its body, for given numbers of micro-batches and of tokens (None:
    generation stays as it is). An expanded program stays as it is."""
    workload, transfers = program.workload, list(program.transfers)
    offsets: dict[tuple[Run, int], int] = {}
    lists: list[list[Instruction]] = []

    def body_of(run: Run, call: ModelCall, layout: Layout, dp_index: int) -> Body | None:
        if is_pipelined(call, layout):
            return body(layout, call, run, dp_index, num_micro_batches(run), pass_bytes(layout, workload, call))
        if num_tokens is not None and isinstance(call, Generate) and layout.pp > 1:
            return token_body(layout, call, run, dp_index, num_tokens(run))
        return None

    for rank, instructions in enumerate(program.instructions):
        lists.append([])
        for instruction in instructions:
            call = (
                workload.workflow.call(instruction.call)
                if isinstance(instruction, Run) and not instruction.phase
                else None
            )
            if not isinstance(instruction, Run) or call is None or isinstance(call, Compute):
                lists[rank].append(instruction)
                continue
            layout = program.layout_of(instruction)
            dp_index = layout.dp_index(rank)
            inner = body_of(instruction, call, layout, dp_index)
            if inner is None:
                lists[rank].append(instruction)
                continue
            if (instruction, dp_index) not in offsets:
                offsets[instruction, dp_index] = len(transfers)
                transfers += inner.transfers
            if isinstance(call, Train):
                lists[rank].append(replace(instruction, phase="begin"))
            for part in inner.instructions[rank]:
                assert isinstance(part, Run | Post | Wait)
                if not isinstance(part, Run):
                    part = replace(part, transfer=part.transfer + offsets[instruction, dp_index])
                lists[rank].append(replace(part, delay=instruction.delay))
    return replace(program, transfers=tuple(transfers), instructions=tuple(map(tuple, lists)))


def numbers(layout: Layout, workload: Workload, call: ModelCall) -> list[int]:
    """Returns the numbers of micro-batches (in generation, of tokens) that `check` tries in place of all possible ones.

    From pp + 1 on, every stage has a cycle of one forward and one backward, which more micro-batches only repeat; of
    these, 2 pp + 1 and the largest number are tried. Each token repeats the one before it.
    """
    if isinstance(call, Generate):
        return [1, 2, 3]
    largest = largest_number(layout, workload, call)
    return sorted({min(number, largest) for number in (1, 2, layout.pp, layout.pp + 1, 2 * layout.pp + 1, largest)})


def bodies(program: Program) -> Iterator[tuple[ModelCall, int, Program]]:
    """Yields, for every call with stages and each of its `numbers`, a program of one such Run, on one data-parallel
    shard, since other shards differ only in their ranks."""
    for call in program.workload.workflow.placed_calls:
        layout = program.placement.layouts[call.name]
        if layout.pp == 1:
            continue
        ranks = layout.model_ranks(layout.ranks[0])
        runs = (run for run in program.instructions[ranks[0]] if isinstance(run, Run) and run.call == call.name)
        run = next(runs, None)
        if run is None:  # `check` says so elsewhere
            continue
        group = group_name(ranks)
        alone = replace(run, group=group)
        lists = [(alone,) if rank in ranks else () for rank in program.cluster.ranks]
        groups = dict(program.groups) | {group: tuple(sorted(ranks))}
        one = replace(program, transfers=(), instructions=tuple(lists), groups=groups)
        for number in numbers(layout, program.workload, call):
            sizes = {alone: number}
            yield call, number, expand(one, sizes.__getitem__, sizes.__getitem__)


def pass_bytes(layout: Layout, workload: Workload, call: ModelCall) -> int:
    """Returns the most bytes that a stage sends for one micro-batch, on each slice."""
    longest = (workload.max_prompt + workload.max_response) * call.num_sequences
    tokens = layout.tokens or (layout.micro_batch or workload.micro_batch) * longest
    tokens = max(tokens, longest)  # a row is never cut
    return -(-tokens // layout.tp) * workload.shape(call.model).hidden_size * workload.param_bytes

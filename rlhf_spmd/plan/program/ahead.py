"""One iteration ahead: the program of a step in which one batch trains while the next one is sampled (Placement.ahead).

Step k trains batch k beside everything that comes before the training of batch k + 1, which is sampled with weights
after step k - 1; then the new weights go to their copies. So a batch is one iteration old when it trains, neither more
nor less. In the list of a step, what trains is *delayed*: it belongs to the iteration before. The list ends with all
its Waits and the Agree, so that no message crosses a step. The first time, in the prologue, only what is not delayed is
executed, the last time, in the epilogue, only what is. Sampled rows and rows that train are in different stores.

When a batch trains, its weights are no longer those that sampled it, so the parity gate cannot be in training. It is an
inference by these weights, on the ranks that sampled, for the first mini-batch; where old logprobs are recomputed
with these weights anyway, for all rows. A loss that reads START_LOGPROBS gets them by one more pass, which belongs to
training: those of the generator are an iteration older.
"""

from dataclasses import replace
from itertools import product

from rlhf_spmd.plan.calls import Call, Infer, Train, Workflow, is_current, trains
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.instructions import Agree, Instruction, Post, Program, Run, Wait
from rlhf_spmd.plan.runtime_words import LOGPROBS, START_LOGPROBS, actions_of, routes_of
from rlhf_spmd.plan.workload import Workload


def with_gates(workload: Workload, placement: Placement) -> tuple[Workload, Placement]:
    """Adds the passes of a run that samples ahead to the workload and to the placement: parity gates, which run as the
    generation whose logprobs training reads, and those of `with_starts`, which run as training."""
    if not placement.ahead or not workload.workflow.train_calls:
        return workload, placement
    workload = with_starts(workload)
    workflow, added = workload.workflow, gates(workload.workflow)
    first = workflow.calls.index(workflow.train_calls[0])
    before = [_compares(call, workflow) for call in workflow.calls[:first]]
    layouts = {gate.name: placement.layouts[name] for name, gate in added.items() if name in placement.layouts}
    layouts |= {
        call.name: placement.layouts[train.name].of_inference
        for call, train in product(before, workflow.train_calls)
        if is_current(call) and call.name not in placement.layouts
        if call.model == train.model and train.name in placement.layouts
    }
    calls = (*before, *(gate for gate in added.values() if gate.name in layouts), *workflow.calls[first:])
    made = replace(workload, workflow=replace(workflow, calls=calls))
    return made, replace(placement, layouts={**placement.layouts, **layouts})


def with_starts(workload: Workload) -> Workload:
    """Returns the workload of a run that samples ahead, with passes that infer the START_LOGPROBS of losses."""
    workflow = workload.workflow
    added, shapes, trained = [], dict(workflow.shapes), {}
    for train in workflow.train_calls:
        old = dict(train.arguments).get(START_LOGPROBS)
        if old is None or is_current(workflow.producer(old)):
            continue
        key, wanted = f"{train.model}_{START_LOGPROBS}", (*train.tokens, train.kept, routes_of(train.responses[0]))
        inputs, options = tuple(name for name in train.inputs if name in wanted), (train.tokens, train.kept, True)
        added.append(Infer(f"{train.model}_infer_start", train.model, LOGPROBS, inputs, (key,), *options))
        shapes[key] = shapes[old]
        arguments = tuple((name, key if name == START_LOGPROBS else other) for name, other in train.arguments)
        trained[train.name] = replace(train, arguments=arguments, inputs=(*train.inputs, key))
    before = (call for call in workflow.calls if not isinstance(call, Train))
    calls = (*before, *added, *(trained.get(train.name, train) for train in workflow.train_calls))
    return replace(workload, workflow=replace(workflow, calls=calls, shapes=shapes)) if added else workload


def gates(workflow: Workflow) -> dict[str, Infer]:
    """Returns the passes that only one iteration ahead has, by the names of the generations on whose ranks they are."""
    found = {}
    for train in workflow.train_calls:
        generate = next((call for call in workflow.generate_calls if train.drawn in call.outputs), None)
        is_there = any(isinstance(call, Infer) and call.drawn == train.drawn for call in workflow.calls)
        if generate is None or is_there or any(_repeats(call, train) for call in workflow.calls):
            continue
        wanted = (*train.tokens, train.kept, routes_of(train.responses[0]), *_compared(train))
        inputs = tuple(key for key in train.inputs if key in wanted)
        name, options = f"{train.model}_infer_parity", (train.kept, False, train.drawn)
        found[generate.name] = Infer(name, train.model, LOGPROBS, inputs, (), train.tokens, *options)
    return found


def _compares(call: Call, workflow: Workflow) -> Call:
    """Returns a call that also compares logprobs, if it computes those of the generator again."""
    train = next((one for one in workflow.train_calls if one.drawn and _repeats(call, one)), None)
    if train is None or not isinstance(call, Infer) or call.drawn:
        return call
    inputs = tuple(dict.fromkeys((*call.inputs, *(key for key in _compared(train) if key in train.inputs))))
    return replace(call, inputs=inputs, drawn=train.drawn)


def _compared(train: Train) -> tuple[str, str]:
    """Returns the keys of the logprobs that a gate compares, and of the tokens for which it does."""
    return train.drawn, actions_of(train.responses[0])


def _repeats(call: Call, train: Train) -> bool:
    """Returns whether a call computes the generator's logprobs of what training reads again, with the weights that
    sampled."""
    is_pass = isinstance(call, Infer) and call.function == LOGPROBS and not call.current
    return is_pass and call.model == train.model and set(train.responses) <= set(call.inputs)


def with_delays(program: Program) -> Program:
    """Returns the program of a run that samples ahead: a step trains the batch of the last iteration, so all that works
    on it, or with the weights that it makes, is delayed."""
    if not program.placement.ahead:
        return program
    lists = (
        tuple(
            replace(one, delay=1) if isinstance(one, Run | Post | Wait | Agree) and is_late(program, one) else one
            for one in some
        )
        for some in program.instructions
    )
    return replace(program, instructions=tuple(lists))


def is_late(program: Program, instruction: Instruction) -> bool:
    """Returns whether an instruction of a step works on the batch that trains, and not on the one that is sampled."""
    workflow = program.workload.workflow
    if isinstance(instruction, Run):
        return any(trains(call, workflow) for call in workflow.calls if call.name == instruction.call)
    if isinstance(instruction, Post | Wait):
        moved = program.transfers[instruction.transfer : instruction.transfer + 1]
        makers = [workflow.producer(key) for transfer in moved for key in transfer.keys]
        is_of_training = any(maker is not None and trains(maker, workflow) for maker in makers)
        return is_of_training or any(transfer.model is not None for transfer in moved)
    # weights that leave the device are those of frozen models
    return isinstance(instruction, Agree) and not instruction.round


def drawn_by(program: Program, rank: int) -> bool:
    """Returns whether a rank makes anything of the batch that a step samples."""
    if not program.placement.ahead:
        return False
    runs = (one for one in program.instructions[rank] if isinstance(one, Run) and not one.delay)
    return any(program.makes(run, rank) for run in runs)

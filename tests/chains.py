"""Random workloads and placements of chains of iterations, lists without a plan, and faults (plan/program/chain.py)."""

import random
from dataclasses import replace

from rlhf_spmd.plan.calls import Call, Compute, Generate, Infer, Train, Workflow
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.instructions import Instruction, Message, Post, Program, Transfer, Wait
from rlhf_spmd.plan.program.reallocate import Reallocation, Route
from rlhf_spmd.plan.workload import Workload
from tests.programs import SHAPE, SPLIT_SHAPE, Choose, edited, make_workload, place_models, with_list


def random_workflow(choose: Choose) -> Workflow:
    """Returns any workflow in which one to four models train, in any order, on what any models have made."""
    models = "abcd"[: choose([1, 2, 2, 3, 3, 4])]
    tokens = ("prompts", "responses")
    calls: list[Call] = [Generate("generate", choose(models), "generate", ("prompts",), ("responses", "k"), tokens[:1])]
    keys = ["responses", "k"]
    for number in range(choose(range(1, 7))):
        inputs, key = tuple(dict.fromkeys(("responses", choose(keys)))), f"k{number}"
        if choose([True, True, False]):
            call = Infer(f"infer{number}", choose(models + "fg"), "logprobs", ("prompts", *inputs), (key,), tokens)
        else:
            call = Compute(f"compute{number}", "sums", inputs, (key,), sums=choose([False, False, False, True]))
        calls.append(call)
        keys.append(key)
    read = {key for call in calls for key in call.inputs}
    for model in sorted(models, key=lambda _: choose(range(100))):
        mine = [key for key in keys if key not in read or choose([True, False, False])]
        read.update(mine)
        calls.append(Train(f"train_{model}", model, "loss", tuple(dict.fromkeys((*tokens, *mine))), (), tokens))
    shapes = {"prompts": "prompt", "responses": "response"} | dict.fromkeys(keys[1:], "token")
    return Workflow(tuple(calls), ("prompts",), shapes)


def random_chain_plan(choose: Choose) -> tuple[Workload, Placement, Cluster]:
    """Returns any such workflow, often with training on some ranks and all else on others, with and without streaming,
    stages, slices, offloading and a state; also such that `validate` refuses."""
    workflow, shape = random_workflow(choose), choose([SHAPE, SPLIT_SHAPE])
    mini_batch, num = choose(range(1, 8)), choose(range(1, 4))
    sizes = (mini_batch * num, 1, mini_batch, 2, choose([1, 2]), 5, 7, 2)
    workload = Workload(workflow, dict.fromkeys(workflow.models, shape), *sizes, state_sums=choose([(), ("x",)]))
    cluster = Cluster.parse(choose(["1x2", "1x3", "2x2", "1x5", "2x3", "1x6", "1x8"]))
    half, stream = choose(range(1, cluster.num_devices)), choose([False, True])
    apart = stream or choose([True, True, False])

    def layout(ranks: tuple[int, ...], zero: int) -> Layout:
        middle = len(ranks) // 2
        ranks = choose([ranks, ranks, ranks[: max(1, middle)], ranks[middle:], (choose(ranks),)])
        pp, tp = choose([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)]) if shape is SPLIT_SHAPE else (1, 1)
        whole = len(ranks) // (pp * tp) * pp * tp
        return (
            Layout(ranks[:whole], whole // (pp * tp), pp, tp, zero) if whole else Layout(ranks, len(ranks), zero=zero)
        )

    layouts = {}
    for call in workflow.placed_calls:
        if isinstance(call, Train):
            layouts[call.name] = layout(cluster.ranks[:half] if apart else cluster.ranks, choose([0, 0, 1, 2]))
            continue
        ranks = cluster.ranks[half:] if apart and choose([True] * 5 + [False]) else cluster.ranks
        frozen = workflow.train_call(call.model) is None
        layouts[call.name] = layout(ranks, choose([0, 0, 0, 3]) if frozen else 0)
        if frozen and not layouts[call.name].zero:
            layouts[call.name] = replace(layouts[call.name], offload=choose([False, False, True]))
    own_first = tuple(call.name for call in workflow.placed_calls if call.kind != "train" and choose([False, True]))
    return workload, Placement(layouts, own_first, (), stream, choose([1, 2, 4]), chain=True), cluster


def jumbled_chain(rng: random.Random) -> Program:
    """Returns lists in which rows move between ranks, more or less in one order, and the weights of one to four models
    move anywhere, on some ranks of the iteration before; all computing is left out."""
    size, through_host = rng.randint(3, 7), rng.random() < 0.6
    ranks = range(size)
    lists: list[list[Instruction]] = [[] for _ in ranks]
    transfers: list[Transfer] = []
    for number in range(rng.randint(2, 7)):
        pairs = sorted({tuple(rng.sample(ranks, 2)) for _ in range(rng.choice([1, 1, 1, 2]))})
        messages = (Message(*pair, ("responses",), range(1), 4, through_host=through_host) for pair in pairs)
        transfers.append(Transfer(f"rows {number}", tuple(messages)))
        for rank in transfers[number].ranks:
            early = rng.random() < 0.3 and bool(transfers[number].received_by(rank))
            lists[rank].insert(rng.randrange(len(lists[rank]) + 1) if early else len(lists[rank]), Post(number))
            lists[rank].append(Wait(number))
    for number in range(len(transfers), len(transfers) + rng.randint(1, 4)):
        parties = rng.sample(ranks, rng.randint(2, min(size, 4)))
        num = rng.randint(1, len(parties) - 1)
        chains = [(sender, *rng.sample(parties[num:], rng.randint(1, len(parties) - num))) for sender in parties[:num]]
        hops = [Message(*hop, (), range(0), 1) for chain in chains for hop in zip(chain, chain[1:], strict=False)]
        plan = Reallocation(SHAPE, (), (), 2, (), tuple(Route(chain, (), 100) for chain in chains))
        transfers.append(Transfer("weights", tuple(hops), f"model {number}", reallocation=plan))
        for rank in transfers[number].ranks:
            delay = int(rng.random() < (0.1 if rank in parties[:num] else 0.9))
            most = len(lists[rank]) // (1 + delay)
            first, last = sorted(rng.randint(0, most) for _ in range(2))
            last = first if rng.random() < 0.8 else last
            lists[rank].insert(last, Wait(number, delay=delay))
            lists[rank].insert(first, Post(number, delay=delay))
    program = replace(place_models(make_workload(), size), transfers=tuple(transfers))
    return replace(program, instructions=tuple(tuple(steps) for steps in lists))


def with_weights_moved(program: Program, rng: random.Random) -> Program:
    """Returns one to three small changes of where ranks post new weights or wait for them, and of which iteration."""
    for _ in range(rng.randint(1, 3)):
        rank = rng.choice(program.cluster.ranks)
        steps = list(program.instructions[rank])
        at = [place for place, step in enumerate(steps) if isinstance(step, Post | Wait)]
        at = [place for place in at if program.transfers[steps[place].transfer].model is not None]
        if not at:
            continue
        place, change = rng.choice(at), rng.choice(["swap", "move", "both", "delay"])
        if change == "swap":
            other = rng.choice(at)
            steps[place], steps[other] = steps[other], steps[place]
        elif change == "move":
            steps.insert(max(0, place + rng.randint(-4, 4)), steps.pop(place))
        elif change == "delay":
            steps[place] = replace(steps[place], delay=1 - steps[place].delay)
        else:
            number, delay = steps[place].transfer, rng.choice([0, 1])
            steps = [step for step in steps if step not in (Post(number), Wait(number))]
            to = rng.randint(0, len(steps))
            steps[to:to] = [Post(number, delay=delay), Wait(number, delay=delay)]
        program = with_list(program, rank, steps)
    return program


def weights_of(program: Program, model: str) -> int:
    return next(number for number, transfer in enumerate(program.transfers) if transfer.model == model)


def moved(program: Program, rank: int, number: int, *, behind: str = "", before: str = "", delay: int = 1) -> Program:
    """Returns the program with Post and Wait of a transfer elsewhere in the list of a rank."""

    def edit(steps):
        steps[:] = [step for step in steps if step not in (Post(number), Wait(number))]
        texts = [str(step).startswith(behind or before) for step in steps]
        to = texts.index(True) + bool(behind)
        steps[to:to] = [Post(number, delay=delay), Wait(number, delay=delay)]

    return edited(program, rank, edit)

"""Small workloads, random placements and the programs compiled from them, for the tests of plan/."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Instruction, Program
from rlhf_spmd.plan.proof.check import check
from rlhf_spmd.plan.proof.memory_check import Finding
from rlhf_spmd.plan.workload import ModelShape, Workload

SHAPE = ModelShape(2, 8, 16, 2, 1, 4, 32)
Choose = Callable[[Sequence[Any]], Any]  # random.choice, or hypothesis' draw from a list


def make_workload(
    *,
    mini_batch: int = 4,
    num_mini_batches: int = 2,
    epochs: int = 1,
    shape: ModelShape | None = SHAPE,
    replay: bool = False,
    **options,
) -> Workload:
    """Makes a workload of PPO with four models of one shape but different heads.

    options: PPO's.
    """
    ppo = load_algorithm("ppo")
    scalar = shape and replace(shape, scalar_head=True)
    return Workload(
        workflow=ppo.workflow(ppo.options(epochs=epochs, **options), replay=replay),
        models={"actor": shape, "critic": scalar, "reference": shape, "reward": scalar},
        rollout_batch=mini_batch * num_mini_batches,
        samples_per_prompt=1,
        mini_batch=mini_batch,
        micro_batch=2,
        epochs=epochs,
        max_prompt=5,
        max_response=7,
        param_bytes=2,
        max_kept=3 if replay else 0,
    )


def subsets(size: int) -> list[tuple[int, ...]]:
    """Returns every non-empty set of ranks, small ones first."""
    return [ranks for count in range(1, size + 1) for ranks in combinations(range(size), count)]


def random_plan(choose: Choose) -> tuple[Workload, Placement, Cluster]:
    """Returns any workload, with every call on any ranks of up to six in any order, and any overlap of transfers with
    work."""
    workload = make_workload(
        mini_batch=choose(range(1, 8)),
        num_mini_batches=choose(range(1, 4)),
        epochs=choose(range(1, 4)),
        old_logprobs=choose(["generator", "recompute", "current"]),
        whiten=choose(["mini_batch", "batch"]),
        replay=choose([False, True]),
    )
    cluster = Cluster.parse(choose(["1x1", "1x2", "2x1", "1x3", "2x2", "1x5", "2x3", "3x2", "1x6"]))
    stream = cluster.num_devices > 1 and choose([False, False, True])
    ranks = random_ranks(choose, workload, cluster, apart=stream)
    zero = {}
    for call in workload.workflow.placed_calls:
        if call.kind == "train":
            users = {ranks[other.name] for other in workload.workflow.placed_calls if other.model == call.model}
            zero[call.name] = choose([0, 1, 2, 3] if len(users) == 1 else [0, 1, 2])  # ZeRO 3 keeps no full copy
        elif workload.workflow.train_call(call.model) is None:
            zero[call.name] = choose([0, 0, 3])
    layouts = {name: Layout.data_parallel(where, zero=zero.get(name, 0)) for name, where in ranks.items()}
    before = [call for call in workload.workflow.placed_calls if call.kind != "train"]
    own_first = tuple(call.name for call in before if choose([False, True]))
    joint: list[list[str]] = []
    for call in before:
        if call.kind == "infer":  # some join the call before them (never one further back); others begin a new set
            joint[-1].append(call.name) if joint and choose([False, True]) else joint.append([call.name])
    sets = tuple(tuple(names) for names in joint if len(names) > 1)
    return workload, Placement(layouts, own_first, sets, stream, in_flight=choose([1, 2, 4])), cluster


def random_ranks(choose: Choose, workload: Workload, cluster: Cluster, *, apart: bool) -> dict[str, tuple[int, ...]]:
    """Returns ranks of every call, often the same few lists, so that calls share them; if `apart`, a model that trains
    is used elsewhere, as streaming wants it."""

    def ordered(ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(ranks) if choose([True, False]) else choose(list(permutations(ranks)))

    sets = subsets(cluster.num_devices)
    pool = [ordered(choose(sets)) for _ in range(choose([1, 2, 3, 4, 7]))]
    pool += [ordered(choose(pool))]  # the same ranks in another order
    ranks = {call.name: choose(pool) for call in workload.workflow.placed_calls}
    for model in ("actor", "critic") if apart else ():
        fewer = [where for where in pool if len(where) < cluster.num_devices]
        home = ranks[f"{model}_train"] = choose(fewer or sets[:-1])
        rest = [rank for rank in cluster.ranks if rank not in home]
        fitting = [where for where in pool if set(where) <= set(rest)] or [ordered(rest)]
        for call in workload.workflow.placed_calls:
            if call.model == model and call.kind != "train":
                ranks[call.name] = choose(fitting)
    return ranks


def random_program(choose: Choose) -> Program:
    return compile_program(*random_plan(choose))


SPLIT_SHAPE = ModelShape(4, 16, 32, 4, 2, 4, 32)  # four stages or two slices


def random_split_plan(choose: Choose) -> tuple[Workload, Placement, Cluster]:
    """Returns any workload, on any of two to eight ranks; also such that `validate` refuses."""
    workload = make_workload(
        mini_batch=choose(range(1, 8)),
        num_mini_batches=choose(range(1, 5)),
        epochs=choose([1, 2]),
        shape=SPLIT_SHAPE,
        old_logprobs=choose(["generator", "recompute", "current"]),
        whiten=choose(["mini_batch", "batch"]),
    )
    size = choose(range(2, 9))
    cluster = Cluster.parse(choose([f"1x{size}", f"{size}x1"]))
    return workload, random_split_placement(choose, workload, cluster), cluster


def random_split_placement(choose: Choose, workload: Workload, cluster: Cluster) -> Placement:
    """Calls in stages, slices and ZeRO stages, often with streaming and overlap; also such that `validate` refuses."""
    half = choose(range(1, cluster.num_devices))
    parts = [cluster.ranks, cluster.ranks[:half], cluster.ranks[half:]]

    def layout(ranks: Sequence[int], zero: int) -> Layout:
        pp, tp = choose([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 1)])
        whole = len(ranks) // (pp * tp) * pp * tp
        return Layout(tuple(ranks[:whole]), whole // (pp * tp), pp, tp, zero) if whole else layout(ranks, zero)

    stream = choose([False, True])
    trained = layout(choose(parts[1:] if stream else parts), choose([0, 0, 1, 2, 3]))
    rest = [rank for rank in cluster.ranks if rank not in trained.ranks]
    layouts = {}
    for call in workload.workflow.placed_calls:
        ranks = trained.ranks
        if call.kind != "train" and (stream or choose([True, False])):
            ranks = choose([rest, rest[: -(-len(rest) // 2)], rest[len(rest) // 2 :]] if stream else parts)
        frozen = workload.workflow.train_call(call.model) is None
        home = call.kind == "train" or not (stream or frozen) and choose([True, False])
        layouts[call.name] = trained if home else layout(ranks, choose([0, 3]) if frozen else 0)
    before = [call.name for call in workload.workflow.placed_calls if call.kind != "train"]
    own_first = tuple(name for name in before if choose([False, True]))
    sets = choose([(), (("reference_infer", "reward_infer"),), (("reference_infer", "reward_infer", "critic_infer"),)])
    return Placement(layouts, own_first, sets, stream, in_flight=choose([1, 2, 3]))


def random_split_program(choose: Choose, plan: Callable = random_split_plan) -> Program:
    """Returns the program of the first plan that `validate` accepts. plan(choose) -> workload, placement, cluster."""
    while True:
        try:
            return compile_program(*plan(choose))
        except UserError:
            continue


def streaming_with_stages(workload: Workload, cluster: Cluster) -> Placement:
    """Places training on rank 0, generation, rewards and values on rank 1, the reference in two stages on ranks 2 and
    3. With one communicator for all messages it hangs where communicators work in order."""
    layouts = {name: Layout.data_parallel((0,)) for name in ("actor_train", "critic_train")}
    layouts |= {name: Layout.data_parallel((1,)) for name in ("actor_generate", "reward_infer", "critic_infer")}
    layouts["reference_infer"] = Layout.grid_of((2, 3), pp=2)
    return Placement(layouts, stream=True)


def place_models(workload: Workload, size: int, **ranks) -> Program:
    """Returns a program in which each model runs on its ranks; models that are not named run on all."""
    everyone = Layout.data_parallel(range(size))
    layouts = {model: Layout.data_parallel(where) for model, where in ranks.items()}
    placement = Placement.by_model(workload, **(dict.fromkeys(workload.workflow.models, everyone) | layouts))
    return compile_program(workload, placement, Cluster.parse(f"1x{size}"))


def place_calls(workload: Workload, layout: str, **ranks) -> Program:
    """Returns a program in which each call runs on its ranks; calls that are not named run on all."""
    cluster = Cluster.parse(layout)
    calls = workload.workflow.placed_calls
    layouts = {call.name: Layout.data_parallel(ranks.get(call.name, cluster.ranks)) for call in calls}
    return compile_program(workload, Placement(layouts), cluster)


def halves() -> Program:
    """Places actor and critic on four ranks, reference on the first two, reward on the others: groups and transfers."""
    return place_models(make_workload(), 4, reference=(0, 1), reward=(2, 3))


def separation() -> Program:
    """Places generation on two ranks, the rest on two others: data go there, the actor's weights come back."""
    inference = ("reference_infer", "reward_infer", "critic_infer", "actor_train", "critic_train")
    return place_calls(make_workload(), "1x4", actor_generate=(0, 1), **dict.fromkeys(inference, (2, 3)))


def errors(program: Program) -> list[Finding]:
    return [finding for finding in check(program) if finding.severity == "error"]


def warnings(program: Program) -> list[str]:
    return [finding.message for finding in check(program) if finding.severity == "warning"]


def assert_refused(program: Program, rank: int, *words: str, position: int | None = None) -> None:
    """Asserts that there is an error for that rank (at that instruction) whose text holds all the words."""
    found = errors(program)
    assert found, "check lets it pass"
    fitting = [f for f in found if f.rank == rank and (position is None or f.position == position)]
    assert any(all(word in str(f) for word in words) for f in fitting), [str(finding) for finding in found]


def where(program: Program, rank: int, text: str) -> int:
    """Returns the position of the first instruction of a rank with this text."""
    return next(i for i, step in enumerate(program.instructions[rank]) if str(step).startswith(text))


def with_list(program: Program, rank: int, steps: Sequence[Instruction]) -> Program:
    """Returns the program with another instruction list on one rank."""
    lists = list(program.instructions)
    lists[rank] = tuple(steps)
    return replace(program, instructions=tuple(lists))


def edited(program: Program, rank: int, edit: Callable[[list[Instruction]], object]) -> Program:
    """Returns the program after `edit` has changed the list of one rank in place."""
    steps = list(program.instructions[rank])
    edit(steps)
    return with_list(program, rank, steps)


def mutated(program: Program, rng: random.Random) -> Program:
    """Returns one to three small changes: two instructions swapped, one moved, dropped or doubled on some rank."""
    for _ in range(rng.randint(1, 3)):
        rank = rng.randrange(len(program.instructions))
        steps = list(program.instructions[rank])
        if not steps:
            continue
        one, other = rng.randrange(len(steps)), rng.randrange(len(steps))
        change = rng.choice(["swap", "move", "drop", "double"])
        if change == "swap":
            steps[one], steps[other] = steps[other], steps[one]
        elif change == "move":
            steps.insert(other, steps.pop(one))
        elif change == "drop":
            del steps[one]
        else:
            steps.insert(other, steps[one])
        program = with_list(program, rank, steps)
    return program


def everywhere(program: Program, edit: Callable[[list[Instruction]], object]) -> Program:
    """Returns the program after `edit` has changed the lists of all ranks alike."""
    for rank in program.cluster.ranks:
        program = edited(program, rank, edit)
    return program

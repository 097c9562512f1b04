"""Rows between GPUs go through host memory, larger ones by NCCL after a notice; on CPUs nothing changes."""

import random
from collections.abc import Iterator
from dataclasses import replace

from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.layout import HOST, group_name
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import WORLD, Message, Post, Program, Run, Transfer, Wait
from rlhf_spmd.plan.proof.deadlock import hangs
from tests.ordered import standing
from tests.programs import (
    errors,
    make_workload,
    mutated,
    place_models,
    random_plan,
    random_split_program,
    with_list,
)

A_LOT = 2**40


def on_gpus(cluster: Cluster) -> Cluster:
    return Cluster(tuple(Node(node.num_devices, "a100-80g") for node in cluster.nodes))


def separated(size: int = 2, *, device: str = "a100-80g", host_bytes: int = A_LOT, **options) -> Program:
    """Returns a program that streams: the second half of the ranks trains."""
    workload = replace(make_workload(num_mini_batches=4), host_bytes=host_bytes)
    cluster = Cluster.parse(f"1x{size}", device)
    return compile_program(workload, load_strategy("separation").place(workload, cluster, **options), cluster)


def limits(program: Program) -> list[int]:
    """Returns limits with which all rows of a program go by NCCL, half of them, none."""
    sizes = sorted(m.num_bytes for transfer in program.transfers for m in transfer.messages if m.keys) or [0]
    return sorted({0, sizes[len(sizes) // 2], sizes[-1]})


def test_where_rows_and_weights_go():
    program = separated()
    of_rows = [transfer for transfer in program.transfers if transfer.keys]
    assert {transfer.communicator for transfer in of_rows} == {HOST}
    assert {transfer.communicator for transfer in program.transfers if transfer.model} == {WORLD}
    assert program.host_group == group_name(range(2), HOST) and program.groups[program.host_group] == (0, 1)
    assert program.pairs == {None: [(0, 1)]}  # for the weights

    on_cpus = separated(device="cpu", host_bytes=0)
    assert {transfer.communicator for transfer in on_cpus.transfers} == {WORLD} and on_cpus.host_group is None
    assert on_cpus.fingerprint == separated(device="cpu").fingerprint
    assert len(program.transfers) == len(on_cpus.transfers)


def test_no_receive_of_nccl_is_pending_while_a_rank_computes():
    """The trainer posts a transfer right after its notice and right before its Wait, weights also."""
    program = separated(host_bytes=0)
    (trainer,) = program.placement.layouts["actor_train"].ranks
    steps = program.instructions[trainer]
    posts = [at for at, step in enumerate(steps) if isinstance(step, Post)]
    by_nccl = [at for at in posts if program.transfers[steps[at].transfer].communicator == WORLD]
    assert len(by_nccl) > 4
    for at in by_nccl:
        number, rest = steps[at].transfer, steps[at:]
        assert not any(isinstance(step, Run) for step in rest[: rest.index(Wait(number))])
        if program.transfers[number].keys:
            notice = program.transfers[steps[at - 1].transfer]
            assert isinstance(steps[at - 1], Wait) and notice.what == f"notice of {program.transfers[number].what}"
            assert notice.communicator == HOST and Post(steps[at - 1].transfer) in steps[:at]
    early = steps[: steps.index(Run("actor_train", mini_batch=0))]
    told = [step.transfer for step in early if isinstance(step, Post)]  # ahead, as rows are on CPUs
    assert {program.transfers[number].mini_batch for number in told} >= {0, 1}


def gpu_programs(rng: random.Random, num: int) -> Iterator[Program]:
    """Yields random programs, every third in slices and stages, with some or all rows by NCCL."""
    for number in range(num):
        workload, placement, cluster = random_plan(rng.choice)
        if number % 3 == 0:
            program = random_split_program(rng.choice)
            workload, placement, cluster = program.workload, program.placement, program.cluster
        for limit in limits(compile_program(workload, placement, cluster)):
            yield compile_program(replace(workload, host_bytes=limit), placement, on_gpus(cluster))


def test_every_program_ends():
    """Nothing is refused that passes on CPUs, and each ends on the detailed executor, whatever goes where."""
    rng, kinds = random.Random(4), set()
    for program in gpu_programs(rng, 24):
        assert not errors(program)
        assert not standing(program, rng)
        kinds.add(tuple(sorted({transfer.communicator for transfer in program.transfers})))
    assert {(HOST,), (WORLD,), (HOST, WORLD)} <= kinds


def test_what_check_passes_also_ends_after_a_change():
    rng, refused = random.Random(5), 0
    for program in gpu_programs(rng, 18):
        changed = mutated(program, rng)
        if errors(changed):
            refused += bool(hangs(changed))
        else:
            assert not standing(changed, rng)
    assert refused > 5, refused


def crossing(communicators: tuple[str, str]) -> Program:
    """Returns a program in which rank 0 posts transfers 0 and 1, rank 1 posts 1 and 0; each goes through a
    communicator."""
    messages = [Message(0, 1, ("responses",), range(4), 1, through_host=name == HOST) for name in communicators]
    transfers = tuple(Transfer(f"transfer {number}", (message,)) for number, message in enumerate(messages))
    program = replace(place_models(make_workload(), 2), transfers=transfers)
    waits = [Wait(0), Wait(1)]
    return with_list(with_list(program, 0, [Post(0), Post(1), *waits]), 1, [Post(1), Post(0), *waits])


def test_each_communicator_has_an_order_of_its_own():
    assert not hangs(crossing((WORLD, HOST)))
    for name in (WORLD, HOST):
        assert hangs(crossing((name, name)))


def test_what_goes_through_host_memory_needs_its_group():
    program = separated()
    texts = [finding.message for finding in errors(replace(program, groups={}))]
    assert "transfer 0 goes through host memory, for which there is no group" in texts
    first = program.transfers[0]
    mixed = replace(first, messages=(*first.messages, replace(first.messages[0], through_host=False)))
    texts = [finding.message for finding in errors(replace(program, transfers=(mixed, *program.transfers[1:])))]
    assert any("partly through host memory" in text for text in texts)

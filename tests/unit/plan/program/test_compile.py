"""Programs of random placements: nothing can hang, every rank gets exactly what it lacks, all ranks compile the same.

The twin below finds out what has to move in the slowest and plainest way, column by column, without looking at
plan/program/compile.py.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_spmd.plan.calls import is_current
from rlhf_spmd.plan.cost.memory import num_params
from rlhf_spmd.plan.layout import group_name
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.instructions import Agree, Post, Program, Run, Wait
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import Workload
from tests.programs import errors, random_program

ROOT = Path(__file__).parents[4]


@st.composite
def programs(draw) -> Program:
    return random_program(lambda options: draw(st.sampled_from(options)))


any_program = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# ---- the twin ------------------------------------------------------------------------------------------------------


def owner(ranks: tuple[int, ...], column: int, mini_batch: int) -> int:
    """Returns the rank of a data-parallel layout that owns a column: the last whose share begins at or before it."""
    starts = [index * mini_batch // len(ranks) for index in range(len(ranks))]
    return ranks[max(index for index, start in enumerate(starts) if start <= column)]


def places(workload: Workload, placement: Placement, name: str) -> list[tuple[int, ...]]:
    """Returns the lists of ranks on which a call runs."""
    if name in placement.layouts:
        return [placement.layouts[name].ranks]
    found = []
    for call in workload.workflow.calls:
        if call.kind == "train" and set(call.inputs) & {"advantages", "returns"}:
            ranks = placement.layouts[call.name].ranks
            found += [ranks] if ranks not in found else []
    return found


def deliveries(workload: Workload, placement: Placement) -> list[tuple[int, str, int]]:
    """Yields (rank, key, column) of all that has to be sent in an iteration, in no particular order."""
    here: set[tuple[int, str, int]] = set()
    sent = []
    for call in workload.workflow.calls:
        work = [
            (owner(ranks, column, workload.mini_batch), column)
            for ranks in places(workload, placement, call.name)
            for column in range(workload.mini_batch)
        ]
        for rank, column in work:
            for key in call.inputs:
                if key != "prompts" and (rank, key, column) not in here:
                    here.add((rank, key, column))
                    sent.append((rank, key, column))
        here |= {(rank, key, column) for rank, column in work for key in call.outputs}
    return sent


def streams(program: Program) -> bool:
    workflow = program.workload.workflow
    needs_batch = workflow.call("estimate_advantages").sums or any(map(is_current, workflow.calls))
    return program.placement.stream and not needs_batch


# ---- properties of every program -----------------------------------------------------------------------------------


@given(program=programs())
@any_program
def test_no_program_can_hang_or_read_what_is_not_there(program):
    assert errors(program) == []


@given(program=programs())
@any_program
def test_every_rank_receives_exactly_the_columns_that_it_lacks(program):
    workload, placement = program.workload, program.placement
    received = Counter()
    for transfer in program.transfers:
        if transfer.model is not None:
            continue
        for message in transfer.messages:
            assert message.source != message.destination and len(message.columns) > 0
            for key in message.keys:
                made_at = places(workload, placement, workload.workflow.producer(key).name)
                for column in message.columns:
                    assert message.source in {owner(ranks, column, workload.mini_batch) for ranks in made_at}
                    rows = [transfer.mini_batch] if streams(program) else range(workload.num_mini_batches)
                    received.update((message.destination, key, column, row) for row in rows)
    lacking = deliveries(workload, placement)
    assert received == Counter((*cell, row) for cell in lacking for row in range(workload.num_mini_batches))


def shadows_of(program: Program, model: str) -> set[int]:
    """Returns the ranks that use a model without training it."""
    layouts = program.placement.layouts
    used = {rank for name, layout in layouts.items() if name.startswith(f"{model}_") for rank in layout.ranks}
    return used - set(layouts[f"{model}_train"].ranks)


@given(program=programs())
@any_program
def test_a_shadow_gets_the_new_weights_once_and_none_travels_twice(program):
    """Each shadow gets them once, after the last step; chains begin where the model trains; who shares a node with a
    trainer is served from there. How the load is spread is the planner's business (test_reallocate.py)."""
    node = program.cluster.node_of
    for model in ("actor", "critic"):
        home = program.placement.layouts[f"{model}_train"].ranks
        shadows = shadows_of(program, model)
        moves = [transfer for transfer in program.transfers if transfer.model == model]
        assert len(moves) == bool(shadows)
        for move in moves:
            arriving = Counter()
            for message in move.messages:
                arriving[message.destination] += message.num_bytes
            assert arriving == dict.fromkeys(shadows, whole_bytes(program.workload, model))
            for route in move.reallocation.routes:
                assert route.ranks[0] in home and not set(route.ranks[1:]) & set(home)
                crossed = sum(node(one) != node(other) for one, other in route.hops)
                assert crossed < len({node(rank) for rank in route.ranks})
            for steps in (program.instructions[rank] for rank in home if rank in move.ranks):
                runs = [i for i, step in enumerate(steps) if isinstance(step, Run) and step.call == f"{model}_train"]
                assert runs[-1] < steps.index(Post(program.transfers.index(move)))


@given(program=programs())
@any_program
def test_a_list_holds_each_run_of_its_rank_and_ends_with_agreement(program):
    workload, layouts = program.workload, program.placement.layouts
    pieces = range(workload.num_mini_batches) if streams(program) else [None]
    for rank, steps in enumerate(program.instructions):
        assert steps[-1] == Agree("metrics") and sum(isinstance(step, Agree) for step in steps) == 1
        runs = [step for step in steps if isinstance(step, Run)]
        for call in workload.workflow.calls:
            mine = [run for run in runs if run.call == call.name]
            here = [ranks for ranks in places(workload, program.placement, call.name) if rank in ranks]
            if call.kind == "train":
                assert len(mine) == workload.epochs * workload.num_mini_batches * len(here)
                continue
            assert {run.mini_batch for run in mine} == (set(pieces) if here else set())
            if all(run.columns is None for run in mine):
                assert len(mine) == len(pieces) * len(here)
            else:  # in parts: each column that it owns, once in every piece
                assert call.name in program.placement.own_first
                parts = Counter((run.mini_batch, column) for run in mine for column in program.columns_of(run, rank))
                owned = layouts[call.name].columns(rank, workload.mini_batch)
                assert parts == Counter((piece, column) for piece in pieces for column in owned)
        for kind in (Post, Wait):
            mine = [number for number, transfer in enumerate(program.transfers) if rank in transfer.ranks]
            assert sorted(step.transfer for step in steps if isinstance(step, kind)) == mine


@given(program=programs())
@any_program
def test_groups_are_those_of_collective_runs_and_of_sums(program):
    """Whole layouts; where replicas of a model are on several nodes, also those of one node, and those in one place on
    each."""
    layouts = program.placement.layouts
    entered = {step.group for steps in program.instructions for step in steps if isinstance(step, Run)} - {None}
    for call in program.workload.workflow.train_calls:
        for rank in (layout := layouts[call.name]).ranks:
            entered |= {group_name(some) for some in layout.sum_ranks(rank, program.cluster.node_of) if len(some) > 1}
    assert entered == set(program.groups)
    assert all(len(ranks) > 1 for ranks in program.groups.values())
    for steps in program.instructions:
        for step in steps:
            if isinstance(step, Run):
                layout = layouts[step.consumer or step.call]
                trains = step.call.endswith("_train") and len(layout.ranks) > 1
                assert step.group is not None if trains else True
                assert step.group is None or program.groups[step.group] == tuple(sorted(layout.ranks))


# ---- determinism ---------------------------------------------------------------------------------------------------

PRINT_FINGERPRINTS = """
import random
from tests.programs import random_program
rng = random.Random(0)
print(" ".join(random_program(rng.choice).fingerprint for _ in range(40)))
"""


def test_every_process_compiles_the_same_program():
    """The same placements, twice here and in two fresh interpreters whose strings hash differently."""
    here = []
    for _ in range(2):
        rng = random.Random(0)
        here.append([random_program(rng.choice).fingerprint for _ in range(40)])
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PRINT_FINGERPRINTS]
        done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=True)
        here.append(done.stdout.split())
    assert here[0] == here[1] == here[2] == here[3]
    assert len(set(here[0])) == 40  # and different ones have different fingerprints


# ---- worked examples -----------------------------------------------------------------------------------------------


def whole_bytes(workload: Workload, model: str) -> int:
    return workload.param_bytes * num_params(workload.shape(model), Shard())

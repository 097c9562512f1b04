"""Programs whose messages go through communicators that work in order: all of them end, and draw the same tokens.

On gloo, which knows no order, this would show little; `tests/run_mpi.py --backend ordered 4` runs it, and
`--backend host`, where every tensor goes through a copy in host memory.
"""

import dataclasses
import os
import random
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from rlhf_spmd.config.options import make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import HOST
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import WORLD, Program
from rlhf_spmd.runtime.failure.failures import PeerError
from rlhf_spmd.runtime.generation.shared_episodes import SharedEpisodes
from tests.folders import write_all, write_model
from tests.mpi.test_chain import Chained
from tests.mpi.test_episodes import parted
from tests.mpi.test_invariance import with_groups
from tests.programs import errors, random_split_placement, random_split_program, streaming_with_stages
from tests.run_mpi import BACKEND
from tests.runs import RunOf, compiled, load
from tests.unit.runtime.execute.test_episodes import EOS_IDS, OPTIONS, a_run

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.skipif(BACKEND not in os.environ, reason="needs a backend of tests/backends.py"),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
NUM_RANDOM, NUM_QUICK = 30, 2
QUICK_CHAIN = ("separation", 150)


def by_strategy(name: str, **options) -> Callable:
    return lambda workload, cluster: load_strategy(name).place(workload, cluster, **options)


PLACEMENTS = {
    "flattening": by_strategy("flattening", zero=1),
    "flattening zero 2": by_strategy("flattening", zero=2),
    "interleaving1": by_strategy("interleaving1"),
    "interleaving2": by_strategy("interleaving2"),
    "separation": by_strategy("separation", generation_ranks=1),
    "separation in stages": by_strategy("separation", generation_pp=2, training_pp=2, in_flight=2),
    "separation in slices": by_strategy("separation", generation_pp=2, training_tp=2, in_flight=1),
    "reallocation": by_strategy("reallocation", generation_tp=2, training_pp=2),
    "streaming with stages": streaming_with_stages,
}


@pytest.fixture(scope="module")
def overrides(written, shared_folder):
    """Returns options of models with four layers, and prompts."""

    def write(folder) -> list[str]:
        write_model(folder / "reward", num_layers=4, head="scalar", seed=1)
        return [word for word in write_all(folder / "others", num_layers=4) if "reward" not in word]

    return [*written(write), f"models.reward={shared_folder / 'reward'}"]


@pytest.fixture(scope="module")
def settings(overrides):
    sizes = ("rollout_batch=12", "mini_batch=4", "micro_batch=1", "generation.max_new_tokens=6", "parity_tolerance=1")
    return load(overrides, *sizes)


@pytest.fixture(scope="module")
def expected(settings) -> str:
    return RunOf(settings).iteration()["tokens_sha256"]


def run(program: Program, settings, world, make_group) -> str:
    """Returns the hash of the tokens after an iteration."""
    assert errors(program) == []
    return RunOf(settings, with_groups(world, program, make_group), program).iteration()["tokens_sha256"]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_strategies(name, settings, expected, world, make_group):
    workload, cluster = make_workload(settings), Cluster.parse(f"1x{world.size}")
    program = compile_program(workload, PLACEMENTS[name](workload, cluster), cluster)
    assert run(program, settings, world, make_group) == expected


@pytest.mark.parametrize("host_bytes", [0, 150])
def test_between_gpus(host_bytes, settings, expected, world, make_group):
    """Rows through host memory, in a communicator of their own; those of more bytes by NCCL, after a notice."""
    workload = dataclasses.replace(make_workload(settings), host_bytes=host_bytes)
    cluster = Cluster.parse(f"1x{world.size}", "a100-80g")
    program = compile_program(workload, streaming_with_stages(workload, cluster), cluster)
    of_rows = {transfer.communicator for transfer in program.transfers if transfer.keys}
    assert of_rows == ({HOST, WORLD} if host_bytes else {WORLD})
    assert run(program, settings, world, make_group) == expected


@pytest.mark.parametrize(
    ("name", "host_bytes"),
    [
        pytest.param(name, host_bytes, marks=[] if (name, host_bytes) == QUICK_CHAIN else [pytest.mark.slow])
        for name in ("separation", "separation in stages", "separation in slices", "streaming with stages")
        for host_bytes in (0, 150, 2**24)
    ],
)
def test_chains_between_gpus(name, host_bytes, settings, world, make_group):
    """Weights in the communicator of large rows, which the next iteration sends before the last copy has them."""
    settings = dataclasses.replace(settings, iterations=3)
    workload = dataclasses.replace(make_workload(settings), host_bytes=host_bytes)
    cluster = Cluster.parse(f"1x{world.size}", "a100-80g")
    placement = dataclasses.replace(PLACEMENTS[name](workload, cluster), chain=True)
    program = compile_program(workload, placement, cluster)
    assert program.chains
    assert errors(program) == []
    chained = Chained(settings, with_groups(world, program, make_group), program).iterations()
    alone = RunOf(settings).iterations()
    assert [row["tokens_sha256"] for row in chained] == [row["tokens_sha256"] for row in alone]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= NUM_QUICK else []) for seed in range(NUM_RANDOM)]
)
def test_random_programs(seed, settings, expected, world, make_group):
    workload, cluster = make_workload(settings), Cluster.parse(f"1x{world.size}")

    def plan(choose):
        return workload, random_split_placement(choose, workload, cluster), cluster

    program = random_split_program(random.Random(seed).choice, plan)
    assert run(program, settings, world, make_group) == expected


# ---- episodes that a copy in stages of two slices draws --------------------------------------------------------------

SHORT_S = 5.0  # in which a broadcast that hangs ends


@pytest.fixture(scope="module")
def run_of_episodes(written, world):
    """Returns run_of_episodes(make_group), which runs two iterations with groups of their own; on one rank without."""
    words = written(lambda folder: write_all(folder / "episodes", eos_token_ids=EOS_IDS))

    def run(make: Callable | None = None) -> list[str]:
        how: dict = {}
        if make is not None:
            how["program"] = compiled(load([*words, *OPTIONS]), world.size, partial(parted, pp=2, tp=2))
            how["world"] = with_groups(world, how["program"], make)
        return [row["tokens_sha256"] for row in a_run(words, seed=1, latest=5, **how).iterations()]

    return run


def test_episodes(run_of_episodes, make_group):
    assert run_of_episodes(make_group) == run_of_episodes()


@pytest.mark.parametrize("num_calls", [0, 2])
def test_a_broadcast_that_not_all_ranks_make(num_calls, run_of_episodes, world, monkeypatch):
    """A rank that receives leaves out the fourth one, or makes another: every rank gets an error that names its
    operation."""
    calls, whole = [], SharedEpisodes.answers

    def answers(episodes: SharedEpisodes, wait_s: float) -> list:
        calls.append(wait_s)
        times = num_calls if len(calls) == 4 and world.rank == 1 else 1
        return [answer for _ in range(times) for answer in whole(episodes, wait_s)]

    monkeypatch.setattr(SharedEpisodes, "answers", answers)
    timeout = timedelta(seconds=SHORT_S)
    with pytest.raises(PeerError, match=r"Run actor_generate with ranks 0-3: .*operation \d+ of ranks \[.*\] on rank"):
        run_of_episodes(lambda ranks, _: dist.new_group([*ranks], timeout) if len(ranks) > 1 else None)
    assert len(calls) >= 4

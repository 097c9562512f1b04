"""One world for all tests of a launch: a process can start torch.distributed only once.

Tests that use the `world` fixture are judged together: a failure on any rank fails the test on all of them, and rank 0
shows it, so that the ranks stay in step.

Three marks say at which numbers of ranks a test runs. `ranks(4, 8)`: only at these. `slow_at(2)`: there only with
`-m slow`. `rotates`: tests with this mark take turns; of every twelve, four run at 2 ranks and eight at 4; at the other
numbers they run only with `-m slow`. Tests without the mark `ranks` are slow at 5 and 8 ranks.
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch.nn.functional as F

from rlhf_spmd.plan.layout import COLLECTIVES
from rlhf_spmd.runtime.world.world import DeadlineError, World
from tests.run_mpi import BACKEND, references

DEADLINE_S = 60.0
MOST_MISMATCHES = 50
MISMATCH = "ranks met at different points"  # mostly the consequence of another rank's failure
# ranks -> which of twelve tests that rotate run there
TURNS = {2: (2, 4, 7, 10), 4: (0, 1, 3, 5, 6, 8, 9, 11), 5: (), 8: ()}
LINEAR = F.linear
_world: World | None = None


@pytest.hookimpl(tryfirst=True)  # before pytest looks for the mark `slow`
def pytest_collection_modifyitems(config, items):
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    elsewhere = [item for item in items if (mark := item.get_closest_marker("ranks")) and size not in mark.args]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item not in elsewhere]
    for item in items:
        slow_at = item.get_closest_marker("slow_at")
        if size in (slow_at.args if slow_at else ()) or size > 4 and not item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("rotates")]
    rotating = [item for item in marked if not item.get_closest_marker("ranks")]  # which has been obeyed above
    for place, item in enumerate(rotating):
        if place % 12 not in TURNS.get(size, range(12)):
            item.add_marker(pytest.mark.slow)


def _named_ranks(size: int) -> dict[str, tuple[int, ...]]:
    ranks = range(size)
    return {
        "all": tuple(ranks),
        "first_half": tuple(ranks[: size // 2]),
        "second_half": tuple(ranks[size // 2 :]),
        "last": (size - 1,),
        "even": tuple(ranks[::2]),
        "odd": tuple(ranks[1::2]),
        "ends": (0, size - 1),
        "all_but_first": tuple(ranks[1:]),
        "the_same": tuple(ranks),
    }


@pytest.fixture(scope="session")
def named_ranks(world):
    """Returns the ranks of the named groups that every test may use; some hold one rank, `the_same` those of `all`."""
    return _named_ranks(world.size)


@pytest.fixture(scope="session")
def world():
    """Yields the ranks of this launch with torch.distributed started and the groups of `named_ranks`."""
    global _world
    _world = World.discover(deadline_s=DEADLINE_S)
    _world.use_device("auto")
    if BACKEND in os.environ:
        from tests.backends import install

        install(os.environ[BACKEND])
    _world.start_torch(_named_ranks(_world.size), threads=1)
    yield _world
    world, _world = _world, None
    world.shutdown()


@pytest.fixture(scope="session")
def make_group(world):
    """Returns make_group(ranks, purpose), which makes a process group (None for one rank), for tests that need others
    than `named_ranks`. Every rank calls it alike."""
    from datetime import timedelta

    from torch.distributed import new_group

    made = {}

    def make(ranks, purpose=COLLECTIVES):
        key = ranks, purpose = tuple(ranks), purpose
        if key not in made:
            made[key] = new_group(list(ranks), timeout=timedelta(seconds=DEADLINE_S)) if len(ranks) > 1 else None
        return made[key]

    return make


@pytest.fixture(scope="module")
def shared_folder(world):
    """Yields a folder that all ranks see (they share a machine), removed after the last test of a file."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(world.bcast(name, what="the folder"))
        world.barrier("the end of the folder")


@pytest.fixture(scope="module")
def written(world, shared_folder):
    """Returns written(write, ...), which is what `write(folder, ...)` returns, or that folder, after one rank has
    written into it."""

    def by_one(write, **sizes):
        found = write(shared_folder, **sizes) if world.rank == 0 else None
        return world.bcast(found, what="the files") or shared_folder

    return by_one


@pytest.fixture(scope="module")
def made_once(request, world, shared_folder):
    """Returns made_once(names, make), which returns a folder with a file or folder of each name, made by
    `make(name, path)`.

    The ranks share the work, and so do the launches of one call of tests/run_mpi.py.
    """
    shared = references()
    folder = shared_folder if shared is None else shared / request.module.__name__.rpartition(".")[2]

    def make_all(names, make):
        if world.rank == 0:
            folder.mkdir(exist_ok=True)
        world.barrier("the folder of what is made once")
        missing = [name for name in names if not (folder / name).exists()]
        world.barrier("what is missing there")
        for name in missing[world.rank :: world.size]:
            make(name, folder / f"{name}.part")
            (folder / f"{name}.part").rename(folder / name)
        world.barrier("what is made once")
        return folder

    return make_all


@pytest.fixture(autouse=True)
def linear_of_torch():
    """Undoes what DeepSpeed's ZeRO 3 leaves in place: a slower F.linear for all that comes later."""
    yield
    F.linear = LINEAR


@pytest.fixture
def job(world, make_group):
    from tests.trainee import Job

    return Job(world, make_group)


@pytest.fixture(scope="session")
def cheap_garbage_collection():
    """Makes garbage collection cheap: DeepSpeed collects garbage whenever it makes an engine, which costs 0.3 s with
    all its modules to go through."""
    import gc

    import torch

    from rlhf_spmd.runtime.engines import deepspeed_engine

    deepspeed_engine._import_deepspeed(torch.device("cpu"))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if _world is not None and "world" in item.fixturenames and call.when in ("setup", "call"):
        outcomes = _outcomes([report.outcome, report.longreprtext], f"{call.when} of {item.nodeid[-40:]}")
        failed = {rank: text for rank, (outcome, text) in enumerate(outcomes) if outcome == "failed"}
        skips = {outcome for outcome, _ in outcomes if outcome != "failed"}
        if report.outcome != "failed" and (failed or len(skips) > 1):
            report.outcome = "failed"
            report.longrepr = f"failed on ranks {sorted(failed)}" if failed else "skipped on some ranks only"
        causes = {rank: text for rank, text in failed.items() if MISMATCH not in text} or failed
        report.sections += [(f"rank {rank}", text) for rank, text in causes.items() if rank != _world.rank]
    return report


def _outcomes(mine, what):
    for _ in range(MOST_MISMATCHES):
        try:
            return _world.allgather(mine, what, deadline_s=2 * DEADLINE_S)
        except AssertionError:  # another rank is still inside the test and fails there now
            continue
        except DeadlineError as error:
            print(error, *mine[1:], sep="\n", file=sys.stderr)
            break
    from mpi4py import MPI

    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(3)  # another rank may be blocked in torch for good

"""Benches whose rows are measured by several ranks, on CPUs of this machine.

Command (rows_of_ranks starts it): mpirun -n N python -m bench.ranks MODULE FOLDER [ARGUMENT ...]
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.rows import on_ranks, read_rows

ROWS = "rows.jsonl"
LIMIT_S = 3600.0


def rows_of_ranks(
    module: str, num_ranks: int, *arguments: str, inputs: Callable[[Path], object] = lambda folder: None
) -> list[dict]:
    """Calls run_cases(world, folder, *arguments) of a module on ranks -> the rows that it returns on rank 0.

    inputs: writes what it needs into the folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs(Path(folder))
        on_ranks(num_ranks, [module, folder, *arguments], package="bench.ranks", limit_s=LIMIT_S)
        return read_rows(Path(folder) / ROWS)


@contextmanager
def one_world() -> Iterator[Any]:
    """Yields the world of a rank, on CPUs; what fails on one rank ends all."""
    from rlhf_spmd.runtime.world.world import World

    world = World.discover()
    world.use_device("cpu")
    try:
        yield world
        world.shutdown()
    except BaseException as error:
        world.fail(error)


def main(name: str, folder: str, *arguments: str) -> None:
    module = import_module(name)
    with one_world() as world:
        rows = module.run_cases(world, Path(folder), *arguments)
    if world.rank == 0:
        (Path(folder) / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

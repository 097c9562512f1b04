"""One rank of each node reads and tokenises the prompts; the others map its result.

The arrays of a tokenised set are written to files that are deleted as soon as the ranks of the node have mapped them,
so a set is in memory once per node and no file is left behind.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.lib import format as npy

from rlhf_spmd.runtime.data.packed_rows import NumberRows, PackedRows, TextRows, TokenRows
from rlhf_spmd.runtime.data.prompts import PromptSet
from rlhf_spmd.runtime.failure.records import prefix
from rlhf_spmd.runtime.world.world import World

ROWS: dict[str, Any] = {
    "prompts": TokenRows,
    "texts": TextRows,
    "columns": TextRows,
    "responses": TokenRows,
    "numbers": NumberRows,
}
OTHERS = ("seed", "source", "counts", "sizes", "weights", "shuffle", "column_names", "remarks")  # fields of a set


def once_per_node(world: World, load: Callable[[], PromptSet]) -> PromptSet:
    """Calls `load` on the first rank of each node, and on ranks that cannot map its files, and returns its result.
    Collective; call it in a block of World.together, so that an error of `load` on one rank reaches all."""
    first, path = world.nodes.index(world.node), ""
    prompts: PromptSet | None = None
    about: Mapping = {}
    try:
        if world.rank == first:
            prompts = load()
            with suppress(OSError):  # no room there: all ranks load
                # the name is unique, because ranks of a node need not share a folder
                path = tempfile.mkdtemp(prefix=prefix())
                about = _write(prompts, path)
        about = world.allgather(about, "the prompts")[first]
        if prompts is None and about:
            with suppress(OSError, ValueError):  # this rank does not see the files
                prompts = _map(about)
        world.barrier("mapping the prompts")
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return load() if prompts is None else prompts


def _write(prompts: PromptSet, path: str) -> Mapping:
    """Writes the arrays of a set to a folder, and returns what else is needed to map it."""
    rows: dict[str, PackedRows] = {}
    for field in ROWS:
        value = getattr(prompts, field) or {}
        rows |= (
            {f"{field}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {field: value}
        )
    for number, part in enumerate(rows.values()):
        for name, array in (("items", part.items), ("ends", part.ends)):
            with open(f"{path}/{number}.{name}", "xb") as file:
                npy.write_array(file, array, allow_pickle=False)
    prompts.fingerprints("")  # computed once for the node
    return {
        "path": path,
        "rows": list(rows),
        "hashes": prompts.hashes,
        "others": {name: getattr(prompts, name) for name in OTHERS},
    }


def _map(about: Mapping) -> PromptSet:
    """Maps the set that another rank has written. Raises OSError or ValueError if this rank does not see its files."""
    fields: dict[str, Any] = {"responses": {}, "numbers": {}, "hashes": about["hashes"]}
    for number, name in enumerate(about["rows"]):
        field, _, key = name.partition("/")
        file = f"{about['path']}/{number}"
        items, ends = (np.asarray(npy.open_memmap(f"{file}.{part}", mode="r")) for part in ("items", "ends"))
        rows = ROWS[field](items, ends)
        if key:
            fields[field][key] = rows
        else:
            fields[field] = rows
    for name, value in about["others"].items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    return PromptSet(**fields)

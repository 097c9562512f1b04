"""One rank of each node reads and tokenises the prompts; the others map its result.

The arrays of a tokenised set are written to files that are deleted as soon as the ranks of the node have mapped them,
so a set is in memory once per node and no file is left behind.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from itertools import count
from typing import Any

import numpy as np
from numpy.lib import format as npy

from rlhf_spmd.runtime.data.packed_rows import NumberRows, PackedRows, TextRows, TokenRows
from rlhf_spmd.runtime.data.prompts import PromptSet
from rlhf_spmd.runtime.failure.records import prefix
from rlhf_spmd.runtime.world.world import World

KINDS = {kind.__name__: kind for kind in (TokenRows, TextRows, NumberRows)}


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
                prompts = PromptSet(**_map(about))
        world.barrier("mapping the prompts")
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return load() if prompts is None else prompts


def _write(prompts: PromptSet, path: str) -> Mapping:
    """Writes the arrays of a set to a folder, and returns its fields, each array with the name of its file."""
    files = (f"{path}/{number}" for number in count())
    prompts.fingerprints("")  # computed once for the node

    def described(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: described(part) for key, part in value.items()}
        if not isinstance(value, PackedRows):
            return value
        file = next(files)
        for name, array in (("items", value.items), ("ends", value.ends)):
            with open(f"{file}.{name}", "xb") as stream:
                npy.write_array(stream, array, allow_pickle=False)
        return {"rows of": file, "kind": type(value).__name__}

    return {field.name: described(getattr(prompts, field.name)) for field in fields(prompts) if field.init}


def _map(value: Any) -> Any:
    """Maps the rows in what `_write` returned. Raises OSError or ValueError if this rank does not see their files."""
    if isinstance(value, Mapping) and "rows of" in value:
        arrays = (npy.open_memmap(f"{value['rows of']}.{part}", mode="r") for part in ("items", "ends"))
        return KINDS[value["kind"]](*map(np.asarray, arrays))
    if isinstance(value, Mapping):
        return {key: _map(part) for key, part in value.items()}
    return tuple(value) if isinstance(value, list) else value

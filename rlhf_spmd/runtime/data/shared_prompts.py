"""One rank of each node reads and tokenises the prompts; the others map its result.

The arrays of a tokenised set are written to files that are deleted as soon as the ranks of the node have mapped them,
so a set is in memory once per node and no file is left behind.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy

from rlhf_spmd.runtime.data.packed_rows import NumberRows, TextRows, TokenRows
from rlhf_spmd.runtime.data.prompts import COUNTS, PromptSet
from rlhf_spmd.runtime.failure.records import PREFIX, SHARED_MEMORY
from rlhf_spmd.runtime.world.world import World

# the other fields of a set
FACTS = ("seed", "source", *COUNTS, "sizes", "weights", "shuffle", "column_names", "remarks")


def once_per_node(world: World, load: Callable[[], PromptSet]) -> PromptSet:
    """Calls `load` on the first rank of each node, and on ranks that cannot map its files, and returns its result.
    Collective; call it in a block of World.together, so that an error of `load` on one rank reaches all."""
    first, path = world.nodes.index(world.node), ""
    prompts: PromptSet | None = None
    about: Mapping = {}
    try:
        if world.rank == first:
            prompts = load()
            if world.nodes.count(world.node) > 1:
                path, about = _write(prompts)
        about = world.allgather({"path": path, **about}, "the prompts")[first]
        if prompts is None and about["path"]:
            prompts = _map(about)
        world.barrier("mapping the prompts")
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return load() if prompts is None else prompts


def _write(prompts: PromptSet) -> tuple[str, Mapping]:
    """Writes the arrays of a set to a new folder -> its path ("" if no disk has room) and the facts to map it."""
    arrays = [prompts.prompts.items, prompts.prompts.ends, prompts.texts.items, prompts.texts.ends]
    for rows in (*prompts.responses.values(), *prompts.numbers.values(), *filter(None, (prompts.columns,))):
        arrays += [rows.items, rows.ends]
    for parent in (tempfile.gettempdir(), SHARED_MEMORY):  # that one last, because weight transfers need it
        path = ""
        try:  # the name is unique, because ranks of a node need not share a folder
            path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
            for number, array in enumerate(arrays):
                with open(f"{path}/{number}.npy", "xb") as file:
                    npy.write_array(file, array, allow_pickle=False)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
        else:
            facts = {name: getattr(prompts, name) for name in FACTS}
            keys = {"keys": list(prompts.responses), "numbers": list(prompts.numbers)}
            about = keys | {"columns": prompts.columns is not None, "facts": facts}
            return path, about | {"hashes": {"tokens": prompts.fingerprint(), "columns": prompts.columns_fingerprint()}}
    return "", {}


def _map(about: Mapping) -> PromptSet | None:
    """Maps the set that another rank has written; None if this rank does not see its files."""
    try:
        numbers = range(4 + 2 * (len(about["keys"]) + len(about["numbers"]) + about["columns"]))
        arrays = [np.asarray(npy.open_memmap(f"{about['path']}/{number}.npy", mode="r")) for number in numbers]
    except (OSError, ValueError):  # not there, or not yet whole
        return None
    rows = list(zip(arrays[::2], arrays[1::2], strict=True))
    columns = TextRows(*rows.pop()) if about["columns"] else None
    found = iter(rows[2:])
    responses = {key: TokenRows(*next(found)) for key in about["keys"]}
    values = {key: NumberRows(*next(found)) for key in about["numbers"]}
    prompts, texts, known = TokenRows(*rows[0]), TextRows(*rows[1]), dict(about["hashes"])
    facts: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in about["facts"].items()
    }
    return PromptSet(prompts, texts, responses=responses, numbers=values, columns=columns, **facts, _hashes=known)

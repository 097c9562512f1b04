"""Prompts are read and tokenised by one rank of each node; the others map what it has found.

A tokenised set is four arrays. They lie in a file which loses its name as soon as the ranks of the node have mapped it,
so a set is in memory once per node, and nothing is left behind.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from rlhf_spmd.runtime.data.prompts import PromptSet, TextRows, TokenRows
from rlhf_spmd.runtime.world.world import World

SHARED_MEMORY = "/dev/shm"  # where the disk has no room: weights on their way need this more
NONCE_BYTES = 16
DTYPES = ("<i8", "<i8", "<i4", "u1")  # of the arrays: ends of prompts and texts, tokens, texts


def once_per_node(world: World, load: Callable[[], PromptSet]) -> PromptSet:
    """What `load` returns, called by the first rank of each node, and by those that can't map its file. Collective, in
    a block of World.together: what `load` raises on one rank must reach all."""
    first, path = world.nodes.index(world.node), ""
    found: PromptSet | None = None
    about: Mapping = {}
    try:
        if world.rank == first:
            found = load()
            if world.nodes.count(world.node) > 1:
                path, about = _write(found)
        said = world.allgather({"path": path, **about}, "the prompts")[first]
        if found is None and said["path"]:
            found = _mapped(said)
        world.barrier("mapping the prompts")
    finally:
        if path:
            os.unlink(path)
    return load() if found is None else found


def _write(prompts: PromptSet) -> tuple[str, Mapping]:
    """The path of a new file with the arrays of a set, and what else has to be known; "" if there is no room for it."""
    arrays = (prompts.prompts.ends, prompts.texts.ends, prompts.prompts.items, prompts.texts.items)
    nonce = os.urandom(NONCE_BYTES)
    for folder in (tempfile.gettempdir(), SHARED_MEMORY):
        path = ""
        try:
            descriptor, path = tempfile.mkstemp(prefix="rlhf_spmd_", dir=folder)
            with open(descriptor, "wb") as file:
                file.write(nonce)
                for array, dtype in zip(arrays, DTYPES, strict=True):
                    file.write(np.ascontiguousarray(array, dtype))
        except OSError:
            if path:
                with suppress(OSError):
                    os.unlink(path)
        else:
            facts = {name: getattr(prompts, name) for name in ("seed", "source", "num_truncated", "num_dropped")}
            about = {"nonce": nonce.hex(), "sizes": list(map(len, arrays)), "fingerprint": prompts.fingerprint()}
            return path, about | {"facts": facts}
    return "", {}


def _mapped(said: Mapping) -> PromptSet | None:
    """The set that another rank has written; None if this rank does not see its file: ranks that share memory need not
    share a folder."""
    try:
        with open(said["path"], "rb") as file:
            if file.read(NONCE_BYTES).hex() != said["nonce"]:
                return None
            whole = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError):  # ValueError: the file is empty
        return None
    arrays, start = [], NONCE_BYTES
    for size, dtype in zip(said["sizes"], DTYPES, strict=True):
        end = start + size * np.dtype(dtype).itemsize
        arrays.append(np.asarray(whole[start:end]).view(dtype))
        start = end
    prompt_ends, text_ends, tokens, encoded = arrays
    prompts, texts = TokenRows(tokens, prompt_ends), TextRows(encoded, text_ends)
    return PromptSet(prompts, texts, **said["facts"], _hash=[said["fingerprint"]])

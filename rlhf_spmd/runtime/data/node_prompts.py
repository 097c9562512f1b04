"""One rank of each node reads and tokenises the prompts; the others map its result.

A tokenised set is four arrays, written to a file that is unlinked as soon as the ranks of the node have mapped it, so a
set is in memory once per node and no file is left behind.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import numpy as np

from rlhf_spmd.runtime.data.prompts import PromptSet, TextRows, TokenRows
from rlhf_spmd.runtime.world.world import World

SHARED_MEMORY = "/dev/shm"  # used only if the disk is full, because weight transfers need it
NONCE_BYTES = 16
DTYPES = ("<i8", "<i8", "<i4", "u1")  # of the arrays: ends of prompts and texts, tokens, texts
RESPONSE_DTYPES = ("<i8", "<i4")  # of a key of responses: ends, tokens


def once_per_node(world: World, load: Callable[[], PromptSet]) -> PromptSet:
    """The result of `load`, which is called by the first rank of each node, and by ranks that cannot map its file.
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
        if path:
            os.unlink(path)
    return load() if prompts is None else prompts


def _write(prompts: PromptSet) -> tuple[str, Mapping]:
    """Writes the arrays of a set to a new file -> its path ("" if no disk has room) and the facts to map it."""
    arrays = [prompts.prompts.ends, prompts.texts.ends, prompts.prompts.items, prompts.texts.items]
    for rows in prompts.responses.values():
        arrays += [rows.ends, rows.items]
    nonce = os.urandom(NONCE_BYTES)
    for folder in (tempfile.gettempdir(), SHARED_MEMORY):
        path = ""
        try:
            descriptor, path = tempfile.mkstemp(prefix="rlhf_spmd_", dir=folder)
            with open(descriptor, "wb") as file:
                file.write(nonce)
                for array, dtype in zip(arrays, dtypes_of(prompts.responses), strict=True):
                    file.write(np.ascontiguousarray(array, dtype))
        except OSError:
            if path:
                with suppress(OSError):
                    os.unlink(path)
        else:
            facts = {name: getattr(prompts, name) for name in ("seed", "source", "num_truncated", "num_dropped")}
            about = {
                "keys": list(prompts.responses),
                "nonce": nonce.hex(),
                "sizes": list(map(len, arrays)),
                "fingerprint": prompts.fingerprint(),
            }
            return path, about | {"facts": facts}
    return "", {}


def _map(about: Mapping) -> PromptSet | None:
    """The set that another rank has written; None if this rank does not see its file, because ranks of a node need not
    share a folder."""
    try:
        with open(about["path"], "rb") as file:
            if file.read(NONCE_BYTES).hex() != about["nonce"]:
                return None
            whole = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError):  # ValueError: the file is empty
        return None
    arrays, start = [], NONCE_BYTES
    for size, dtype in zip(about["sizes"], dtypes_of(about["keys"]), strict=True):
        end = start + size * np.dtype(dtype).itemsize
        arrays.append(np.asarray(whole[start:end]).view(dtype))
        start = end
    prompt_ends, text_ends, tokens, encoded, *others = arrays
    prompts, texts = TokenRows(tokens, prompt_ends), TextRows(encoded, text_ends)
    pairs = zip(about["keys"], others[::2], others[1::2], strict=True)
    responses = {key: TokenRows(items, ends) for key, ends, items in pairs}
    return PromptSet(prompts, texts, responses=responses, **about["facts"], _hash=[about["fingerprint"]])


def dtypes_of(keys: Collection[str]) -> tuple[str, ...]:
    """The types of the arrays of a set with such keys of responses."""
    return DTYPES + RESPONSE_DTYPES * len(keys)

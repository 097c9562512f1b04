"""Prompts are tokenised once per node: what the other ranks map is what the first one found.

python tests/run_mpi.py 3 -- tests/mpi/test_shared_prompts.py
"""

import tempfile
from pathlib import Path

import pytest

from rlhf_spmd.runtime.data.packed_rows import TextRows, TokenRows
from rlhf_spmd.runtime.data.prompts import PromptSet
from rlhf_spmd.runtime.data.shared_prompts import once_per_node

pytestmark = pytest.mark.mpi(min_size=2)
TEXTS = ["one", "zwei später", "\u2028 three"]
PROMPTS = [[1], [2, 3, 2**31 - 1], [4, 5]]


def load() -> PromptSet:
    facts = {"counts": {"truncated": 2, "dropped": 1}, "sizes": (1, 2), "weights": (2.0, 1.5), "shuffle": False}
    facts |= {"columns": TextRows.of(['{"a\\ud83d": 1}', "{}", "{}"]), "column_names": ("a\ud83d",)}
    return PromptSet(TokenRows.of(PROMPTS), TextRows.of(TEXTS), 7, "a file", **facts)


def share(world, load) -> tuple[PromptSet, list[int]]:
    """Returns the prompts, and the ranks that have loaded them."""
    loaded = []

    def noted() -> PromptSet:
        loaded.append(world.rank)
        return load()

    found = once_per_node(world, noted)
    return found, sum(world.allgather(loaded), [])


def check(found: PromptSet) -> None:
    assert found.prompts == PROMPTS and found.texts == TEXTS
    assert (found.seed, found.source, found.counts["truncated"], found.counts["dropped"]) == (7, "a file", 2, 1)
    assert found.fingerprints("") == load().fingerprints("")
    assert found.whole_records([0, 1]) == [{"a\ud83d": 1}, {"a\ud83d": None}]
    assert (found.sizes, found.weights, found.shuffle) == ((1, 2), (2.0, 1.5), False)
    assert found.batch(0, 3) == load().batch(0, 3)


def test_one_rank_tokenises(world):
    before = set(Path(tempfile.gettempdir()).glob("rlhf_spmd_*"))
    found, loaded = share(world, load)
    check(found)
    assert loaded == [world.nodes.index(node) for node in range(world.num_nodes)]
    world.barrier()
    assert set(Path(tempfile.gettempdir()).glob("rlhf_spmd_*")) <= before


def test_where_nothing_can_be_written_all_tokenise(world, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    found, loaded = share(world, load)
    check(found)
    assert loaded == list(range(world.size))

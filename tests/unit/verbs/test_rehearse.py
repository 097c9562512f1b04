"""`python -m rlhf_spmd rehearse`: what it refuses before it starts any process, and what a fault names."""

import subprocess
import sys

import pytest

from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.verbs import rehearse
from tests.programs import separation
from tests.unit.verbs.test_check import HEAVY


class Parsed:
    """Arguments of the command line."""

    def __init__(self, **given):
        self.kill, self.slow, self.drop = given.get("kill"), given.get("slow", []), given.get("drop")


@pytest.fixture(scope="module")
def program() -> Program:
    return separation()


def test_no_torch():
    """64 ranks of it would need 20 GB."""
    modules = "rlhf_spmd.verbs.rehearse, rlhf_spmd.runtime.rehearse.rehearsal, rlhf_spmd.runtime.world.world"
    loaded = f"import sys, {modules}; print([name for name in {HEAVY!r} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", loaded], capture_output=True, encoding="utf-8", check=True)
    assert told.stdout == "[]\n"


def test_faults(program):
    found = rehearse.faults_of(Parsed(kill="2@actor_train", slow=["1=2.5", "0=3"], drop="responses"), program)
    assert found.kill == (2, "actor_train") and found.drop == "responses"
    assert [found.slowness(rank) for rank in program.cluster.ranks] == [3, 2.5, 1, 1]


def test_the_bytes_of_links_between_nodes(capsys):
    answers = [{"sent_bytes": [(0, 0, 1024), (0, 1, 2048)]}, {"sent_bytes": [(1, 0, 1024), (0, 1, 1024)]}]
    result = rehearse.summary([1.0], 0.1, answers, 1.0, 1.0)
    assert (result["bytes_within_nodes"], result["bytes_between_nodes"]) == (1024, 4096)
    assert result["bytes_of_links"] == {"0-1": 3072, "1-0": 1024}
    assert "  node 0 to node 1: 3.0 KiB\n  node 1 to node 0: 1.0 KiB\n" in capsys.readouterr().out

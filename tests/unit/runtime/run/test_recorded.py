"""What a checkpoint records of a run's inputs and surroundings."""

import os
import shutil
from types import SimpleNamespace

from rlhf_spmd.config import presets
from rlhf_spmd.runtime.run import recorded
from tests.runs import OneRank


def test_a_change_of_any_file_changes_a_fingerprint(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(presets.load("tiny").models["actor"], folder)
    (tmp_path / "r.py").write_text("def f(prompts, responses): ...\n", encoding="utf-8")
    words = [f"models.actor={folder}", f"reward_function={tmp_path / 'r.py'}:f"]
    prompts = SimpleNamespace(fingerprints=lambda file: {f"prompts in {file}": "1"})
    job = SimpleNamespace(config=presets.load("tiny", words), prompts=prompts, evaluation=None, base_sums={})
    before = recorded.inputs(job)
    changes = {
        "chat_template.jinja": "tokenizer files",
        "generation_config.json": "model",
        "../r.py": "reward function",
    }
    for file, name in changes.items():
        with (folder / file).open("a", encoding="utf-8") as opened:
            opened.write(" \n")
        now = recorded.inputs(job)
        (changed,) = [one for one in now if now[one] != before[one]]
        assert changed.startswith(name) and now.keys() == before.keys()
        before = now


class TwoHosts(OneRank):
    """Whose other rank has another processor."""

    size = 2

    def allgather(self, value, what="", **_):
        return [value, value | {"processor": "none"}]


def test_surroundings_of_all_ranks_count():
    job = SimpleNamespace(program=SimpleNamespace(fingerprint="abc"), world=OneRank())
    alone = recorded.surroundings(job)
    job.world = TwoHosts()
    both = recorded.surroundings(job)
    assert both == alone | {"processor": f"{alone['processor']} (ranks 0), none (ranks 1)"}
    assert "processor" in recorded.changed(both, alone) and recorded.changed(both, both) == ""


def test_other_surroundings_are_told():
    now = {"stable program": "b", "torch": "2.13", "threads": "1"}
    assert recorded.changed(now, dict(now)) == ""
    assert recorded.changed(now, {}) == ""  # of a version that did not write them
    text = recorded.changed(now, {"stable program": "a", "torch": "2.11", "threads": "1"})
    assert "another program" in text and "torch 2.13 instead of 2.11" in text and "threads" not in text
    assert text.endswith("may differ by rounding")


def test_what_a_run_was_made_with():
    gpu = SimpleNamespace(index=0, num_devices=8, name="NVIDIA H100")
    world = SimpleNamespace(size=4, num_nodes=2, computes=gpu)
    found = recorded._made_with(SimpleNamespace(world=world))
    assert found["hardware"] == "8 x NVIDIA H100 on 2 nodes" and found["ranks"] == 4 and "torch" in found["software"]
    world.computes, world.num_nodes = SimpleNamespace(index=None), 1
    assert recorded._made_with(SimpleNamespace(world=world))["hardware"].endswith(f", {os.cpu_count()} cores")

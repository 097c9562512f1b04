"""The bench that compares this tree with an earlier commit: equal things are equal, and a planted change is named."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tools.unchanged import speed, unchanged
from tools.unchanged.compare import compare, difference
from tools.unchanged.programs import CASES, Case, lines_of
from tools.unchanged.runs import left_by
from tools.unchanged.speed import outside, verdict

SMALL = Case("separation", "1x2", "tiny", {})


def test_a_listing_is_deterministic_and_complete():
    """Every kind of instruction is in some listing, with what `check` and the simulator say."""
    lines = lines_of(SMALL)
    assert lines == lines_of(SMALL)
    offloaded = lines_of(next(case for case in CASES if "offload" in case.options and case.preset == "tiny"))
    text = "\n".join(lines + offloaded)
    for words in (": run actor_generate", ": post transfer", ": wait transfer", ": load ", ": offload ", ": agree "):
        assert words in text
    for words in ("transfer 0 message", "group ", " route [", "bytes: ", "simulated actor_train"):
        assert words in text
    assert len({str(case) for case in CASES}) == len(CASES) == 20
    assert any(line.startswith("finding error") for line in lines_of(CASES[8])), "no case that does not fit"


def test_one_changed_option_is_found():
    found = difference(lines_of(SMALL), lines_of(Case("separation", "1x2", "tiny", {"in_flight": "1"})))
    assert "in flight: 2" in found and "in flight: 1" in found


@pytest.mark.parametrize("edit", ["change", "drop", "add", "swap"])
def test_a_changed_line_is_found_and_named(edit):
    old = lines_of(SMALL)
    new, at = list(old), next(i for i, line in enumerate(old) if ": run actor_generate" in line)
    if edit == "change":
        new[at] = new[at].replace("actor_generate", "actor_infer")
    elif edit == "drop":
        del new[at]
    elif edit == "add":
        new.insert(at, "rank 0 0: agree more")
    else:
        new[at], new[at + 1] = new[at + 1], new[at]
    found = compare({"case": old}, {"case": new}, {})
    assert found["case"].startswith(f"line {at + 1}: ") and "actor_generate" in found["case"]
    assert compare({"case": old}, {"case": list(old)}, {}) == {"case": None}


def write_run(folder: Path, *, weight: float = 1.0, kl: float = 0.25, seconds: float = 1.0) -> dict[str, str]:
    """Writes a run folder with what is compared, and returns that."""
    checkpoint = folder / "checkpoints" / "iteration-000002"
    checkpoint.mkdir(parents=True)
    (folder / "actor").mkdir()
    weights = {"actor.master.norm.weight": torch.tensor([weight, 2.0])}
    save_file(weights, checkpoint / "rank-0000.safetensors", metadata={"steps": "{}"})
    save_file({"norm.weight": torch.ones(2).bfloat16()}, folder / "actor" / "model.safetensors")
    state = {"strategy": "flattening", "kl_coef": 0.05, "scores": {"mean": 0.5}, "inputs": {str(folder): "hash"}}
    (checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")
    row = {"iteration": 0, "kl": kl, "tokens_sha256": "abc", "iteration_s": seconds}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (folder / "samples.jsonl").write_text(json.dumps({"before": "kl"}) + "\n", encoding="utf-8")
    return left_by(folder)


def test_a_flipped_bit_of_a_weight_and_a_moved_metric_are_found(tmp_path):
    old = write_run(tmp_path / "old")
    assert difference(old, write_run(tmp_path / "same", seconds=9.0)) is None, "seconds are not compared"
    (flipped,) = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", 1.0))[0] ^ 1))
    found = difference(old, write_run(tmp_path / "weight", weight=flipped))
    assert found.startswith("rank-0000 actor.master.norm.weight: ") and found.endswith("(1 differences)")
    found = difference(old, write_run(tmp_path / "metric", kl=0.25000000000000006))
    assert found.startswith("iteration 0 kl: 0.25 became 0.25000000000000006")
    assert old["state scores mean"] == "0.5" and "state inputs" not in " ".join(old)


def test_what_only_one_side_has_is_a_difference(tmp_path):
    old = write_run(tmp_path / "old")
    less = {name: text for name, text in old.items() if name != "iteration 0 kl"}
    assert difference(old, less) == "iteration 0 kl: 0.25 became nothing (1 differences)"
    assert difference(less, old) == "iteration 0 kl: nothing became 0.25 (1 differences)"
    assert compare({"a": old}, {"b": old}, {}) == {
        "a": "only the old side has this case",
        "b": "only the new side has this case",
    }


def test_renames_apply_to_whole_words_of_the_old_side(tmp_path):
    old = write_run(tmp_path / "old")
    new = {name.replace(" kl", " kl_divergence", 1) if name.endswith(" kl") else name: old[name] for name in old}
    assert difference(old, new) is not None
    renames = {"kl": "kl_divergence"}
    assert compare({"run": old}, {"run": new}, renames) == {"run": None}, "kl_coef and the samples keep their words"
    lines = ["rank 0 0: run actor_generate generate of actor"]
    expected = ["rank 0 0: run actor_sample generate of actor"]
    assert compare({"p": lines}, {"p": expected}, {"actor_generate": "actor_sample"}) == {"p": None}
    assert compare({"p": lines}, {"p": expected}, {"generate": "sample"})["p"] is not None
    with pytest.raises(ValueError, match="one name"):
        compare({"run": old}, {"run": old}, {"kl": "tokens_sha256"})


def test_the_verdict_of_the_bench(monkeypatch, capsys):
    """Status and last line, with what the trees compute replaced."""
    monkeypatch.setattr(unchanged, "sha_of", lambda commit: "0" * 40)
    monkeypatch.setattr(unchanged, "of_commit", lambda commit, part: ({"case": ["one", "two"]}, 0.0))
    for lines, status in ((["one", "two"], 0), (["one", "three"], 1)):
        monkeypatch.setattr(unchanged, "of_tree", lambda tree, part, lines=lines: ({"case": lines}, 1.0))
        assert unchanged.main(["HEAD", "--only", "programs"]) == status
        printed = capsys.readouterr().out.splitlines()
        assert json.loads(printed[-1])["ok"] == (status == 0)
        assert any("equal" in line or "DIFFERENT: line 2: two became three" in line for line in printed)


def test_a_loss_of_time_is_found_and_noise_is_not():
    """Pairs of seconds with 2% of noise: 5% more is found, as much is let pass, and the slow moments fall on both."""
    dice = np.random.default_rng(0)
    moments = np.linspace(20.0, 40.0, 15)
    old, new = (moments * dice.normal(1.0, 0.02, 15) for _ in range(2))
    same, slower = verdict(old, new), verdict(old, 1.05 * new)
    assert same["ok"] and same["low"] < 1 < same["high"] and abs(same["ratio"] - 1) < 0.02
    assert not slower["ok"] and slower["ratio"] == pytest.approx(1.05 * same["ratio"])
    assert outside(15) == 3, "of 15 sorted ratios the interval is from the fourth to the twelfth"
    with pytest.raises(AssertionError, match="too few"):
        outside(5)


def test_trees_take_turns_and_bad_work_is_measured_twice(monkeypatch):
    ran, seconds = [], {"old": 1.0, "new": 1.2}

    def run(tree, arguments):
        ran.append((str(tree), arguments[0]))

    def processor_s(call):
        call()
        return seconds[ran[-1][0]]

    monkeypatch.setattr(speed, "processor_s", processor_s)
    rows = speed.compare(Path("old"), Path("new"), run, pairs=6)
    assert [row["ok"] for row in rows] == [False, False] and all(row["first"]["high"] > 1.03 for row in rows)
    one = [tree for tree, work in ran if work == "generate"]
    assert one == ["old", "new", *["old", "new", "new", "old"] * 3] * 2
    seconds["new"] = 1.0
    assert all(row["ok"] and "first" not in row for row in speed.compare(Path("old"), Path("new"), run))

"""The bench that compares this tree with an earlier commit: equal things are equal, and a planted change is named."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tools.unchanged.compare import compare, difference
from tools.unchanged.programs import CASES, Case, lines_of
from tools.unchanged.runs import left_by

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


@pytest.mark.parametrize("edit", ["change", "swap"])
def test_a_changed_line_is_found_and_named(edit):
    old = lines_of(SMALL)
    new, at = list(old), next(i for i, line in enumerate(old) if ": run actor_generate" in line)
    if edit == "change":
        new[at] = new[at].replace("actor_generate", "actor_infer")
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

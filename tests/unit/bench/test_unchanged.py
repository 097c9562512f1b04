"""The bench that compares this tree with an earlier commit: equal things are equal, and a planted change is named."""

import json
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.unchanged.compare import difference
from tools.unchanged.runs import left_by


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

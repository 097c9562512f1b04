"""The comparison with vLLM, without vLLM: turns, requests, rows, and why it is skipped."""

import sys

import pytest
import torch

from bench.against_trl.steps import Worker
from bench.against_vllm import against_vllm
from bench.speed import generate_peers as peers
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.transformer import Transformer

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2}
SIZES |= {"num_kv_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
PEER = """
import json, sys
print(json.dumps({"load_s": 1.5}), flush=True)
for line in sys.stdin:
    told = json.loads(line)
    assert len(told["prompts"]) == len(told["lengths"]) and all(len(one) == 32 for one in told["prompts"])
    print(json.dumps({"tokens": told["lengths"][:SLICE]}), flush=True)
"""


@pytest.fixture
def mine():
    model = Transformer(ModelConfig(model_type="llama", **SIZES), head="lm", dtype=torch.float32)
    model.init_weights(0)
    return model.requires_grad_(False)


def worker_of(text: str, folder) -> Worker:
    return Worker([sys.executable, "-c", text], folder / "log")


def test_rows_of_both_kinds_of_requests(mine, tmp_path):
    worker = worker_of(PEER.replace("[:SLICE]", ""), tmp_path)
    load_s = worker.answer()["load_s"]
    works = peers.works(64, num=6, places=4, limit=8)
    rows = list(against_vllm.rows_of(works, mine, worker, 1, load_s))
    worker.end()
    assert [(row["work"], row["requests"], row["places"]) for row in rows] == [
        ("all 8 tokens", 4, 4),
        ("spread, 1-8", 6, 4),
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["peers_s"]["vllm"] / row["ours_s"])
        assert row["ok"] == (row["ratio"] >= row["promised"] == 1.1) and row["peer_load_s"] == 1.5

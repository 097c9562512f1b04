"""Folders of adapters: those of peft 0.17 and 0.21 (tests/adapters) are read, what is written peft loads, bad ones are
named."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.config import AdapterConfig
from rlhf_spmd.model.adapters.files import (
    PREFIX,
    check_base,
    read_adapter,
    write_adapter,
)

ADAPTERS = Path(__file__).parents[3] / "adapters"
FOLDERS = sorted(path for path in ADAPTERS.iterdir() if path.name.startswith("peft-"))
PEER = Path(__file__).parents[4] / ".venv-peers" / "bin" / "python"
Q = "model.layers.{}.self_attn.q_proj"
LOGITS_OF_PEFT = """
import json, sys, torch, peft
assert peft.__version__.startswith("0.21"), peft.__version__
for job in map(json.loads, sys.stdin):
    auto = peft.AutoPeftModelForSequenceClassification if job["scores"] else peft.AutoPeftModelForCausalLM
    model = auto.from_pretrained(job["folder"], **({"num_labels": 1} if job["scores"] else {})).float().eval()
    with torch.no_grad():
        print(json.dumps(model(torch.tensor(job["tokens"])).logits.tolist()))
"""


def logits_of(folder):
    """Returns tokens, and what peft computed from them."""
    found = load_file(folder / "logits.safetensors")
    return found["tokens"], found["logits"]


def equal(one, other):
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def folder(tmp_path):
    """Returns an adapter of peft, to be damaged."""
    return Path(shutil.copytree(ADAPTERS / "peft-0.21-rslora", tmp_path / "adapter"))


def change(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def replace(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file({new: tensor for name, tensor in load_file(path).items() if (new := change(name))}, path)


def spoil(folder, number):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    next(tensor for name, tensor in tensors.items() if "lora_A" in name)[0, 0] = number
    save_file(tensors, path)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("theirs", FOLDERS, ids=lambda path: path.name)
def test_what_peft_wrote_is_read_and_written_again(theirs, tmp_path):
    config, factors, saved = read_adapter(theirs)
    assert all(a.dtype == b.dtype == torch.float32 for a, b in factors.values())
    write_adapter(tmp_path, config, factors, saved)
    again, same_factors, same_saved = read_adapter(tmp_path)
    assert again == config and factors.keys() == same_factors.keys()
    equal(saved, same_saved)
    equal(load_file(theirs / "adapter_model.safetensors"), load_file(tmp_path / "adapter_model.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: change(folder, use_dora=True), "adapter_config.json: use_dora is True, which is not supported"),
        (
            lambda folder: change(folder, r=3),
            r"down_proj have shapes \[2, 24\] and \[16, 2\], .* gives them the rank 3",
        ),
        (lambda folder: replace(folder, lambda name: "" if "0.mlp.up_proj.lora_B" in name else name), "lacks tensor"),
        (lambda folder: replace(folder, lambda name: name.replace("lora_A.weight", "lora_embedding_A")), "adapters of"),
        (lambda folder: replace(folder, lambda name: name.removeprefix(PREFIX)), "neither a factor"),
        (
            lambda folder: replace(folder, lambda name: name.replace("up_proj", "gate_proj")),
            "does not name .*gate_proj",
        ),
        (lambda folder: spoil(folder, float("nan")), r"adapter_model.safetensors: tensor .*lora_A.* are not finite"),
        (lambda folder: spoil(folder, float("inf")), r"adapter_model.safetensors: tensor .*lora_A.* are not finite"),
        (lambda folder: pipe(folder / "adapter_model.safetensors"), "adapter_model.safetensors is a pipe"),
        (lambda folder: pipe(folder / "adapter_config.json"), "adapter_config.json is a pipe"),
        (lambda folder: save_file({}, folder / "adapter_model.safetensors"), "holds no factors"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"abc"), "truncated"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing; copy"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json does not exist"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "adapter_model.bin is a pickle, which this program never opens",
        ),
    ],
)
def test_bad_folders(damage, words, folder):
    damage(folder)
    with pytest.raises(UserError, match=words):
        read_adapter(folder)


def test_another_base():
    """Layers that it lacks, other sizes, targets without factors, and stored modules."""
    shapes = {f"{Q.format(i)}.weight": torch.Size([16, 8]) for i in (0, 1)} | {"lm_head.weight": torch.Size([32, 8])}
    factors = {Q.format(i): (torch.zeros(2, 8), torch.zeros(16, 2)) for i in (0, 1)}
    config = AdapterConfig(rank=2, targets=("q_proj",))
    check_base(config, factors, {"lm_head.weight": torch.zeros(32, 8)}, shapes)
    for factors_here, saved, words in (
        (
            factors | {"model.norm": factors[Q.format(0)]},
            {},
            "norm.weight .* has no such linear layer; give",
        ),
        (
            factors | {Q.format(0): (torch.zeros(2, 16), torch.zeros(8, 2))},
            {},
            r"shape \[8, 16\], .* has \[16, 8\] there",
        ),
        ({Q.format(0): factors[Q.format(0)]}, {}, "name model.layers.1.self_attn.q_proj, for which it has no factors"),
        (factors, {"lm_head.weight": torch.zeros(32, 4)}, r"has lm_head.*shape \[32, 4\], .* has \[32, 8\] there"),
    ):
        with pytest.raises(UserError, match=words):
            check_base(config, factors_here, saved, shapes)


@pytest.mark.slow
@pytest.mark.skipif(not PEER.exists(), reason="peft is in the environment that `make peers` makes")
def test_peft_loads_what_is_written(tmp_path):
    """Its logits are those that it computed from its own folders, within 1e-5."""
    jobs, expected = [], []
    for theirs in FOLDERS:
        config, factors, saved = read_adapter(theirs)
        tokens, logits = logits_of(theirs)
        folder = tmp_path / theirs.name
        write_adapter(folder, config, factors, saved)
        change(folder, base_model_name_or_path=str(ADAPTERS / "base"))
        jobs.append({"folder": str(folder), "scores": config.head == "scalar", "tokens": tokens.tolist()})
        expected.append(logits)
    told = "".join(json.dumps(job) + "\n" for job in jobs)
    done = subprocess.run([PEER, "-c", LOGITS_OF_PEFT], input=told, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.split("\n") if line]
    for job, line, logits in zip(jobs, lines, expected, strict=True):
        torch.testing.assert_close(torch.tensor(json.loads(line)), logits, atol=1e-5, rtol=0, msg=job["folder"])

"""Which folders are adapters, where their base is, and which of them a run can have."""

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.uniform import adapters_in, base_folder, is_adapter, same_model
from rlhf_spmd.plan.adapters import LINEAR_LAYERS, Adapters
from tests.unit.model.adapters.test_files import ADAPTERS, change

BASE = str(ADAPTERS / "base")


def test_a_folder_with_weights_of_its_own_is_no_adapter(tmp_path):
    one = tmp_path / "one"
    shutil.copytree(ADAPTERS / "peft-0.21-rslora", one)
    assert is_adapter(one) and not is_adapter(BASE) and not is_adapter(tmp_path / "none")
    shutil.copy(ADAPTERS / "base" / "model.safetensors", one)
    assert not is_adapter(one)


def test_equal_copies_are_the_same_model(tmp_path):
    """And no other: not with one changed number of any tensor, wherever it is, nor with another config."""
    copy = tmp_path / "copy"
    shutil.copytree(BASE, copy)
    assert same_model(str(copy), BASE) and same_model(BASE, BASE)
    weights = load_file(copy / "model.safetensors")
    for name, one in weights.items():
        for place in (0, one.numel() // 2, -1):
            changed = one.clone()
            changed.view(-1)[place] += 1
            save_file(weights | {name: changed}, copy / "model.safetensors", metadata={"format": "pt"})
            assert not same_model(str(copy), BASE), name
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert same_model(str(copy), BASE)
    config = copy / "config.json"
    values = json.loads(config.read_text(encoding="utf-8")) | {"rms_norm_eps": 0.5}
    config.write_text(json.dumps(values), encoding="utf-8")
    assert not same_model(str(copy), BASE)


def test_the_base_is_named_or_given(tmp_path):
    one = tmp_path / "one"
    shutil.copytree(ADAPTERS / "peft-0.21-rslora", one)
    assert base_folder("") == "" and base_folder(BASE, "other") == BASE
    with pytest.raises(UserError, match=r"holds an adapter for base, which is not a folder here; .*: lora.base=FOLDER"):
        base_folder(str(one))
    assert base_folder(str(one), BASE) == BASE
    change(one, base_model_name_or_path=BASE)
    assert base_folder(str(one)) == BASE


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("peft-0.17-all-linear", Adapters(1, 4.0, LINEAR_LAYERS)),
        ("peft-0.21-all-linear", Adapters(1, 4.0, LINEAR_LAYERS)),
        ("peft-0.21-reward", Adapters(2, 8.0, ("q_proj", "v_proj"))),
    ],
)
def test_the_adapters_of_peft(name, expected, tmp_path):
    assert adapters_in(str(ADAPTERS / name), BASE)[0] == expected
    one = tmp_path / "one"
    shutil.copytree(ADAPTERS / name, one)
    change(one, use_rslora=True)
    assert adapters_in(str(one), BASE)[0] == replace(expected, rslora=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_to_transform": [0]}, "has not the same rank and alpha in all layers"),
        ({"alpha_pattern": {"q_proj": 3}}, "has not the same rank and alpha .* convert .* MERGED --merge"),
        ({"modules_to_save": ["lm_head"]}, "it changes lm_head, which a run can't adapt; merge it"),
        ({"target_modules": ["nothing"]}, "it adapts no layer of its base"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
    ],
)
def test_what_a_run_cannot_have_is_refused(changes, message, tmp_path):
    one = tmp_path / "one"
    shutil.copytree(ADAPTERS / "peft-0.21-reward", one)
    change(one, **changes)
    with pytest.raises(UserError, match=message):
        adapters_in(str(one), BASE)

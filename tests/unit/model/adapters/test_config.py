"""peft's adapter_config.json: which layers it means, their ranks and scales, and what is refused by name."""

import json
import math

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.config import AdapterConfig, from_peft, to_peft

Q, K = ("model.layers.{}.self_attn." + name for name in ("q_proj", "k_proj"))
LEAST = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


def test_ranks_and_scales_follow_the_first_pattern_that_matches_the_end():
    config = AdapterConfig(
        rank=2,
        alpha=8,
        rank_pattern={"q_proj": 4, r"1\..*": 3, "proj": 9},
        alpha_pattern={"self_attn.q_proj": 6, "^layers.0.self_attn.k_proj": 1, r"^model\.layers\.1\..*": 5},
    )
    paths = [Q.format(0), Q.format(1), K.format(0), K.format(1)]
    assert [config.rank_of(path) for path in paths] == [4, 4, 2, 3]  # proj is no whole part
    assert [config.scale_of(path) for path in paths] == [6 / 4, 6 / 4, 8 / 2, 5 / 3]
    stable = from_peft(to_peft(config) | {"use_rslora": True}, [])
    assert [stable.scale_of(path) for path in paths] == [6 / 2, 6 / 2, 8 / math.sqrt(2), 5 / math.sqrt(3)]


@pytest.mark.parametrize(
    ("more", "paths", "targets"),
    [
        ({"fan_in_fan_out": True}, [Q.format(0)], ("q_proj",)),
        ({"target_modules": [Q.format(0)]}, [Q.format(0)], (Q.format(0),)),
        ({"target_modules": ["self_attn.q_proj", "k_proj"]}, [Q.format(0)], ("k_proj", "self_attn.q_proj")),
        ({"target_modules": r".*0\..*q_proj"}, [Q.format(0)], (Q.format(0),)),
        ({"target_modules": "all-linear"}, [K.format(1), Q.format(0)], (Q.format(0), K.format(1))),
        ({"layers_to_transform": 1}, [Q.format(1)], (Q.format(1),)),
        ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, [Q.format(1)], (Q.format(1),)),
        ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, [Q.format(0)], (Q.format(0),)),
        ({"exclude_modules": r".*1.*"}, [Q.format(0)], (Q.format(0),)),
    ],
)
def test_targets(more, paths, targets):
    config = from_peft(LEAST | more, paths)
    assert config.targets == tuple(sorted(targets)) and all(config.adapts(path) for path in paths)


@pytest.mark.parametrize(
    "more",
    [
        {"target_modules": ["proj"]},
        {"target_modules": "q_proj"},
        {"target_modules": None},
        {"layers_to_transform": [0]},
        {"layers_to_transform": 1, "layers_pattern": ["blocks"]},
        {"exclude_modules": ["q_proj"]},
        {"exclude_modules": ".*q_proj"},
    ],
)
def test_factors_of_a_layer_that_is_no_target(more):
    with pytest.raises(UserError, match=r"does not name model.layers.1.self_attn.q_proj.*copy both again"):
        from_peft(LEAST | more, [Q.format(1)])


REFUSED = {"bias": "lora_only", "use_dora": True, "layer_replication": [[0, 2]], "a_key_of_the_future": 0.5}


@pytest.mark.parametrize("key", REFUSED)
def test_what_changes_the_mathematics_is_refused_by_name(key):
    with pytest.raises(UserError, match=f"{key} is .* not supported; merge it with peft: AutoPeft.*'some/folder'"):
        from_peft(LEAST | {key: REFUSED[key]}, [], "some/folder")
    from_peft(LEAST | {key: "none" if key == "bias" else None}, [])


def test_there_and_back():
    """Nothing of it is lost, not even the order of patterns."""
    config = AdapterConfig(
        *(4, 8, True, ("k_proj", "q_proj"), {"q_proj": 2, "k": 1}, {"b": 1, "a": 2}, ("score",), "SEQ_CLS", "the/base"),
        dropout=0.1,
    )
    again = from_peft(json.loads(json.dumps(to_peft(config))), [Q.format(0)])
    assert again == config and list(again.alpha_pattern) == ["b", "a"]
    assert config.head == "scalar" and config.saves("score.weight") and not config.saves("model.norm.weight")


def test_modules_to_save_are_ends_of_names():
    """As in peft (_set_trainable of its utils/other.py), where targets are whole parts."""
    config = AdapterConfig(modules_to_save=("norm", "lm_head"))
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"):
        assert config.saves(name), name
    assert not config.saves("model.layers.0.self_attn.q_proj.weight") and not AdapterConfig().saves("score.weight")
    with pytest.raises(UserError, match="does not name"):
        from_peft(LEAST | {"target_modules": ["proj"]}, [Q.format(0)])
    assert from_peft(LEAST | {"target_modules": "All-Linear"}, [Q.format(0)]).adapts(Q.format(0))


def test_a_score_makes_a_reward_model_where_no_task_is_named():
    config = from_peft(LEAST | {"task_type": None, "modules_to_save": ["score"]}, [])
    assert config.task_type == "SEQ_CLS"
    assert from_peft(LEAST | {"task_type": None}, []).task_type == "CAUSAL_LM"

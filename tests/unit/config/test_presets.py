"""Presets, overrides in words, and the sizes that byte and cost forecasts follow from."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_origin

import pytest
import torch

from rlhf_spmd.config.model_folders import shape_of_folder
from rlhf_spmd.config.options import Config, make_workload, options_of, parse_value, resolved
from rlhf_spmd.config.presets import PRESETS, load
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig, to_hf
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.workload import ModelShape

LLAMA_BILLIONS = {"llama-7b": 6.738, "llama-13b": 13.016, "llama-33b": 32.529, "llama-65b": 65.286, "llama-70b": 68.977}


def refused(*overrides: str, preset: str = "tiny") -> str:
    with pytest.raises(UserError) as error:
        load(preset, overrides)
    return str(error.value)


# ---- presets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_and_is_sound(preset):
    """Through all types and ranges too: each value is read back from its own text."""
    config = load(preset)
    assert config.preset == preset
    assert json.loads(json.dumps(resolved(config))) == resolved(config)
    texts = [f"{key}={text_of(config, key)}" for key in options_of(config) if key != "preset"]
    assert load(preset, texts) == config


def value_of(config: Config, key: str):
    return config.strategy if key == "strategy" else options_of(config)[key][1]


def text_of(config: Config, key: str) -> str:
    value = value_of(config, key)
    if isinstance(value, tuple):
        return ",".join(value)
    return "none" if value is None else str(value)


def test_presets_keep_their_hands_off_each_other():
    assert load("tiny") == load("tiny") and load("tiny").strategy is not load("tiny").strategy
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("tiny").iterations = 3
    with pytest.raises((AttributeError, TypeError)):
        load("tiny").unknown = 3


@pytest.mark.parametrize(("preset", "hint"), [("tniy", "tiny"), ("llama-7", "llama-7b"), ("smollm", "smollm2")])
def test_an_unknown_preset_suggests_one(preset, hint):
    text = refused(preset=preset)
    assert f"{preset!r}" in text and f"did you mean {hint!r}" in text and all(name in text for name in PRESETS)


def test_a_model_folder_replaces_actor_and_reference_and_any_shape():
    config = load("llama-7b", model="some/folder")
    assert (config.models["actor"], config.models["reference"], config.shape) == ("some/folder", "", "")
    assert load("tiny", model="some/folder").models["reward"] == load("tiny").models["reward"]


# ---- overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("iterations=3", 3),  # int
        ("seed=18446744073709551615", 2**64 - 1),
        ("ppo.kl_coef=0.02", 0.02),  # float
        ("ppo.kl_coef=0", 0.0),
        ("optimizer.actor_lr=3e-4", 3e-4),
        ("ppo.normalize_scores=true", True),  # bool
        ("ppo.normalize_scores=False", False),
        ("ppo.normalize_scores=1", True),
        ("dtype=bfloat16", "bfloat16"),  # Literal
        ("ppo.clip_score=5", 5.0),  # float or None
        ("ppo.clip_score=none", None),
        ("ppo.clip_score=None", None),
        ("ppo.clip_score=null", None),
        ("parity_tolerance=1e-3", 1e-3),
        ("data.prompts=a=b.txt", "a=b.txt"),  # str, whatever it looks like
        ("data.key=7", "7"),
        ("data.key=none", "none"),
        ("models.actor=", ""),
        ("ppo.truncation_penalty=-2.5", -2.5),  # negative float
    ],
)
def test_an_override_of_every_type(override, value):
    key = override.partition("=")[0]
    found = value_of(load("tiny", [override]), key)
    assert found == value and type(found) is type(value)


def bare(hint):
    """A type without what limits it."""
    return hint.__origin__ if get_origin(hint) is Annotated else hint


def test_the_last_of_several_overrides_wins():
    assert load("tiny", ["iterations=3", "iterations=4"]).iterations == 4


def test_strategy_options_stay_text_until_place_says_their_types():
    assert load("tiny", ["strategy.zero=1", "strategy.ratio=1/4"]).strategy == {"zero": "1", "ratio": "1/4"}
    for override in ("strategy=flattening", "strategy.a.b=1"):
        text = refused(override)
        assert "strategy.NAME=value" in text and "--strategy" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("itertions=3", ["'itertions'", "did you mean 'iterations'"]),
        ("ppo.kl_coeff=1", ["'ppo.kl_coeff'", "did you mean 'ppo.kl_coef'", "ppo.clip_ratio"]),
        ("optimiser.actor_lr=1", ["did you mean 'optimizer.actor_lr'"]),
        ("kl_coef=1", ["did you mean 'ppo.kl_coef'"]),
        ("max_prompt=1", ["did you mean 'data.max_prompt'"]),
        ("temperature=1", ["did you mean 'generation.temperature'"]),
        ("ppo.iterations=1", ["'ppo.iterations'", "did you mean 'iterations'"]),
        ("xyzzy=1", ["'xyzzy'", "known here", "iterations"]),
        ("=1", ["unknown option ''"]),
        ("ppo.=1", ["unknown option 'ppo.'"]),
        ("ppo..kl_coef=1", ["unknown option"]),
        ("iterations.x=3", ["'iterations.x'", "iterations has no parts"]),
        ("ppo=3", ["'ppo' is a group of options", "ppo.kl_coef"]),
        ("models=x", ["models.actor", "models.reward"]),
        ("iterations", ["'iterations'", "key=value"]),
        ("preset=llama-7b", ["preset=llama-7b", "--preset llama-7b"]),
    ],
)
def test_keys_that_are_none(override, words):
    text = refused(override)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("iterations=three", ["valid integer"]),
        ("iterations=1.5", ["integer"]),
        ("iterations=0", ["greater than 0"]),
        ("iterations=-1", ["greater than 0"]),
        ("iterations=", ["integer"]),
        ("iterations=none", ["integer"]),
        ("seed=-1", ["greater than or equal to 0"]),
        ("seed=18446744073709551616", ["less than 18446744073709551616"]),
        ("ppo.kl_coef=-0.1", ["greater than or equal to 0"]),
        ("ppo.kl_coef=much", ["valid number"]),
        ("ppo.kl_coef=0.1,0.2", ["valid number"]),
        ("ppo.kl_coef=nan", ["greater than or equal to 0"]),
        ("ppo.kl_coef=inf", ["finite"]),
        ("ppo.truncation_penalty=nan", ["finite"]),
        ("deadline_s=Infinity", ["less than or equal to 1000000"]),
        ("shape=llama-7b", ["tiny/actor has a shape of its own"]),
        ("ppo.gamma=1.5", ["less than or equal to 1"]),
        ("ppo.normalize_scores=maybe", ["boolean"]),
        ("dtype=float16", ["'float32' or 'bfloat16'"]),
        ("generation.temperature=0", ["greater than 0"]),
        ("optimizer.beta1=1", ["less than 1"]),
        ("optimizer.beta2=1.5", ["less than 1"]),
        ("micro_batch=[1,2]", ["integer"]),
    ],
)
def test_wrong_values_name_key_and_value(override, words):
    text = refused(override)
    assert text.startswith(f"{override}: ") and all(word in text for word in words), text


def test_sizes_that_do_not_divide_name_all_three():
    text = refused("rollout_batch=10", "samples_per_prompt=3", "mini_batch=4")
    assert all(word in text for word in ("rollout_batch 10", "samples_per_prompt 3", "30 sequences", "mini_batch 4"))
    assert load("tiny", ["rollout_batch=10", "samples_per_prompt=2", "mini_batch=4"]).mini_batch == 4


def test_settings_that_contradict_each_other():
    text = refused("generation.min_new_tokens=30")
    assert "min_new_tokens=30" in text and "max_new_tokens=24" in text
    assert "generation.top_k" in refused("generation.top_p=0.9")
    for temperature in ("1e-45", "9e-7"):
        text = refused(f"generation.temperature={temperature}")
        assert text.startswith(f"generation.temperature={temperature.replace('-7', '-07')}: logits are divided by it")
        assert text.endswith("give at least 1e-06")
        text = refused("eval.prompts=p.jsonl", f"eval.temperature={temperature}")
        assert text.endswith("give at least 1e-06, or 0 for the most likely token")
    assert "unknown shape 'llama-7' (did you mean 'llama-7b'?)" in refused("shape=llama-7", preset="llama-13b")


@pytest.mark.parametrize(
    ("algorithm", "more", "fix"),
    [
        ("grpo", [], "k2 or k3, or kl_unbiased=true"),
        ("reinforce_plus_plus", ["kl_in=loss"], "k2 or k3"),
    ],
)
def test_k1_in_the_loss_is_refused(algorithm, more, fix):
    """Its gradient does not depend on the reference. Multiplied by the ratio it does, and in the reward it counts."""

    def load_with(*options: str) -> Config:
        return load(None, [f"{algorithm}.{option}" for option in [*options, *more]], algorithm=algorithm)

    with pytest.raises(UserError, match=f"kl_estimator=k1 as a term of the loss has no gradient .*={fix}$"):
        load_with("kl_coef=0.1", "kl_estimator=k1")
    assert load_with("kl_coef=0", "kl_estimator=k1").options.kl_estimator == "k1"
    assert load_with("kl_coef=0.1", "kl_estimator=k2").options.kl_coef == 0.1
    more = ["kl_in=reward"] if more else ["kl_unbiased=true"]
    assert load_with("kl_coef=0.1", "kl_estimator=k1").options.kl_coef == 0.1


def test_values_that_are_no_text_are_checked_too():
    assert parse_value(int, 3, "k") == 3 and parse_value(list[float], (1, 2), "k") == [1.0, 2.0]
    with pytest.raises(UserError, match=r"^k=\['x'\]: .*number"):
        parse_value(list[float], ["x"], "k")


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (list[float], "0.5,0.5", [0.5, 0.5]),
        (list[float], "[0.5, 0.5]", [0.5, 0.5]),
        (list[float], "0.5", [0.5]),
        (list[str], "actor, critic", ["actor", "critic"]),
        (Sequence[int], "1,2", [1, 2]),
        (tuple[int, ...], "3", (3,)),
        (dict[str, float], '{"actor": 1}', {"actor": 1.0}),
        (int | None, "none", None),
        (int | str, "x", "x"),
    ],
)
def test_lists_and_unions(annotation, text, value):
    assert parse_value(annotation, text, "k") == value


def test_a_type_that_no_text_can_give():
    with pytest.raises(UserError, match="strategy.net cannot be set from text.*Module"):
        parse_value(torch.nn.Module, "x", "strategy.net")


def test_endless_brackets_are_just_wrong():
    with pytest.raises(UserError, match="^k="):
        parse_value(int, "[" * 100_000, "k")


# ---- workloads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", LLAMA_BILLIONS)
def test_llama_presets_have_the_published_sizes(preset):
    workload = make_workload(load(preset))
    assert workload.models["actor"].num_params / 1e9 == pytest.approx(LLAMA_BILLIONS[preset], abs=1e-3)
    assert workload.models["actor"] == workload.models["reference"]
    scalar = workload.models["actor"].num_params - 32000 * workload.models["actor"].hidden_size
    for name in ("critic", "reward"):
        assert workload.models[name].num_params == scalar + workload.models["actor"].hidden_size
    assert workload.param_bytes == 2 and workload.num_mini_batches == 4


def test_llama_7b_to_the_last_parameter():
    assert make_workload(load("llama-7b")).models["actor"].num_params == 6_738_415_616


SMALL = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_layers": 3, "num_heads": 4, "head_dim": 6}
FAMILIES = [
    {"model_type": "llama", "num_kv_heads": 4},
    {"model_type": "llama", "num_kv_heads": 2, "attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    {"model_type": "mistral", "num_kv_heads": 2, "head_dim": 8},
    {"model_type": "qwen2", "num_kv_heads": 1, "attention_bias": True},
    {"model_type": "qwen3", "num_kv_heads": 2, "head_dim": 10, "qk_norm": True},
    {"model_type": "qwen3", "num_kv_heads": 4, "qk_norm": True, "attention_bias": True, "attention_output_bias": True},
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family['model_type']}-{len(family)}")
def test_parameters_are_counted_as_the_model_makes_them(family, tied, tmp_path):
    model_config = ModelConfig(**(SMALL | family), tie_embeddings=tied)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(model_config, head="lm", dtype="float32")), encoding="utf-8")
    shape = shape_of_folder(str(tmp_path))
    for head in ("lm", "scalar"):
        model = Transformer(model_config, head=head, device="meta")
        count = sum(parameter.numel() for parameter in model.parameters())
        assert dataclasses.replace(shape, scalar_head=head == "scalar").num_params == count


def test_large_models_are_counted_alike():
    """The same for llama-7b itself, whose parameters the meta device makes without memory."""
    shape: ModelShape = make_workload(load("llama-7b")).models["actor"]
    sizes = {name: getattr(shape, name) for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads")}
    sizes |= {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab_size}
    model = Transformer(ModelConfig(model_type="llama", **sizes), head="lm", device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_params


@pytest.fixture
def folder(tmp_path) -> str:
    model_config = ModelConfig(**(SMALL | FAMILIES[0]))
    (tmp_path / "config.json").write_text(json.dumps(to_hf(model_config, head="lm", dtype="float32")), encoding="utf-8")
    return str(tmp_path)


def test_a_workload_from_folders(folder):
    config = load("tiny", [f"models.reward={folder}", "data.max_prompt=5", "generation.max_new_tokens=7"], folder)
    workload = make_workload(config)
    assert workload.models["actor"].vocab_size == 50 and not workload.models["actor"].scalar_head
    assert workload.models["critic"].scalar_head and workload.models["reward"].scalar_head
    assert (workload.max_prompt, workload.max_response, workload.param_bytes) == (5, 7, 4)
    assert workload.row_bytes("prompts") == 20 and workload.row_bytes("values") == 32
    assert workload.weight_bytes("actor") == 4 * workload.models["actor"].num_params
    assert workload.num_sequences == 128 and workload.num_mini_batches == 4


def test_a_folder_given_by_override_counts_more_than_the_preset_s_shape(folder):
    overrides = [f"models.actor={folder}", f"models.reward={folder}"]
    assert make_workload(load("llama-7b", overrides)).models["actor"].hidden_size == 24


def test_a_reward_function_takes_the_reward_model_s_place_or_joins_it(folder):
    function = ["reward_function=a:b"]
    assert make_workload(load("smollm2", function, folder)).models["reward"] is None
    assert make_workload(load("smollm2", function, folder)).weight_bytes("reward") == 0
    both = [*function, "reward_function_mode=add", f"models.reward={folder}"]
    assert make_workload(load("smollm2", both, folder)).models["reward"].scalar_head


def test_what_is_missing_is_named(folder):
    cases = [
        (load("smollm2"), ["preset smollm2", "--model FOLDER"]),
        (load("smollm2", ["reward_function="], folder), ["models.reward", "reward_function"]),
        (load("smollm2", ["reward_function_mode=add"], folder), ["models.reward"]),
        (load("smollm2", [], f"{folder}/none"), [f"{folder}/none/config.json does not exist"]),
        (load("smollm2", [f"models.critic={folder}/none"], folder), [f"{folder}/none/config.json does not exist"]),
    ]
    for config, words in cases:
        with pytest.raises(UserError) as error:
            make_workload(config)
        assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"llama"', "null", '{"model_type": "gpt2"}', "\x00", "{}"])
def test_a_config_json_that_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="config.json"):
        shape_of_folder(str(tmp_path))


def test_a_config_json_that_is_a_folder_or_not_text(tmp_path):
    (tmp_path / "one" / "config.json").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").write_bytes(b"\xff\xfe\x00")
    for name in ("one", "two"):
        with pytest.raises(UserError, match="cannot be read as JSON"):
            shape_of_folder(str(tmp_path / name))


JUNK = (None, "x", "", [], ["x"], [[]], {}, {"a": {}}, 2.5, -1, 0, True, False, float("nan"), float("inf"), 10**400)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_junk_in_a_config_json_is_a_model_or_an_error_that_names_file_and_key(tmp_path, family):
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
    good = {"model_type": family, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6} | sizes
    rope = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 9}
    good |= {"rope_scaling": {"rope_type": "llama3"} | rope, "use_sliding_window": True, "sliding_window": 5}
    more = ("rms_norm_eps", "rope_theta", "rope_parameters", "partial_rotary_factor", "max_position_embeddings")
    more += ("layer_types", "max_window_layers", "hidden_act", "eos_token_id", "bos_token_id", "pad_token_id")
    cases = [(key, good | {key: junk}) for key in (*good, *more) for junk in JUNK]
    for key in ("rope_type", "rope_theta", "attention_factor", *rope):
        cases += [(key, good | {"rope_scaling": good["rope_scaling"] | {key: junk}}) for junk in JUNK]
    for key, values in cases:
        (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
        try:
            shape_of_folder(str(tmp_path))
        except UserError as error:
            text = str(error).replace("rope type", "rope_type")
            assert text.startswith(f"{tmp_path}/config.json: "), values
            words = (key, "rope_scaling", "kv_heads", "attention heads", "is 0, but", "is -1, but")
            assert any(word in text for word in words), (values, text)


@pytest.mark.parametrize(
    ("values", "words"),
    [({"rms_norm_eps": None}, "'rms_norm_eps' is None"), ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear'")],
)
def test_a_value_of_the_wrong_kind_names_file_and_key(folder, values, words):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")
    with pytest.raises(UserError, match=rf"config\.json: {words}, but must be"):
        shape_of_folder(folder)

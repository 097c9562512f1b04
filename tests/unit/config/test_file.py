"""Files of --config: what is read, what wins, what is refused in which words, and that a resolved config comes back."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_spmd.__main__ import read
from rlhf_spmd.command_line.words import load_config
from rlhf_spmd.config import options as configs
from rlhf_spmd.config import presets
from rlhf_spmd.config.checks import check_options
from rlhf_spmd.config.file import to_text
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_tree import options_of, with_value

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    [
        "on",
        "null",
        "1e-3",
        "~",
        "a: b",
        "a #b",
        "- a",
        "{x}",
        "'",
        '"',
        "\\",
        "\t",
        "\n",
        "é\u2028\U0001f600\x7f\x85",
        "a:",
    ]
)


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def parsed(path: str, *words: str, verb: str = "train") -> argparse.Namespace:
    return read([verb, "--config", path, *words])


def loaded(path: str, *words: str, verb: str = "train") -> configs.Config:
    return load_config(parsed(path, *words, verb=verb))


def refused(tmp_path: Path, text: str | bytes, *words: str, verb: str = "train") -> str:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        loaded(path, *words, verb=verb)
    assert path in str(error.value)
    return str(error.value)


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_nested_keys_are_dotted_names_and_flags_are_keys(tmp_path):
    path = write(
        tmp_path,
        """
        algorithm: grpo
        model: some/folder
        preset: tiny
        strategy: {name: separation, zero: 1, ratios: "actor=1/2"}
        layout: 2x4
        runs: elsewhere
        iterations: 3
        grpo: {kl_coef: 1e-3, overlong: keep}
        optimizer.actor_lr: 3e-6
        generation:
          stop: ["a,b", "\\n"]
        reward_function: [a.py:f, "b.py:g"]
        reward_weights: [1, 0.5]
        """,
    )
    found = parsed(path)
    config = load_config(found)
    assert (found.strategy, found.runs, found.name) == ("separation", "elsewhere", None)
    assert config.strategy == {"zero": "1", "ratios": "actor=1/2"}
    words = ["grpo.kl_coef=1e-3", "optimizer.actor_lr=3e-6", 'generation.stop=["a,b", "\\n"]', "iterations=3"]
    words += ["reward_function=a.py:f,b.py:g", "reward_weights=1,0.5", "strategy.zero=1", "strategy.ratios=actor=1/2"]
    assert config == presets.load("tiny", words, "some/folder", algorithm="grpo")
    assert parsed(path, verb="check").layout == parsed(path, verb="plan").layout == "2x4"
    assert parsed(path, verb="check").strategy == "separation"
    assert parsed(path, "--out", "x.png", verb="draw").strategies == ["separation"]


@pytest.mark.parametrize("text", ["on", "1e-3", "1_000", "010", "12:30:45", "2026-01-02", "0x1f", "=", ".5"])
def test_a_text_stays_what_stands_in_the_file(tmp_path, text):
    assert loaded(write(tmp_path, f"data:\n  key: {text}\n")).data.key == text


@pytest.mark.parametrize("null", ["null", "~", "", "# none"])
def test_null(tmp_path, null):
    path = write(
        tmp_path, f"ppo: {{clip_score: 5}}\nparity_tolerance: {null}\ngeneration:\n  stop: {null}\nwandb: {null}\n"
    )
    config = loaded(path, "ppo.clip_score=none")
    assert (config.parity_tolerance, config.generation.stop, config.wandb) == (None, (), "")
    assert config.options.clip_score is None
    assert loaded(write(tmp_path, "optimizer:\nstrategy:\nmodel: null\n")) == presets.load("tiny")
    assert loaded(write(tmp_path, 'data: {key: "null"}\n')).data.key == "null"


# ---- what wins -------------------------------------------------------------------------------------------------------


def test_words_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = write(tmp_path, "preset: tiny\niterations: 3\nppo: {kl_coef: 0.5}\nstrategy: {name: separation, zero: 1}\n")
    config = loaded(path, "iterations=4")
    assert (config.iterations, config.options.kl_coef, config.options.epochs) == (4, 0.5, 2)
    assert loaded(path, "--preset", "smollm2").options.truncation == "score"
    assert loaded(path, "strategy.zero=0").strategy == {"zero": "0"}
    assert parsed(path, "--strategy", "flattening").strategy == "flattening"


def test_another_strategy_comes_without_the_options_of_the_first(tmp_path):
    path = write(tmp_path, "strategy: {name: separation, zero: 1}\n")
    assert loaded(path, "--strategy", "flattening").strategy == {}
    assert loaded(path, "--strategy", "separation").strategy == {"zero": "1"}
    assert loaded(path, verb="plan").strategy == {}
    assert loaded(path, "flattening", "separation", "--out", "x.png", verb="draw").strategy == {"zero": "1"}
    path = write(tmp_path, "strategy.zero: 1\n")  # of flattening, the default
    assert loaded(path).strategy == {"zero": "1"} and parsed(path, verb="check").strategy == "flattening"


def test_another_algorithm_comes_without_the_options_and_roles_of_the_first(tmp_path):
    path = write(tmp_path, to_text(configs.resolved(presets.load("tiny"))))
    config = loaded(path, "--algorithm", "grpo", "samples_per_prompt=4")
    assert config.algorithm.name == "grpo" and config.options == presets.load("tiny", algorithm="grpo").options
    assert set(config.models) == {"actor", "reference", "reward"} and config.rollout_batch == 128


def test_a_model_of_the_command_line_replaces_the_one_that_the_file_resolved(tmp_path):
    path = write(tmp_path, "preset: tiny\nmodels: {actor: one, reference: two}\n")
    assert loaded(path).models["actor"] == "one"
    models = loaded(path, "--model", "three").models
    assert (models["actor"], models["reference"]) == ("three", "two")


def test_a_layout_or_a_cluster_of_the_command_line_replaces_both(tmp_path):
    path = write(tmp_path, "layout: 2x4\n")
    assert parsed(path, "--cluster", "c.toml", verb="plan").layout is None
    assert parsed(path, "--layout", "1x2", verb="plan").layout == "1x2"
    path = write(tmp_path, "cluster: c.toml\n")
    assert parsed(path, "--layout", "1x2", verb="plan").cluster is None
    assert parsed(path, verb="plan").cluster == parsed(path).cluster == "c.toml"


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nppo:\n  klcoef: 1\n", ["line 3", "ppo.klcoef", "did you mean 'ppo.kl_coef'"]),
        ("learning_rate: 1\n", ["line 1", "did you mean 'optimizer.actor_lr'"]),
        ("layuot: 1x2\n", ["did you mean 'layout'"]),
        ("resume: a\n", ["line 1", "unknown option 'resume'"]),
        ("\niterations: many\n", ["line 2", "iterations=many", "valid integer"]),
        ("ppo: 3\n", ["line 1", "'ppo' is a group of options"]),
        ("ppo: {kl_coef: 1}\nppo.kl_coef: 2\n", ["line 2", "ppo.kl_coef is given twice"]),
        ("strategy: [a, b]\n", ["line 1", "strategy must be one text"]),
        ("- seed: 1\n", ["holds no options"]),
        ("seed: 1\nppo:\n\tkl_coef: 1\n", ["line 3", "not a file of options"]),
        (b"seed: 1\nwandb: \xe4\n", ["not a file of options"]),
        ("a: &x {b: *x}\n", ["not a file of options"]),
        ("reward_function: &x [*x]\n", ["line 1", "a list of something else than texts"]),
        ("seed: !!python/object/apply:os.system [ls]\n", ["line 1", "valid integer"]),
        ("seed: !mine 3\n", ["line 1", "tag !mine"]),
        ("data: {prompts: ['a,b.jsonl', c.jsonl]}\n", ["line 1", "'a,b.jsonl'", "comma"]),
    ],
)
def test_a_bad_file(tmp_path, text, words):
    message = refused(tmp_path, text)
    assert [word for word in words if word not in message] == [], message


# ---- back again ------------------------------------------------------------------------------------------------------


def values_of(annotation: Any) -> st.SearchStrategy:
    """Returns values of an option's type, within its limits."""
    limits: dict[str, Any] = {}
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
        parts = [one for extra in extras for one in getattr(extra, "metadata", [extra])]
        limits = {name: getattr(one, name) for one in parts for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if annotation is int:
        low = limits.get("ge", limits.get("gt", -1) + 1)
        return st.integers(low, min(limits.get("lt", 2**40) - 1, limits.get("le", 2**40)))
    if annotation is float:
        low, high = limits.get("ge", limits.get("gt", -1e9)), limits.get("le", limits.get("lt", 1e9))
        return st.floats(low, high, exclude_min="gt" in limits, exclude_max="lt" in limits).map(
            abs if low >= 0 else float
        )
    if get_origin(annotation) is tuple:
        of_items = get_args(annotation)
        if of_items[-1] is ...:
            return st.lists(values_of(of_items[0]).filter(lambda item: item != ""), max_size=3).map(tuple)
        return st.tuples(*map(values_of, of_items))
    if get_origin(annotation) is Mapping:
        plain = st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS
        )
        return st.dictionaries(TEXTS, st.one_of(plain, st.lists(plain), st.dictionaries(TEXTS, plain)), max_size=3)
    if isinstance(annotation, type) and annotation is bool:
        return st.booleans()
    if annotation is str:
        return TEXTS
    return st.one_of(*(st.none() if one is type(None) else values_of(one) for one in get_args(annotation)))


# what names the rest, what check_options ties together, and what iterations follow from (test_epochs.py)
FIXED = ("preset", "shape", "reward_weights", "data.epochs")


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_resolved_config_comes_back(data, tmp_path):
    """Any value of any option, of every algorithm: the file that `check` prints gives the identical config."""
    algorithm = data.draw(st.sampled_from(["ppo", "grpo", "rloo", "remax", "reinforce_plus_plus"]))
    preset = data.draw(st.sampled_from(["tiny", "model", "llama-7b"]))
    config = presets.load(preset, algorithm=algorithm)
    known = options_of(config)
    for key in data.draw(st.lists(st.sampled_from([key for key in known if key not in FIXED]), max_size=8)):
        value = data.draw(values_of(known[key].annotation), label=key)
        changed = with_value(config, key, value)
        try:
            check_options(changed)
        except UserError:
            continue
        config = changed
    if data.draw(st.booleans()):
        config = configs.overridden(config, [f"strategy.zero={data.draw(TEXTS)}"])
    if config.main_folder:
        config = with_value(config, "shape", "")
    text = to_text(configs.resolved(config, strategy="flattening"))
    path = write(tmp_path, text)
    assert loaded(path) == config
    assert to_text(configs.resolved(loaded(path), strategy=parsed(path).strategy)) == text
    stored = tmp_path / "config.json"
    indent, is_ascii = data.draw(st.sampled_from([2, "\t"])), data.draw(st.booleans())
    values = configs.resolved(config, strategy="flattening")
    stored.write_text(json.dumps(values, indent=indent, ensure_ascii=is_ascii), encoding="utf-8")
    assert loaded(str(stored)) == config


def test_a_folder_with_a_page_gives_back_its_algorithm(tmp_path):
    """As a run with --algorithm FILE.py leaves it: config.json has the page's title alone."""
    page = Path(__file__).parents[2] / "toy_pages" / "group.py"
    folder = tmp_path / "run"
    folder.mkdir()
    config = presets.load("tiny", ["iterations=3"], algorithm=str(page))
    (folder / "algorithm.py").write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "config.json").write_text(
        json.dumps(configs.resolved(config, strategy=f"{folder}/strategy.py")), encoding="utf-8"
    )
    found = parsed(str(folder / "config.json"))
    again = load_config(found)
    assert configs.resolved(again) == configs.resolved(config) and again.algorithm == config.algorithm
    assert found.strategy == f"{folder}/strategy.py"

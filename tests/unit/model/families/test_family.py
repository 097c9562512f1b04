"""Pages of families: the layers and the programs know what a family implies, and never which one it is."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_spmd.config.model_folders import FLAGS, LONGEST, model_config_of
from rlhf_spmd.model.config import from_hf, to_hf
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.plan.workload import ModelShape
from tests.unit.model.families.test_mixtures import CASES as MIXTURES
from tests.unit.model.test_hf import FAMILIES as FOLDERS
from tests.unit.model.test_transformer import CASES, SMALL

MIXTURE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True},
    **{"mlp_only_layers": [0], "decoder_sparse_step": 1},
}
PACKAGE = Path(__file__).parents[4] / "rlhf_spmd"
FORMATS = PACKAGE / "model" / "texts" / "tool_calls.py"  # formats of tool calls are called after families


def test_every_family_is_compared_with_transformers():
    logits, folders = {family for family, _ in CASES.values()}, {case.split()[0] for case in FOLDERS}
    assert logits == folders == {name for name, family in FAMILIES.items() if not family.sizes}
    assert {family for family, *_ in MIXTURES.values()} == FAMILIES.keys() - folders


def test_no_family_is_named_outside_of_its_page():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "families" and path != FORMATS:
            text = path.read_text(encoding="utf-8")
            assert not [name for name in FAMILIES if f'"{name}"' in text], path


@pytest.mark.parametrize("name", FAMILIES)
def test_every_switch_and_window_of_a_page_is_read_and_written(name):
    family = FAMILIES[name]
    for turned in itertools.product((False, True), repeat=len(family.switches)):
        switches = dict(zip(family.switches, turned, strict=True))
        sizes = {family.keys.get(key, key): value for key, value in SMALL.items()}
        values = {"model_type": name, **sizes, **MIXTURE, **switches, "sliding_window": 5, "use_sliding_window": True}
        config = from_hf(values | {"max_window_layers": 1, "no_rope_layer_interval": 2})
        on = {*family.always}.union(*(fields for key, fields in family.switches.items() if switches[key]))
        assert all(getattr(config, field) == (field in on) for field in FLAGS.values())
        assert (5 in (config.window(0), config.window(1))) == bool(family.windows)
        written = to_hf(config, head="lm", dtype="float32")
        assert from_hf(written) == config and switches.items() <= written.items()


@pytest.mark.parametrize(
    ("norms", "flags"),
    [
        ("before", ""),
        ("before", "qkv_bias"),
        ("before", "qkv_bias output_bias mlp_bias"),
        ("before", "qk_norm"),
        ("after", "qk_norm qk_norm_of_all"),
        ("both", "qk_norm"),
        ("before", "layer_norm plain_mlp mlp_bias"),
        ("before", "layer_norm plain_mlp"),
        ("before", "layer_norm plain_mlp qkv_bias output_bias mlp_bias num_positions"),
        ("before", "layer_norm plain_mlp num_positions"),
    ],
)
def test_a_shape_has_a_family_that_keeps_all_of_it(norms, flags):
    flags = set(flags.split())
    learned = {"num_positions": 7} if "num_positions" in flags else {}
    flags -= {*learned}
    shape = replace(ModelShape(2, 48, 80, 6, 2, 8, 61, norms=norms, **learned), **dict.fromkeys(flags, True))
    config = model_config_of(shape, 3, LONGEST)
    assert (config.num_layers, config.norms, config.num_positions) == (3, norms, shape.num_positions)
    assert {name for name, field in FLAGS.items() if getattr(config, field)} == flags
    if not FAMILIES[config.model_type].full_step:  # a shape has no windows
        assert from_hf(to_hf(config, head="lm", dtype="float32")) == config


def test_the_example_of_a_page_is_a_page():
    guide = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert (PACKAGE / "model" / "families" / "qwen3.py").read_text(encoding="utf-8") in guide

"""Which checkpoint folder each role of an algorithm is read from, and sizes of models from their configs and back."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlhf_spmd import embedded
from rlhf_spmd.model.adapters.uniform import base_folder
from rlhf_spmd.model.config import RANDOM, ModelConfig, read_config_json, to_hf
from rlhf_spmd.model.texts.tokenizer_files import TOKENIZER_FILES, same_behaviour
from rlhf_spmd.plan.workflow import Role
from rlhf_spmd.plan.workload import SHAPES, ModelShape

LONGEST = 2**17  # tokens of a sequence of a model with random weights


def folder_of(role: str, folders: Mapping[str, str], roles: Mapping[str, Role], base: str = "") -> str:
    """Returns a role's own folder, or that of the first role that it starts from and that has one with the first role's
    tokenizer; empty if there is none.

    base: the option lora.base, whose folder has the tokenizer of adapters.
    """
    if folders[role]:
        return folders[role]
    main = base_folder(folders[next(iter(roles))], base)
    others = [folders[other] for other in roles[role].starts_from if folders[other]]
    return next((folder for folder in others if same_tokenizer(base_folder(folder, base), main)), "")


def same_tokenizer(first: str, second: str) -> bool:
    """Returns whether two folders hold tokenizers that do the same, however their files are written. Raises UserError
    for a tokenizer that cannot be read."""
    return first == second or bool(first and second and same_behaviour(Path(first), Path(second)))


def shape_of_folder(folder: str) -> ModelShape:
    """Returns sizes from a Hugging Face config.json (model/hf.py reads the rest). Raises UserError if that cannot be
    read."""
    config = read_config_json(Path(folder) / "config.json")
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tied=config.tie_embeddings,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
        qk_norm_of_all=config.qk_norm_of_all,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        expert_size=config.expert_size,
        num_dense_layers=config.num_dense_layers,
    )


def model_config_of(shape: ModelShape, num_layers: int, longest: int) -> ModelConfig:
    """Returns the config of a model with the sizes of `shape`, of the family with the same biases and norms.

    num_layers: in place of the shape's.
    longest: the most tokens of a sequence.
    """
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias and not shape.output_bias else "llama"
    if shape.num_experts:
        family = "olmoe" if shape.qk_norm_of_all else "qwen3_moe" if shape.qk_norm else "mixtral"
    return ModelConfig(
        family,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=longest,
        tie_embeddings=shape.tied,
        attention_bias=shape.qkv_bias,
        attention_output_bias=shape.output_bias,
        mlp_bias=shape.mlp_bias,
        qk_norm=shape.qk_norm,
        qk_norm_of_all=shape.qk_norm_of_all,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_size=shape.expert_size,
        num_dense_layers=shape.num_dense_layers,
        norm_topk=True,
    )


def write_random_model(folder: Path, shape: str, dtype: str) -> None:
    """Writes the folder of a model whose weights are random (model/random_weights.py), with the tokenizer of the preset
    tiny.

    shape: by its name in SHAPES.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in map(embedded.path_of("tiny/actor").joinpath, TOKENIZER_FILES):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    size = SHAPES[shape]
    config = replace(model_config_of(size, size.num_layers, LONGEST), eos_token_ids=(2,), pad_token_id=0)
    for name, values in (("config.json", to_hf(config, head="lm", dtype=dtype)), (RANDOM, {"weights": "random"})):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

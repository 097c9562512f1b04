"""Which checkpoint folder each role of an algorithm is read from, and sizes of models from their configs and back."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_spmd import embedded
from rlhf_spmd.model.adapters.uniform import base_folder
from rlhf_spmd.model.config import RANDOM, ModelConfig, read_config_json, to_hf
from rlhf_spmd.model.families import FAMILIES, family_with
from rlhf_spmd.model.texts.tokenizer_files import TOKENIZER_FILES, same_behaviour
from rlhf_spmd.plan.workflow import Role
from rlhf_spmd.plan.workload import SHAPES, ModelShape

LONGEST = 2**17  # tokens of a sequence of a model with random weights
SIZES = (  # that ModelShape and ModelConfig have
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("norms", "num_positions", "num_experts", "experts_per_token", "expert_size", "num_dense_layers"),
)
FLAGS = {  # fields of ModelShape -> those of ModelConfig
    "qkv_bias": "attention_bias",
    "output_bias": "attention_output_bias",
    "mlp_bias": "mlp_bias",
    "qk_norm": "qk_norm",
    "qk_norm_of_all": "qk_norm_of_all",
    "layer_norm": "layer_norm",
    "plain_mlp": "plain_mlp",
}


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
    sizes = {name: getattr(config, name) for name in SIZES}
    return ModelShape(**sizes, tied=config.tie_embeddings, **{name: getattr(config, of) for name, of in FLAGS.items()})


def model_config_of(shape: ModelShape, num_layers: int, longest: int) -> ModelConfig:
    """Returns the config of a model with the sizes of `shape`, of the family with the same biases and norms.

    num_layers: in place of the shape's.
    longest: the most tokens of a sequence.
    """
    flags: dict[str, Any] = {field: getattr(shape, name) for name, field in FLAGS.items()}
    flags["norm_topk"] = mixture = bool(shape.num_experts)
    family = family_with(flags, mixture=mixture, norms=shape.norms, learned=bool(shape.num_positions))
    return ModelConfig(
        family,
        activation=FAMILIES[family].activation[1],
        **{name: getattr(shape, name) for name in SIZES} | {"num_layers": num_layers},
        **dict.fromkeys(FAMILIES[family].always, True) | flags,
        max_position_embeddings=shape.num_positions - (FAMILIES[family].positions or 0) or longest,
        tie_embeddings=shape.tied,
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

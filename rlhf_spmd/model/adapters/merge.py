"""Merges an adapter into its base: W + s B A, computed in float32 from the untouched base.

The result has the dtype of the base. Where that is bfloat16, whose steps around a weight w are about w / 256, rounding
can give back the weight of the base; such weights are counted.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model import hf, weights
from rlhf_spmd.model.adapters.config import OUTER, AdapterConfig, base_of
from rlhf_spmd.model.adapters.files import check_base, is_layer, read_adapter
from rlhf_spmd.model.adapters.uniform import is_whole, model_files
from rlhf_spmd.model.config import naming
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.families.family import Family
from rlhf_spmd.model.stored_parts import ours_of, stored_of, to_hf_name
from rlhf_spmd.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Merged:
    """What rounding did. num_updated: weights that the adapter changes; num_lost: those of them that rounding to
    `dtype` left as they were in the base."""

    num_updated: int
    num_lost: int
    dtype: torch.dtype


def merge(folder: str | Path, out: str | Path, *, base: str | Path | None = None) -> Merged:
    """Writes a whole model as a Hugging Face folder, with what lies beside the adapter, else the base. Raises
    UserError.

    base: its folder; None: that which the adapter names.

    If the adapter changes the embeddings or the output of a base that ties them, the model has both apart, as peft
    does.
    """
    folder, out = Path(folder), Path(out)
    if is_whole(folder):
        raise UserError(f"{folder} holds a whole model, and --merge is for an adapter: give the folder of the adapter")
    config, factors, saved = read_adapter(folder)
    base = base_of(folder, config, base, option="--base FOLDER")
    if out.resolve() in (folder.resolve(), base.resolve()):
        raise UserError(f"{out} is a folder that is read; give another one for the merged model")
    dtype = weights.widest_dtype(base)
    model = hf.load_model(base, head=config.head, fresh_head="score.weight" in saved, dtype=dtype)
    changed = {*factors, *(name.removesuffix(".weight") for name in saved)}
    if model.config.tie_embeddings and model.head == "lm" and not changed.isdisjoint(OUTER):
        model = _untied(model)
    with naming(f"{folder} does not fit {base}"):
        merged = merge_into(model, config, factors, saved)
    hf.save_state(model.state_dict(), model.config, model.head, out, model_files(str(folder), str(base)).texts)
    return merged


@torch.no_grad()
def merge_into(
    model: Transformer,
    config: AdapterConfig,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    saved: Mapping[str, Tensor],
) -> Merged:
    """Merges an adapter into a whole model in memory. Raises UserError if it does not fit."""
    ours, family = model.state_dict(), FAMILIES[model.config.model_type]
    state = {to_hf_name(name): weight for name, weight in ours.items()}
    if differs := bool(family.joint or family.layer_names):
        state = stored_of(ours, model.config)
    sides = sides_of(state, family)
    check_base(config, factors, saved, {name: weight.shape for name, weight in sides.items()})
    num_updated = num_lost = 0
    dtype = next(iter(state.values())).dtype
    for name, tensor in saved.items():
        state[name].copy_(tensor)
    for path, (a, b) in factors.items():
        weight = sides[f"{path}.weight"]
        updated, lost = _add(weight, a, b, config.scale_of(path))
        num_updated, num_lost = num_updated + updated, num_lost + lost
    if differs:
        model.load_state_dict(ours_of(state, {name: weight.shape for name, weight in ours.items()}, model.config))
    if wrong := next((name for name, weight in state.items() if not weight.isfinite().all()), ""):
        raise UserError(f"with it {wrong} has numbers that are not finite in {dtype}; give a base of a wider type")
    return Merged(num_updated, num_lost, dtype)


def sides_of(stored: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Returns the tensors of a folder with matrices of layers as [outputs, inputs]."""
    return {name: one.T if family.transposed and is_layer(name, one.shape) else one for name, one in stored.items()}


def _untied(model: Transformer) -> Transformer:
    """Returns a language model with a copy of its embeddings as its output."""
    weights, config = model.state_dict(), dataclasses.replace(model.config, tie_embeddings=False)
    embeddings = weights["embed_tokens.weight"]
    copy = Transformer(config, head=model.head, dtype=embeddings.dtype, device="meta")
    copy.take({**weights, "lm_head.weight": embeddings.clone()})
    return copy


def _add(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[int, int]:
    """Adds s B A to a weight -> how many numbers it changes, and how many of these rounding leaves as they were."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    update = scale * (b.to(wide) @ a.to(wide))
    rounded = (weight.to(wide) + update).to(weight.dtype)
    lost = (update != 0) & (rounded == weight)
    weight.copy_(rounded)
    return int((update != 0).sum()), int(lost.sum())


def bit_sum(tensors: Iterable[Tensor]) -> int:
    """Returns the sum of the bit patterns of all numbers, modulo 2^64. It does not depend on how they are cut: the sums
    of parts add up to that of the whole. So a frozen base has one sum under every layout, and another one once a bit
    has flipped."""
    patterns, total = {2: torch.int16, 4: torch.int32, 8: torch.int64}, 0
    for tensor in tensors:
        bits = tensor.detach().view(patterns[tensor.element_size()]).reshape(-1)
        total += sum(int(part.sum()) for part in bits.split(2**24))  # torch sums a copy of 8 bytes for each number
    return total % 2**64

"""Rotary positions: the frequencies of every scaling that Llama, Qwen and Mistral checkpoints use.

Rotary position embedding (arXiv:2104.09864) rotates dimension pair i of a head by the angle position * frequency_i. The
scalings extend a trained context: linear (frequencies / factor), dynamic NTK (a larger base beyond the trained length),
yarn (arXiv:2309.00071, with its attention factor) and llama3 (frequencies of long wavelengths divided by the factor,
with a smooth ramp). Frequencies are computed in float32, as in transformers, unless the model is float64.
"""

# T tokens, f frequencies = head_dim / 2

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.rope import prepared, rope_in_place, rope_ref
from rlhf_spmd.kernels.rope import rope as kernel
from rlhf_spmd.kernels.triton_import import fused
from rlhf_spmd.model.config import ROPE, ModelConfig

Turns: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]  # cos_Tf, sin_Tf of each rope, see ModelConfig.rope_of


class Ropes:
    """The ropes of a model's layers. Frequencies are computed once per device and precision."""

    def __init__(self, config: ModelConfig):
        self._config = config
        self._frequencies: dict[tuple, tuple[Tensor, float]] = {}  # not a buffer: .bfloat16() would round it

    def __call__(self, positions: Tensor, dtype: torch.dtype, *, cached: bool) -> Turns:
        """Returns the factors of tokens at these positions. cached: keys are stored for later tokens. Raises UserError,
        see `Transformer.forward`."""
        frequencies_f, factor = self._of(positions, dtype, cached=cached)
        return {ROPE: cos_sin(positions, frequencies_f, factor, dtype, fast=cached)}

    def _of(self, positions: Tensor, dtype: torch.dtype, *, cached: bool) -> tuple[Tensor, float]:
        length = 0
        if self._config.rope_type == "dynamic":
            trained = self._config.max_position_embeddings
            length = max(int(positions.max()) + 1, trained)
            if cached and length > trained:
                raise UserError(
                    f"a model with dynamic rope cannot generate beyond its trained length of {trained} tokens, because "
                    "further tokens change the frequencies of the keys already stored; shorten prompt + response"
                )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        key = (positions.device, wide, length)
        if key not in self._frequencies:
            frequencies_f, factor = frequencies(self._config, length=length, dtype=wide)
            self._frequencies[key] = frequencies_f.to(positions.device), factor
        return self._frequencies[key]


def frequencies(config: ModelConfig, *, length: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, float]:
    """Returns (frequencies_f in radians per position, the factor on cos and sin).

    length: tokens in the longest current sequence; only `dynamic` uses it.
    """
    scaling, rope_type = config.rope_scaling or {}, config.rope_type
    if rope_type == "default":
        return _plain(config.rope_theta, config.head_dim, dtype), 1.0
    if rope_type == "linear":
        return _plain(config.rope_theta, config.head_dim, dtype) / scaling["factor"], 1.0
    if rope_type == "dynamic":
        factor, trained, dim = scaling["factor"], config.max_position_embeddings, config.head_dim
        stretch = factor * max(length, trained) / trained - (factor - 1)
        return _plain(config.rope_theta * stretch ** (dim / max(dim - 2, 1)), dim, dtype), 1.0
    if rope_type == "yarn":
        return _yarn(config, scaling, dtype)
    assert rope_type == "llama3", rope_type
    return _llama3(config, scaling, dtype), 1.0


def cos_sin(
    positions_BT: Tensor, frequencies_f: Tensor, factor: float, dtype: torch.dtype, *, fast: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns cos_BTf, sin_BTf in `dtype`; the angles are computed in the precision of the frequencies.

    fast: for turned(fast=True), so `prepared` for it.
    """
    angles_BTf = positions_BT[..., None].to(frequencies_f.dtype) * frequencies_f
    cos_BTf, sin_BTf = (angles_BTf.cos() * factor).to(dtype), (angles_BTf.sin() * factor).to(dtype)
    return prepared(cos_BTf, sin_BTf) if fast else (cos_BTf, sin_BTf)


def turned(
    q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cos_Tf: Tensor, sin_Tf: Tensor, *, packed: bool, fast: bool
) -> tuple[Tensor, ...]:
    """Returns queries and keys turned, and values as they are.

    packed: where kernels run, they turn q and k where they lie.
    fast: in one launch, without a backward pass on a GPU.
    """
    if packed and fused(q_THd):
        return rope_in_place(q_THd, k_TKd, v_TKd, cos_Tf, sin_Tf)
    return *(kernel if fast else rope_ref)(q_THd, k_TKd, cos_Tf, sin_Tf), v_TKd


def _plain(theta: float, dim: int, dtype: torch.dtype) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2).to(dtype) / dim)


def _yarn(config: ModelConfig, scaling: dict, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Scales frequencies as YaRN (arXiv:2309.00071): fast pairs keep their frequency, slow ones are divided by the
    factor, with a ramp between."""
    dim, theta = config.head_dim, config.rope_theta
    trained = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = scaling.get("factor") or config.max_position_embeddings / trained

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        weight, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = mscale(weight) / mscale(all_dim) if weight and all_dim else mscale(1.0)

    def pair_with(num_turns: float) -> float:  # the pair that makes this many turns over the trained length
        return dim * math.log(trained / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.get("beta_fast") or 32), pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    slow_f = ((torch.arange(dim // 2).to(dtype) - low) / (high - low)).clamp(0, 1)
    fast_frequencies_f = _plain(theta, dim, dtype)
    return fast_frequencies_f / factor * slow_f + fast_frequencies_f * (1 - slow_f), float(attention_factor)


def _llama3(config: ModelConfig, scaling: dict, dtype: torch.dtype) -> Tensor:
    """Scales frequencies as Llama 3.1: wavelengths above trained/low are divided by the factor, those below
    trained/high are kept."""
    factor, low, high = (scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    plain_f = _plain(config.rope_theta, config.head_dim, dtype)
    turns_f = trained * plain_f / (2 * math.pi)  # turns over the trained length
    smooth_f = ((turns_f - low) / (high - low)).clamp(0, 1)
    return (1 - smooth_f) * plain_f / factor + smooth_f * plain_f

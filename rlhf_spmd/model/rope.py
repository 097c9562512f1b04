"""Rotary positions: the frequencies of every scaling that checkpoints use.

Rotary position embedding (arXiv:2104.09864) rotates dimension pair i of a head by the angle position * frequency_i. The
scalings extend a trained context: linear (frequencies / factor), dynamic NTK (a larger base beyond the trained length),
yarn (arXiv:2309.00071, with its attention factor), llama3 (frequencies of long wavelengths divided by the factor, with
a smooth ramp) and longrope (arXiv:2402.13753: a factor for each frequency, others beyond the trained length).
Frequencies are computed in float32, as in transformers, unless the model is float64.
"""

# T tokens, f frequencies: half of the dims of a head that are turned

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.rope import prepared, rope_in_place, rope_ref
from rlhf_spmd.kernels.rope import rope as kernel
from rlhf_spmd.kernels.triton_import import fused
from rlhf_spmd.model.config import LOCAL_ROPE, ROPE, ModelConfig

Turns: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]  # cos_Tf, sin_Tf of each rope, see ModelConfig.rope_of


class Ropes:
    """The ropes of a model's layers. Frequencies are computed once per device and precision.

    longest: tokens of the longest row that the model will see, by which longrope and dynamic choose their factors once,
        so that they do not differ between generation and training, nor by a row's neighbours; 0: by the rows of each
        pass.
    """

    def __init__(self, config: ModelConfig):
        self.longest = 0
        self._config, theta = config, config.local_rope_theta
        self._local: Ropes | None = None
        if theta is not None:
            self._local = Ropes(replace(config, rope_theta=theta, rope_scaling=None, local_rope_theta=None))
        self._frequencies: dict[tuple, tuple[Tensor, float]] = {}  # not a buffer: .bfloat16() would round it

    def __call__(self, positions: Tensor, dtype: torch.dtype, *, cached: bool) -> Turns:
        """Returns the factors of tokens at these positions. cached: keys are stored for later tokens. Raises UserError,
        see `Transformer.forward`."""
        frequencies_f, factor = self._of(positions, dtype, cached=cached)
        turns = {ROPE: cos_sin(positions, frequencies_f, factor, dtype, fast=cached)}
        if self._local is not None:
            turns[LOCAL_ROPE] = self._local(positions, dtype, cached=cached)[ROPE]
        return turns

    def _of(self, positions: Tensor, dtype: torch.dtype, *, cached: bool) -> tuple[Tensor, float]:
        length = self._length(positions, cached=cached)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        key = (positions.device, wide, length)
        if key not in self._frequencies:
            frequencies_f, factor = frequencies(self._config, length=length, dtype=wide)
            self._frequencies[key] = frequencies_f.to(positions.device), factor
        return self._frequencies[key]

    def _length(self, positions: Tensor, *, cached: bool) -> int:
        """Returns the length on which the frequencies depend; 0: on none."""
        rope_type, trained = self._config.rope_type, self._config.max_position_embeddings
        if rope_type == "longrope":
            assert self.longest or not cached, "stored keys need the factors of all later tokens"
            return self.longest or int(positions.max()) + 1
        if rope_type != "dynamic":
            return 0
        length = max(self.longest or int(positions.max()) + 1, trained)
        if cached and length > trained and int(positions.max()) >= trained:
            raise UserError(
                f"a model with dynamic rope cannot generate beyond its trained length of {trained} tokens, because "
                "further tokens would change the frequencies of the keys already stored; shorten prompt + response"
            )
        return length


def frequencies(config: ModelConfig, *, length: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, float]:
    """Returns (frequencies_f in radians per position, the factor on cos and sin).

    length: tokens in the longest sequence; only `dynamic` and `longrope` use it.
    """
    scaling, rope_type = config.rope_scaling or {}, config.rope_type
    if rope_type == "default":
        return _plain(config.rope_theta, config.rotary_dim, dtype), 1.0
    if rope_type == "linear":
        return _plain(config.rope_theta, config.rotary_dim, dtype) / scaling["factor"], 1.0
    if rope_type == "dynamic":
        factor, trained, dim = scaling["factor"], config.max_position_embeddings, config.rotary_dim
        stretch = factor * max(length, trained) / trained - (factor - 1)
        return _plain(config.rope_theta * stretch ** (dim / max(dim - 2, 1)), dim, dtype), 1.0
    if rope_type == "yarn":
        return _yarn(config, scaling, dtype)
    if rope_type == "longrope":
        return _longrope(config, scaling, length, dtype)
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
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    cos_Tf: Tensor,
    sin_Tf: Tensor,
    *,
    dim: int,
    alternates: bool,
    packed: bool,
    fast: bool,
) -> tuple[Tensor, ...]:
    """Returns queries and keys turned, and values as they are.

    dim: of a head that are turned, the first ones.
    alternates: a pair is two neighbours; else of each half one. q and k are then put in that order, which changes none
        of their products.
    packed: where kernels run, they turn q and k where they lie.
    fast: in one launch, without a backward pass on a GPU.
    """
    if alternates:
        q_THd, k_TKd = _halves(q_THd, dim), _halves(k_TKd, dim)
    if packed and fused(q_THd):
        return rope_in_place(q_THd, k_TKd, v_TKd, cos_Tf, sin_Tf)
    turn = kernel if fast else rope_ref
    if dim == q_THd.shape[-1]:
        return *turn(q_THd, k_TKd, cos_Tf, sin_Tf), v_TKd
    turned_THd, turned_TKd = turn(q_THd[..., :dim], k_TKd[..., :dim], cos_Tf, sin_Tf)
    q_THd = torch.cat((turned_THd, q_THd[..., dim:]), dim=-1)
    return q_THd, torch.cat((turned_TKd, k_TKd[..., dim:]), dim=-1), v_TKd


def _halves(x_THd: Tensor, dim: int) -> Tensor:
    """Puts the first of each pair of neighbours before all of the second ones."""
    return torch.cat((x_THd[..., 0:dim:2], x_THd[..., 1:dim:2], x_THd[..., dim:]), dim=-1)


def _plain(theta: float, dim: int, dtype: torch.dtype, factors_f: Tensor | float = 1.0) -> Tensor:
    return 1.0 / (factors_f * theta ** (torch.arange(0, dim, 2).to(dtype) / dim))


def _yarn(config: ModelConfig, scaling: dict, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Scales frequencies as YaRN (arXiv:2309.00071): fast pairs keep their frequency, slow ones are divided by the
    factor, with a ramp between."""
    dim, theta = config.rotary_dim, config.rope_theta
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


def _longrope(config: ModelConfig, scaling: dict, length: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Divides each frequency by a factor of its own, as LongRoPE found them: others in sequences beyond the trained
    length."""
    trained = scaling["original_max_position_embeddings"]
    ratio = scaling.get("factor") or config.max_position_embeddings / trained
    factors_f = torch.tensor(scaling["long_factor" if length > trained else "short_factor"], dtype=dtype)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 else 1.0
    return _plain(config.rope_theta, config.rotary_dim, dtype, factors_f), attention_factor


def _llama3(config: ModelConfig, scaling: dict, dtype: torch.dtype) -> Tensor:
    """Scales frequencies as Llama 3.1: wavelengths above trained/low are divided by the factor, those below
    trained/high are kept."""
    factor, low, high = (scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    plain_f = _plain(config.rope_theta, config.rotary_dim, dtype)
    turns_f = trained * plain_f / (2 * math.pi)  # turns over the trained length
    smooth_f = ((turns_f - low) / (high - low)).clamp(0, 1)
    return (1 - smooth_f) * plain_f / factor + smooth_f * plain_f

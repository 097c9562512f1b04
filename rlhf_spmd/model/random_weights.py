"""Folders of models with random weights, to measure a size of model of which no checkpoint is at hand.

Such a folder (config/model_folders.py writes it) has a file that says so in place of weights. Each number depends on
the name of its tensor and its place in the whole tensor alone, so every layout has the same model.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlhf_spmd.model.config import RANDOM
from rlhf_spmd.model.stored_parts import to_hf_name

STD = 0.02  # of matrices, as transformers initializes Llama
CHUNK = 2**24  # numbers made at a time
MULTIPLIERS = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)  # of splitmix64 (Steele et al., 2014)


def is_random(folder: Path) -> bool:
    """Returns whether the model in a folder has random weights."""
    return (folder / RANDOM).is_file()


def random_tensors(
    shapes: Mapping[str, torch.Size],
    parts: Mapping[str, tuple[slice, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Returns parts of a model's tensors by name: norms of ones, biases of zeros, uniform matrices.

    shapes: of the whole tensors.
    parts: the slices to make.
    """
    return {name: _tensor(name, shapes[name], part, dtype, torch.device(device)) for name, part in parts.items()}


def _tensor(name: str, shape: torch.Size, part: tuple[slice, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a slice of one tensor."""
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=device)[part]
    num_rows, num_columns = shape
    rows, columns = (torch.arange(num, device=device) for num in (num_rows, num_columns))
    rows, columns = rows[part[0]], columns[part[1]] if len(part) > 1 else columns
    made = torch.empty(len(rows), len(columns), dtype=dtype, device=device)
    step = max(1, CHUNK // len(columns))
    for first in range(0, len(rows), step):
        places = rows[first : first + step, None] * num_columns + columns
        made[first : first + step] = _uniform(places + (zlib.crc32(to_hf_name(name).encode()) << 31)).to(dtype)
    return made


def _uniform(places: Tensor) -> Tensor:
    """Returns a number of the standard deviation STD for each place: float32."""
    bits = places
    for multiplier in MULTIPLIERS:
        bits = bits * multiplier
        bits = bits ^ ((bits >> 31) & (2**33 - 1))  # the shift of an unsigned number
    return (bits >> 40).float() * (STD * 3**0.5 / 2**23)  # the upper 24 bits, with their sign

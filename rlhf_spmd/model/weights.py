"""Reads and writes the weights of a folder: safetensors, in one file or in shards with an index. Nothing is unpickled.

Every tensor is checked by name and shape before memory is allocated; errors name file, tensor and fix. Names here are
Hugging Face's; hf.py maps them to ours.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import is_file
from rlhf_spmd.model.config import read_json
from rlhf_spmd.model.stored_names import TABLES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes atomically: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def locate(folder: Path) -> dict[str, Path]:
    """Returns the file that holds every tensor, by its stored name."""
    if (folder / SINGLE).exists():
        return dict.fromkeys(_open(folder / SINGLE).keys(), folder / SINGLE)
    if not (folder / INDEX).exists():
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; give a local model folder in Hugging Face's format")
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            raise UserError(
                f"{folder} holds weights only as {pickled[0]}, a pickle, which this program never opens; load it with "
                "transformers and save it to a new folder with save_pretrained()"
            )
        raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX}; copy the weights there")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / INDEX} has no weight_map; copy it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or _leaves(shard):
            raise UserError(
                f"{folder / INDEX} names {shard!r} as the file of tensor {name}, which is outside the folder; "
                "do not trust this download, or fix the index"
            )
    missing = sorted({shard for shard in weight_map.values() if not is_file(folder / shard)})
    if missing:
        raise UserError(f"{folder / missing[0]} is missing ({INDEX} lists {len(missing)} such files); copy it there")
    return {name: folder / shard for name, shard in weight_map.items()}


def read_weights(
    places: Mapping[str, Path],
    expect: Mapping[str, torch.Size],
    convert: Callable[[Tensor], Tensor],
    parts: Mapping[str, tuple[slice, ...]] | None = None,
    stored: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Returns {name: convert(tensor)} for every name in `expect`, which gives the shapes. The result owns its memory,
    so it does not change with the file.

    places: the file of each.
    stored: the name of a tensor in its file, where it has another one there.
    parts: the names and slices to read; all other tensors are only checked. None: reads all tensors whole.
    """
    tensors: dict[str, Tensor] = {}
    for path in dict.fromkeys(places[name] for name in expect):
        file = _open(path)
        held = set(file.keys())
        for name in (name for name in expect if places[name] == path):
            there = stored.get(name, name)
            if there not in held:
                raise UserError(f"{path} lacks tensor {there}, which {INDEX} expects there; copy the file again")
            part = file.get_slice(there)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            if shape != tuple(expect[name]) or dtype not in _FLOATS:
                raise UserError(
                    f"{path}: tensor {there} has shape {list(shape)} of {dtype}, but the model in config.json, with "
                    f"one label if it scores, has {list(expect[name])} of {', '.join(sorted(_FLOATS))}; the two files "
                    "do not belong together"
                )
            if parts is not None and name not in parts:
                continue
            wanted = (slice(None),) if parts is None else parts[name]
            mapped = file.get_tensor(there) if wanted == (slice(None),) else part[wanted]
            tensor = convert(mapped)
            tensors[name] = tensor.clone() if tensor.data_ptr() == mapped.data_ptr() else tensor
    return tensors


def write_weights(folder: Path, tensors: Mapping[str, Tensor], *, max_shard_bytes: int) -> None:
    """Writes one file, or shards with an index if the tensors are larger than `max_shard_bytes`. Files of an earlier
    save that are no longer part of the model are deleted."""
    # the function for torch's tensors would import torch.distributed.tensor, half a second
    from huggingface_hub import split_state_dict_into_shards_factory

    shards = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in shards.filename_to_tensors.items():
        write_file(folder / file, {name: tensors[name] for name in names})
    if shards.is_sharded:
        write_json(folder / INDEX, {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename})
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for old in [folder / SINGLE, *folder.glob("model-?????-of-?????.safetensors")]:
        if old.name not in shards.filename_to_tensors:
            old.unlink(missing_ok=True)


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes one file, under a temporary name until it is complete."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    owned = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    temporary = path.with_name(path.name + ".tmp")
    temporary.touch()
    mode = temporary.stat().st_mode  # as the umask allows; save_file makes files that only their owner can read
    try:
        save_file(owned, temporary, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{path} can't be written ({error}); make room there") from None
    temporary.chmod(mode)
    os.replace(temporary, path)


def read_file(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of one file, by their stored names. Raises UserError also for numbers that are not floats."""
    file = _open(path)
    for name in file.keys():  # noqa: SIM118 (no mapping)
        if (dtype := file.get_slice(name).get_dtype()) not in _FLOATS:
            raise UserError(f"{path}: tensor {name} is stored as {dtype}; only {', '.join(sorted(_FLOATS))} are read")
    return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def widest_dtype(folder: Path) -> torch.dtype:
    """Returns the dtype that holds every tensor of a folder without rounding: that which all have, as a rule."""
    places = {name: path for name, path in locate(folder).items() if not name.endswith(TABLES)}
    opened = {path: _open(path) for path in dict.fromkeys(places.values())}
    stored = {opened[path].get_slice(name).get_dtype() for name, path in places.items()}
    floats = [_FLOATS[name] for name in sorted(stored & _FLOATS.keys())]
    return functools.reduce(torch.promote_types, floats or [torch.float32])


def _leaves(shard: str) -> bool:
    """Returns whether a file name from an index points outside its folder."""
    path = PurePath(shard)
    return not shard or path.is_absolute() or ".." in path.parts or "\\" in shard or ":" in shard


def _open(path: Path):
    """Opens a safetensors file for reading. Raises UserError if it is missing, truncated or not a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; copy it there") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error}); copy it again") from None

"""Adapters in folders as a run has them: the same rank, scale and targets in all layers. Plain Python without torch."""

import functools
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.json_text import json_value
from rlhf_spmd.files.reading import fingerprint
from rlhf_spmd.model.adapters.config import CONFIG, SCORES, AdapterConfig, base_of, from_peft, is_target
from rlhf_spmd.model.config import ModelConfig, naming, read_config_json, read_json
from rlhf_spmd.model.texts.tokenizer_files import BACKEND, same_behaviour
from rlhf_spmd.plan.adapters import LINEAR_LAYERS, Adapters

FILES = (CONFIG, "adapter_model.safetensors", "adapter_model.bin")
WHOLE = ("model.safetensors", "model.safetensors.index.json")  # a folder with one of them holds a whole model
PIECE = 2**12  # bytes of a tensor, for its hash
LARGEST_HEADER = 10**8  # bytes of the header of a file of safetensors, which allows no more
OF_ATTENTION = LINEAR_LAYERS[:4]


def is_adapter(folder: Path | str) -> bool:
    """Returns whether a folder holds an adapter and no whole model."""
    return any((Path(folder) / name).is_file() for name in FILES) and not is_whole(folder)


def is_whole(folder: Path | str) -> bool:
    """Returns whether a folder holds a whole model."""
    return any((Path(folder) / name).is_file() for name in WHOLE)


def base_folder(folder: str, base: str = "", *, option: str = "lora.base=FOLDER") -> str:
    """Returns the folder of the base of an adapter; of a whole model its own. base: what the options give. option: what
    may give it. Raises UserError."""
    if not folder or not is_adapter(folder):
        return folder
    named = read_json(Path(folder) / CONFIG).get("base_model_name_or_path")
    config = AdapterConfig(base=named if isinstance(named, str) else "")
    return str(base_of(Path(folder), config, base, option=option))


def other_base(folder: str, base: str) -> str:
    """Returns the base that an adapter names, if it is here and has other weights than `base`; else empty."""
    try:
        named = Path(base_folder(folder))
    except UserError:
        return ""
    if named.resolve() == Path(base).resolve():
        return ""
    mine, given = (fingerprint(sorted(one.glob("*.safetensors"))) for one in (named, Path(base)))
    return "" if mine == given else str(named)


def content(folder: str) -> tuple[ModelConfig, str]:
    """What a whole model is: its config, and a hash of its weights, the same for equal copies of a folder."""
    path = Path(folder).resolve()
    files = sorted(path.glob("*.safetensors"))
    about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return read_config_json(path / "config.json"), _weights(path, tuple(about)) if files else str(path)


@functools.cache
def _weights(folder: Path, about: tuple[tuple[str, int, int], ...]) -> str:
    """A hash of the weights in a folder: the files' fingerprint, and the beginning and the end of each tensor, so that
    a tensor that was trained differs whatever its size. about: of each file, name, size and time."""
    digest = hashlib.sha256(fingerprint(folder / name for name, *_ in about).encode())
    # of a file that is not as it should be load_model says what is wrong
    with suppress(ValueError, TypeError, LookupError, AttributeError):
        for name, *_ in about:
            with (folder / name).open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                tensors = json_value(file.read(min(size, LARGEST_HEADER)))
                for start, end in (one["data_offsets"] for key, one in tensors.items() if key != "__metadata__"):
                    for place in (start, max(start, end - PIECE)):
                        file.seek(8 + size + place)
                        digest.update(file.read(min(PIECE, end - place)))
    return digest.hexdigest()


def whole_folder(folder: str) -> str:
    """Returns the folder of the base that an adapter names; of a whole model its own. Raises UserError."""
    return base_folder(folder, option="base_model_name_or_path in its adapter_config.json")


def tokenizer_folder(folder: str, base: str) -> str:
    """Returns the folder that holds the tokenizer of a model: of an adapter its own, if there is one beside it, else
    that of its base."""
    return folder if folder != base and (Path(folder) / BACKEND).is_file() else base


def tokenizer_warning(folder: str, base: str) -> str:
    """Warns that the tokenizer beside an adapter is not that of its base; empty if it is, or if there is none."""
    if tokenizer_folder(folder, base) == base or same_behaviour(Path(folder), Path(base)):
        return ""
    return (
        f"the tokenizer in {folder} makes other tokens than that of its base {base}; the run uses it, since the "
        "adapter belongs to it. If it does not, delete its files there"
    )


def layer_paths(num_layers: int) -> dict[str, list[str]]:
    """Finds the layers that can have adapters, and their paths."""
    inside = {name: "self_attn" if name in OF_ATTENTION else "mlp" for name in LINEAR_LAYERS}
    return {
        name: [f"model.layers.{layer}.{block}.{name}" for layer in range(num_layers)] for name, block in inside.items()
    }


def adapters_in(folder: str, base: str) -> tuple[Adapters, AdapterConfig]:
    """Returns the adapters in a folder. base: the folder of their base. Raises UserError for what is not supported, and
    if they are not the same in all layers."""
    values, paths = (
        read_json(Path(folder) / CONFIG),
        layer_paths(read_config_json(Path(base) / "config.json").num_layers),
    )
    with naming(Path(folder) / CONFIG):
        every = [path for some in paths.values() for path in some]
        config = from_peft(values, [path for path in every if is_target(values, path)], folder)
        return as_of_run(config, paths, folder), config


def as_of_run(config: AdapterConfig, paths: Mapping[str, list[str]], folder: str) -> Adapters:
    """Converts an adapter to the options with which a run describes it. Raises UserError if they cannot."""
    targets = tuple(name for name, some in paths.items() if any(map(config.adapts, some)))
    adapted = [path for name in targets for path in paths[name]]
    merge = f"merge it: python -m rlhf_spmd convert {folder} MERGED --merge, and give MERGED"
    if without := next((path for path in adapted if not config.adapts(path)), ""):
        raise UserError(f"it adapts {without.rpartition('.')[2]} in some layers alone ({without} has none); {merge}")
    found = {(config.rank_of(path), config.alpha_of(path)) for path in adapted}
    if len(found) > 1:
        raise UserError(f"its layers have different ranks or alphas (rank_pattern, alpha_pattern); {merge}")
    if not found:
        raise UserError(f"it adapts no layer of its base; give the base that it was made for, or {merge}")
    if other := next((name for name in config.modules_to_save if name not in SCORES), ""):
        raise UserError(f"it holds a trained copy of {other} (modules_to_save), which a run can't adapt; {merge}")
    ((rank, alpha),) = found
    return Adapters(rank, float(alpha), targets, config.rslora)

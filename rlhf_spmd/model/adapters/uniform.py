"""Adapters in folders as a run has them: the same rank, scale and targets in all layers. Plain Python without torch."""

import filecmp
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import fingerprint, refuse_pipes
from rlhf_spmd.model.adapters.config import (
    CONFIG,
    OUTER,
    SCORES,
    AdapterConfig,
    base_of,
    from_peft,
    is_target,
    merge_here,
)
from rlhf_spmd.model.config import ModelConfig, naming, read_config_json, read_json
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.stored_names import BODY, stored_name
from rlhf_spmd.model.texts.tokenizer_files import GENERATION, Texts, has_tokenizer, same_behaviour
from rlhf_spmd.plan.adapters import LINEAR_LAYERS, Adapters

FILES = (CONFIG, "adapter_model.safetensors", "adapter_model.bin")
WHOLE = ("model.safetensors", "model.safetensors.index.json")  # a folder with one of them holds a whole model
OF_ATTENTION = LINEAR_LAYERS[:4]
OPTION = "lora.base=FOLDER"
BASE_HERE = "base_model_name_or_path in its adapter_config.json"  # names the base without options of a run


def is_adapter(folder: Path | str) -> bool:
    """Returns whether a folder holds an adapter and no whole model."""
    return any((Path(folder) / name).is_file() for name in FILES) and not is_whole(folder)


def is_whole(folder: Path | str) -> bool:
    """Returns whether a folder holds a whole model."""
    return any((Path(folder) / name).is_file() for name in WHOLE)


def base_folder(folder: str, base: str = "", *, option: str = OPTION) -> str:
    """Returns the folder of the base of an adapter; of a whole model its own. base: what the options give. option: what
    may give it. Raises UserError."""
    if not folder or not is_adapter(folder):
        return folder
    refuse_pipes(Path(folder))
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
    return "" if _same_files(_weights(named), _weights(Path(base))) else str(named)


def same_model(one: str, other: str) -> bool:
    """Returns whether two folders hold the same whole model: equal configurations and, byte for byte, equal weights.
    Equal weights in other files, or not in safetensors, count as different."""
    mine, given = (Path(folder).resolve() for folder in (one, other))
    if mine == given:
        return True
    if not _weights(mine) or read_config_json(mine / "config.json") != read_config_json(given / "config.json"):
        return False
    return _same_files(_weights(mine), _weights(given))


def _weights(folder: Path) -> list[Path]:
    refuse_pipes(folder)
    return sorted(folder.glob("*.safetensors"))


def _same_files(some: Sequence[Path], others: Sequence[Path]) -> bool:
    """Returns whether files have the same names and bytes. Pieces are compared first, which takes milliseconds."""
    if [file.name for file in some] != [file.name for file in others] or fingerprint(some) != fingerprint(others):
        return False
    return all(filecmp.cmp(*pair, shallow=False) for pair in zip(some, others, strict=True))


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where the parts of a model are.

    folder: of the whole model, or of the base of its adapter; empty: nowhere.
    adapter: folder of the adapter; empty: it has none.
    texts: what belongs to it beside its weights: what lies beside an adapter, else what its base has.
    """

    folder: str
    adapter: str
    texts: Texts

    @property
    def tokenizer(self) -> str:
        """The folder with the tokenizer; empty if there is no model."""
        return str(self.texts.source)

    @property
    def warning(self) -> str:
        """That the tokenizer beside an adapter is not that of its base; empty if it is, or if there is none."""
        if self.tokenizer == self.folder or same_behaviour(Path(self.adapter), Path(self.folder)):
            return ""
        return (
            f"the tokenizer in {self.adapter} makes other tokens than that of its base {self.folder}; the run uses it, "
            "since the adapter belongs to it. If it does not, delete its files there"
        )


def model_files(given: str, base: str = "", *, option: str = OPTION) -> ModelFiles:
    """Returns where the parts of a model in a folder are. base, option: see base_folder. Raises UserError."""
    folder = base_folder(given, base, option=option)
    if folder == given:
        return ModelFiles(folder, "", Texts(folder, folder))
    tokenizer = given if has_tokenizer(Path(given)) else folder
    generation = given if (Path(given) / GENERATION).is_file() else folder
    return ModelFiles(folder, given, Texts(tokenizer, generation))


def has_own_head(files: ModelFiles) -> bool:
    """Returns whether an adapter holds the head of one number per token, which its base may lack."""
    return bool(files.adapter) and adapters_in(files.adapter, files.folder)[1].head == "scalar"


def layer_paths(model: ModelConfig) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Finds the layers that can have adapters: their paths in a folder -> our names of them, several where one matrix
    of a folder is several of ours."""
    family, layers = FAMILIES[model.model_type], dict[tuple[str, ...], tuple[str, ...]]()
    joint = {inner: matrix for matrix, rows in family.joint.items() for inner in rows}
    for name in (name for name in LINEAR_LAYERS if name != "gate_proj" or not model.plain_mlp):
        inner = f"{'self_attn' if name in OF_ATTENTION else 'mlp'}.{name}"
        places = (f"{BODY}layers.{layer}.{joint.get(inner, inner)}." for layer in range(model.num_layers))
        paths = tuple(stored_name(place, family)[:-1] for place in places)
        layers[paths] = (*layers.get(paths, ()), name)
    return layers


def adapters_in(folder: str, base: str) -> tuple[Adapters, AdapterConfig]:
    """Returns the adapters in a folder, as options of a run describe them. base: the folder of their base. Raises
    UserError for what is not supported, and if they are not the same in all layers."""
    values = read_json(Path(folder) / CONFIG)
    layers = layer_paths(read_config_json(Path(base) / "config.json"))
    with naming(Path(folder) / CONFIG):
        every = [*OUTER, *(path for paths in layers for path in paths)]
        config = from_peft(values, [path for path in every if is_target(values, path)], folder)
        others = [*filter(config.adapts, OUTER), *(name for name in config.modules_to_save if name not in SCORES)]
        if others:
            raise UserError(f"it changes {others[0]}, which a run can't adapt; {merge_here(folder)}")
        adapted = [(path, layers[paths]) for paths in layers if any(map(config.adapts, paths)) for path in paths]
        parts = [_parts(config, path, names) for path, names in adapted]
        targets = tuple(name for name in LINEAR_LAYERS if any(name in names for names, _ in parts))
        settings = {setting for _, setting in parts}
        if len(settings) != 1 or not all(config.adapts(path) for path, _ in adapted):
            raise UserError(
                "it adapts no layer of its base, or has not the same rank and alpha in all layers, as a run has "
                "(layers_to_transform, rank_pattern, alpha_pattern); give the base that it was made for, or "
                f"{merge_here(folder)}"
            )
        ((rank, alpha),) = settings
        return Adapters(rank, float(alpha), targets, config.rslora), config


def _parts(config: AdapterConfig, path: str, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, float]]:
    """Returns which of our layers the factors of a matrix in a folder adapt, and the rank and alpha of each.

    names: of the layers that are its rows. All of them have its A, unless a run has written it: then those that are
    targets, too, each with a part of A.
    """
    rank, alpha = config.rank_of(path), config.alpha_of(path)
    written = tuple(name for name in names if name in config.targets)
    if rank != len(written) * config.rank:
        return names, (rank, alpha)
    width = math.sqrt(len(written)) if config.rslora else len(written)
    return written, (config.rank, round(alpha / width, 9))

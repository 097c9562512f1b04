"""Reads and writes the folder of an adapter as peft does: adapter_config.json and adapter_model.safetensors.

Factors are A [r, in] and B [out, r] by the path of their layer. Other tensors belong to modules that are stored as a
whole, such as the score of a reward model; they have Hugging Face's names.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Size, Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import refuse_pipes
from rlhf_spmd.model import weights
from rlhf_spmd.model.adapters.config import CONFIG, OUTER, AdapterConfig, from_peft, merge_with_peft, to_peft
from rlhf_spmd.model.config import naming, read_json

WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
OF_EMBEDDINGS = {".lora_embedding_A": B, ".lora_embedding_B": A}
Factors = dict[str, tuple[Tensor, Tensor]]  # by path: A [r, in], B [out, r]


def read_adapter(folder: str | Path) -> tuple[AdapterConfig, Factors, dict[str, Tensor]]:
    """Reads the description of an adapter, the factors by path, and the tensors that are stored as a whole.

    Raises UserError naming the file and the key or tensor that is missing, unsupported or of a wrong shape.
    """
    folder = Path(folder)
    path = folder / WEIGHTS
    if not path.is_file() and (folder / PICKLED).is_file():
        raise UserError(
            f"{folder / PICKLED} is a pickle, which this program never opens; load it with peft and save it to a new "
            "folder with save_pretrained()"
        )
    refuse_pipes(folder)
    values = read_json(folder / CONFIG)
    tensors = weights.read_file(path)
    if wrong := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), ""):
        raise UserError(f"{path}: tensor {wrong} has numbers that are not finite; take an earlier state of the adapter")
    names = {name.removeprefix(PREFIX): name for name in tensors}
    for end, of_layer in OF_EMBEDDINGS.items():  # transposed, A and B the other way round
        if name := names.pop(f"{OUTER[0]}{end}", ""):
            names[f"{OUTER[0]}{of_layer}"], tensors[name] = name, tensors[name].T
    paths = sorted({name.removesuffix(A).removesuffix(B) for name in names if name.endswith((A, B))})
    with naming(folder / CONFIG):
        config = from_peft(values, paths, folder)
    of_base = {f"{layer}.base_layer.weight": f"{layer}.weight" for layer in paths}
    of_base |= {f"{end}.weight": f"{end}.weight" for end in OUTER}  # peft stores these whenever it adapts one of them
    others = [name for name in names if not name.endswith((A, B))]
    saved = {of_base.get(name, name): tensors[names[name]] for name in others}
    for name, stored in names.items():
        known = name not in others or name in of_base or (".lora_" not in name and config.saves(name))
        if not stored.startswith(PREFIX) or not known:
            raise UserError(
                f"{path} holds tensor {stored}, which is neither a factor of a linear layer nor part of a module in "
                f"modules_to_save (adapters of MoE experts are such); {merge_with_peft(folder)}"
            )
    factors: Factors = {}
    for layer in paths:
        if missing := [layer + end for end in (A, B) if layer + end not in names]:
            raise UserError(f"{path} lacks tensor {PREFIX}{missing[0]}; copy the file again")
        factors[layer] = tensors[names[layer + A]], tensors[names[layer + B]]
        _check_rank(path, layer, config.rank_of(layer), *factors[layer])
    if not factors:
        raise UserError(f"{path} holds no factors (lora_A, lora_B); give the folder of a LoRA adapter")
    return config, factors, saved


def write_adapter(
    folder: str | Path,
    config: AdapterConfig,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    saved: Mapping[str, Tensor],
) -> None:
    """Writes a folder that peft 0.17 and later load, each file under a temporary name first. Tensors keep their dtype:
    float32 is what peft expects, whatever the base has."""
    folder = Path(folder)
    assert all(config.adapts(path) for path in factors) and all(config.saves(name) for name in saved)
    for path, (a, b) in factors.items():
        assert a.shape[0] == b.shape[1] == config.rank_of(path), f"{path} has another rank than the config says"
    tensors = {PREFIX + name: tensor for name, tensor in saved.items()}
    for path, (a, b) in factors.items():
        tensors |= {PREFIX + path + A: a, PREFIX + path + B: b}
    folder.mkdir(parents=True, exist_ok=True)
    weights.write_file(folder / WEIGHTS, dict(sorted(tensors.items())))
    weights.write_json(folder / CONFIG, to_peft(config))


def check_base(
    config: AdapterConfig,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    saved: Mapping[str, Tensor],
    base: dict[str, Size],
) -> None:
    """Checks that an adapter fits a base, given the shapes of its tensors by Hugging Face's names: those of the model
    with the adapter's head. Raises UserError, to which the caller prefixes the folders."""
    layers = [name.removesuffix(".weight") for name, shape in base.items() if is_layer(name, shape)]
    layers += [path for path in OUTER if path in factors and f"{path}.weight" in base]
    if lacking := [path for path in layers if config.adapts(path) and path not in factors]:
        raise UserError(f"its target_modules name {lacking[0]}, for which it has no factors; copy its files again")
    of_base = {f"{path}.weight": base[f"{path}.weight"] for path in layers}
    shapes = {f"{path}.weight": (b.shape[0], a.shape[1]) for path, (a, b) in factors.items()}
    fits = [(name, shape, of_base.get(name)) for name, shape in shapes.items()]
    fits += [(name, tensor.shape, base.get(name)) for name, tensor in saved.items()]
    for name, shape, expected in fits:
        if shape != expected:
            has = "no such linear layer" if expected is None else f"{list(expected)} there"
            raise UserError(
                f"it has {name} with shape {list(shape)}, and the base has {has}; give the base that it was made for"
            )


def is_layer(name: str, shape: Size) -> bool:
    """Returns whether a tensor is the weight of a linear layer that can be adapted: not the embeddings, and no head."""
    return any(map(str.isdigit, name.split("."))) and name.endswith(".weight") and len(shape) == 2


def _check_rank(path: Path, layer: str, rank: int, a: Tensor, b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise UserError(
            f"{path}: the factors of {layer} have shapes {list(a.shape)} and {list(b.shape)}, but {CONFIG} gives them "
            f"the rank {rank}; the two files do not belong together: copy both again"
        )

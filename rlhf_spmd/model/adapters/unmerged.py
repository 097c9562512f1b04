"""Adapters beside the weights of a model, as runs have them: to peft's folder, and from it into a shard of a model."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model import hf
from rlhf_spmd.model.adapters.config import OUTER, AdapterConfig, merge_here
from rlhf_spmd.model.adapters.files import Factors, check_base, read_adapter, write_adapter
from rlhf_spmd.model.adapters.merge import sides_of
from rlhf_spmd.model.adapters.uniform import BASE_HERE, adapters_in, model_files
from rlhf_spmd.model.config import naming
from rlhf_spmd.model.families import FAMILIES
from rlhf_spmd.model.parallel import WHOLE, Parallel, slice_of
from rlhf_spmd.model.stored_names import stored_name
from rlhf_spmd.model.stored_parts import parts_of, stored_of, stored_path, to_hf_name
from rlhf_spmd.model.texts.tokenizer_files import Texts
from rlhf_spmd.model.transformer import Head, Transformer
from rlhf_spmd.plan.adapters import A, B


def save_adapter(state: Mapping[str, Tensor], model: Transformer, folder: Path, beside: Texts, *, base: Path) -> None:
    """Writes what trains of a model with adapters, by parameter name, as peft's folder.

    beside: what belongs to the model, see hf.write_texts.
    base: the folder that it names.
    """
    adapters, head = model.adapters, model.head
    assert adapters is not None, "the model has adapters"
    layers = sorted(name.removesuffix(f".{A}") for name in state if name.endswith(f".{A}"))
    factors = {layer: (state[f"{layer}.{A}"], state[f"{layer}.{B}"]) for layer in layers}
    saved = {to_hf_name(name): one for name, one in state.items() if not name.endswith((f".{A}", f".{B}"))}
    joint, num_parts = _joined(factors, adapters.targets, model)
    names = FAMILIES[model.config.model_type].layer_names
    parts = {name for rows in FAMILIES[model.config.model_type].joint.values() for name in map(_last, rows)}
    inner = {layer: layer.split(".", 2)[2] for layer in joint}
    ends = {layer: names.get(name, name) if names else _last(name) for layer, name in inner.items()}
    num_parts = {ends[layer]: num for layer, num in num_parts.items()}
    widths = {name: math.sqrt(num) if adapters.rslora else num for name, num in num_parts.items()}
    config = AdapterConfig(
        adapters.rank,
        int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha,  # as peft writes it
        adapters.rslora,
        tuple(sorted({*ends.values()} | (parts & {*adapters.targets}))),  # parts: which `adapters_in` reads
        {name: adapters.rank * num for name, num in num_parts.items()},
        {name: adapters.alpha * width for name, width in widths.items()},
        modules_to_save=tuple(sorted(name.removesuffix(".weight") for name in saved)),
        task_type="CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        base=str(base),
        dropout=adapters.dropout,
    )
    write_adapter(folder, config, {stored_path(layer, model.config): two for layer, two in joint.items()}, saved)
    hf.write_texts(folder, model.config, beside)


def _joined(factors: Factors, targets: Collection[str], model: Transformer) -> tuple[Factors, dict[str, int]]:
    """Returns factors, and the layers whose matrices are several of ours, with the number of these that have some: as a
    folder has them, their A one below the other, their B along a diagonal."""
    joint, num_parts, family = dict(factors), dict[str, int](), FAMILIES[model.config.model_type]
    whole = Transformer(model.config, head=model.head, device="meta").state_dict()
    for matrix, rows in family.joint.items():
        num = sum(_last(inner) in targets for inner in rows)
        if not num:
            continue
        for layer in range(model.config.num_layers):
            place = f"layers.{layer}."
            num_parts[place + matrix] = num
            sizes = [whole[f"layers.{layer}.{inner}.weight"].shape for inner in rows]
            nothing = [(torch.empty(0, columns), torch.empty(size, 0)) for size, columns in sizes]
            pairs = [joint.pop(place + inner, no) for inner, no in zip(rows, nothing, strict=True)]
            below = torch.block_diag(*(b.cpu() for _, b in pairs))
            if family.joint_by_head:
                num_heads = model.config.num_kv_heads
                of_heads = [part.unflatten(0, (num_heads, -1)) for part in below.split([size for size, _ in sizes])]
                below = torch.cat(of_heads, dim=1).flatten(0, 1)
            joint[place + matrix] = torch.cat([a.cpu() for a, _ in pairs]), below
    return joint, num_parts


@torch.no_grad()
def take_adapter(model: Transformer, folder: str | Path) -> None:
    """Gives a shard of a model the adapter in a folder, whose rank and targets it has. Raises UserError."""
    config, factors, saved = read_adapter(folder)
    whole = Transformer(model.config, head=model.head, device="meta")
    with naming(f"{folder} does not fit its base"):
        if other := next(iter(({*OUTER} & {*factors}) | ({*saved} - {"score.weight"})), ""):
            raise UserError(f"it changes {other}, which a run can't adapt; {merge_here(folder)}")
        if config.head == "scalar" and model.head == "lm":
            raise UserError("it is of a critic or reward model (SEQ_CLS), and a language model is wanted")
        sides = sides_of(stored_of(whole.state_dict(), model.config), FAMILIES[model.config.model_type])
        check_base(config, factors, saved, {name: one.shape for name, one in sides.items()})
        if config.head == "scalar" and not saved:
            raise UserError("it lacks score.weight; copy its files again")
        values = _apart(factors, model, folder) | saved
    for name, weight in model.named_parameters():
        if name in values:
            weight.copy_(values[name][slice_of(name, model.config, model.parallel.shard)])


def _apart(factors: Factors, model: Transformer, folder: str | Path) -> dict[str, Tensor]:
    """Returns factors of a folder as those of our layers, the inverse of `_joined`: of a matrix that is several of
    ours, their rows of B, and all of A or their part of it. Raises UserError for numbers that none of them has."""
    adapters, family, apart = model.adapters, FAMILIES[model.config.model_type], dict[str, Tensor]()
    assert adapters is not None, "the model has adapters"
    place = {inner: number for rows in family.joint.values() for number, inner in enumerate(filter(adapters.has, rows))}
    left = {path: int(b.count_nonzero()) for path, (_, b) in factors.items()}
    whole = Transformer(model.config, head=model.head, device="meta")
    shapes = {name: weight.shape for name, weight in whole.state_dict().items()}
    for name in shapes:
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or not adapters.has(layer):
            continue
        parts = parts_of(name, shapes, model.config)
        path = stored_name(parts[0].there, family).removesuffix(".weight")
        a, b = factors[path]
        if parts[0].inside:
            b = torch.cat([b[part.at : part.at + part.num_rows] for part in parts])
        if len(a) > adapters.rank:
            first = place[layer.split(".", 2)[2]] * adapters.rank
            a, b = a[first : first + adapters.rank], b[:, first : first + adapters.rank]
        left[path] -= int(b.count_nonzero())
        apart |= {f"{layer}.{A}": a, f"{layer}.{B}": b}
    if wrong := next((path for path, num in left.items() if num), ""):
        raise UserError(f"the factors of {wrong} are not those of {', '.join(adapters.targets)}; {merge_here(folder)}")
    return apart


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def load_any(
    folder: str,
    *,
    head: Head,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    parallel: Parallel = WHOLE,
) -> Transformer:
    """Loads the frozen model in a folder, or one shard of it; of an adapter with its base, unmerged. Raises
    UserError."""
    files = model_files(folder, option=BASE_HERE)
    adapted = adapters_in(folder, files.folder) if files.adapter else None
    fresh = adapted is not None and adapted[1].head == "scalar"
    model = hf.load_model(files.folder, head=head, fresh_head=fresh, dtype=dtype, device=device, parallel=parallel)
    if adapted is not None:
        model = model.with_adapters(adapted[0])
        take_adapter(model, folder)
    return model

"""Low-rank adapters as options of a run, and what they make of its models."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.option_tree import ByName
from rlhf_spmd.plan.adapters import ALL_LINEAR, LINEAR_LAYERS, A, Adapters, B
from rlhf_spmd.plan.program.tensors import trained_weights_of
from rlhf_spmd.plan.workflow import Role
from rlhf_spmd.plan.workload import ModelShape

Share = Annotated[float, Field(ge=0, le=0.99)]
Targets = tuple[Annotated[str, Field(min_length=1)], ...]


@dataclass(frozen=True, slots=True)
class RoleLora:
    """Adapters of one model."""

    rank: NonNegativeInt | None = None  # rank of the adapters of one model; empty: lora.rank
    alpha: PositiveFloat | None = None  # scale of the adapters of one model; empty: lora.alpha
    targets: Targets | None = None  # layers with adapters of one model; empty: lora.targets
    # whether one model multiplies by alpha / sqrt(rank); empty: lora.rslora
    rslora: bool | None = None
    dropout: Share | None = None  # dropout of the adapters of one model; empty: lora.dropout


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters on frozen models (docs/lora.md)."""

    rank: NonNegativeInt = 0  # rank of the adapters of every model that trains; 0: none, all weights train
    alpha: PositiveFloat = 32.0  # scale of the adapters, whose product is multiplied by alpha / rank
    # layers with adapters, e.g. q_proj,v_proj; all-linear: every linear layer but the output layer
    targets: Targets = (ALL_LINEAR,)
    rslora: bool = False  # multiply by alpha / sqrt(rank) in place of alpha / rank
    # dropout probability on adapter inputs, e.g. 0.05, only where no responses are generated; 0: none
    dropout: Share = 0.0
    base: str = ""  # folder of the base of adapters that are given as folders; empty: the one that each names
    # weights for generation: apart, the base and separate adapters as in training; joined, merged copies W + s B A,
    # computed again in each iteration, which take the memory of a second base
    generate: Literal["apart", "joined"] = "apart"
    roles: Annotated[Mapping[str, RoleLora], ByName("ROLE")] = field(default_factory=dict)

    def of_role(self, role: str) -> "Lora":
        """Returns a copy with the options of a role in the places of those of all."""
        given = asdict(self.roles.get(role, RoleLora()))
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def of(self, role: str) -> Adapters | None:
        """Returns the adapters of a model that trains; None if all its weights do."""
        lora = self.of_role(role)
        return Adapters(lora.rank, lora.alpha, _layers(lora.targets), lora.rslora, lora.dropout) if lora.rank else None


def of_folder(lora: Lora, role: str, adapters: Adapters, folder: str) -> Adapters:
    """Returns the adapters of a role that goes on training those in a folder. Raises UserError for an option that
    contradicts them.

    Their dropout is that of the options: it is not a part of what they compute.
    """
    options, usual = lora.of_role(role), Lora()
    for name in ("rank", "alpha", "targets", "rslora"):
        value, stored = getattr(options, name), getattr(adapters, name)
        is_of_role = getattr(lora.roles[role], name) is not None
        is_given = is_of_role or value != getattr(usual, name)
        if is_given and (_layers(value) if name == "targets" else value) != stored:
            key = f"lora.{role}.{name}" if is_of_role else f"lora.{name}"
            raise UserError(
                f"{key}={_text(value)}, but the {role} goes on from the adapter in {folder}, which has "
                f"{_text(stored)}; drop the option, or merge the adapter (convert {folder} MERGED --merge) and give "
                "MERGED"
            )
    return replace(adapters, dropout=options.dropout)


def _layers(targets: Targets) -> Targets:
    """Returns the names of layers that an option means."""
    return tuple(layer for layer in LINEAR_LAYERS if layer in targets or ALL_LINEAR in targets)


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


def adapted(role: str, shape: ModelShape, adapters: Adapters) -> ModelShape:
    """Returns the shape of a role with adapters. Raises UserError for a rank that is larger than a side of a layer, and
    for mixtures of experts."""
    if shape.num_experts:
        raise UserError(
            f"the {role} is a mixture of experts, which cannot have adapters; train all weights: lora.rank=0"
        )
    shape = replace(shape, adapters=adapters)
    factors = [weight for weight in trained_weights_of(shape) if weight.name.endswith((A, B))]
    for weight in sorted(factors, key=lambda weight: min(weight.rows, weight.columns))[:1]:
        least, layer = min(weight.rows, weight.columns), weight.name.split(".")[-2]
        if least < adapters.rank:
            raise UserError(
                f"lora.{role}.rank={adapters.rank}: {layer} of the {role} has a side of {least}, which its rank can't "
                f"exceed; lower the rank to {least}, or leave {layer} out of lora.{role}.targets"
            )
    return shape


def bases(
    shapes: Mapping[str, ModelShape | None],
    roles: Mapping[str, Role],
    folders: Mapping[str, str],
    same_model: Callable[[str, str], bool],
) -> dict[str, str]:
    """Finds the models with the same frozen weights, whatever their heads, where one of the models has adapters.
    Returns the name of these weights for each of them.

    folders: of the roles; empty without one, and then models that start from the same role have the same weights.
    same_model: whether two folders hold equal copies.
    """
    with_adapters = {role for role, shape in shapes.items() if shape is not None and shape.adapters is not None}
    groups: dict[tuple[ModelShape, str], list[str]] = {}
    known: list[str] = []  # a folder for each base
    for role, shape in shapes.items():
        if with_adapters and shape is not None and (role in with_adapters or roles[role].lr is None):
            source = next((other for other in roles[role].starts_from if other in shapes), role)
            if folder := folders[role]:
                source = next((other for other in known if same_model(other, folder)), folder)
                known.append(source)
            groups.setdefault((replace(shape, adapters=None, scalar_head=False), source), []).append(role)
    return {role: group[0] for group in groups.values() if with_adapters & set(group) for role in group}

"""AdamW (arXiv 1711.05101) by torch's fused operation, for flat_engine.py; the optimizer's state by parameter.

torch.optim.AdamW runs the same operation, but constructing it imports torch's compiler: a second of every rank's start.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf_spmd.runtime.engines.host_memory import host_zeros, visits

MOMENTS = ("exp_avg", "exp_avg_sq")
Interval = tuple[str, int, int]  # a parameter's name, and an interval [start, stop) of its flattened local shard
Decaying = Literal["all", "matrices", "linear"]
ReadState = Callable[[str, Interval], Tensor]  # "master", "exp_avg" or "exp_avg_sq" -> the numbers, [stop - start]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine trains."""

    zero: int  # ZeRO stage over the data-parallel ranks
    dtype: torch.dtype = torch.float32  # of weights and computation; bfloat16 keeps masters and sums in float32
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-5
    weight_decay: float = 0.0
    weight_decay_on: Decaying = "all"  # the weights that it concerns, see `decays`
    max_grad_norm: float | None = 1.0  # of the global gradient; None: no clipping
    sums_each_pass: bool = True  # ZeRO 2 sums each micro-batch over ranks, instead of a step
    offload: bool = False  # masters and moments are in host memory, from where parts come for their update; not stage 3


@dataclass(frozen=True, slots=True)
class Share:
    """An interval of a weight, stored at `offset` in each of the flattened `values`: the master and its moments."""

    interval: Interval
    values: Mapping[str, Tensor]
    offset: int

    @property
    def part(self) -> slice:
        _, start, stop = self.interval
        return slice(self.offset, self.offset + stop - start)


def state_of(shares: Iterable[Share]) -> dict[Interval, dict[str, Tensor]]:
    """Returns master and moments of each interval, as flat views."""
    return {
        share.interval: {kind: value.detach().reshape(-1)[share.part] for kind, value in share.values.items()}
        for share in shares
    }


def read_into(shares: Iterable[Share], read: ReadState) -> None:
    """Reads master and moments of each interval."""
    for share in shares:
        for kind, value in share.values.items():
            value.detach().view(-1)[share.part] = read(kind, share.interval).to(value.device)


def decays(name: str, weight: Tensor, on: Decaying) -> bool:
    """Returns whether weight decay applies to a parameter.

    on: "all": to any one; "matrices": not to vectors, that is, norms and biases; "linear": to matrices, but not to the
        token embeddings (nor to the output layer that is tied to them).
    """
    return on == "all" or (weight.dim() > 1 and (on == "matrices" or "embed" not in name))


class AdamW:
    """Updates `masters` from gradients; the moments have the dtype of the masters.

    The moments are allocated at once: if allocated later, they would occupy memory of the first iteration's KV cache,
    and torch could not return that memory to the GPU.

    states: of each part of the weights the master and its moments.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bare: Iterable[tuple[int, slice]] = (),
        weights: Sequence[Tensor] = (),
        device: torch.device | None = None,
    ):
        """bare: the parts of masters without weight decay, in order, each as the place of a master and an interval of
        the flattened master.
        weights: those that get the updated masters, rounded; empty: the masters are the weights.
        device: on which the updates are made, of states in host memory; None: where the masters are.
        """
        self._settings = dict(beta1=betas[0], beta2=betas[1], eps=eps)
        self._parts = _parts(masters, list(bare), weight_decay)
        self._weights, self._device = weights, device
        self.states: list[dict[str, Tensor]] = [{"master": master.detach()} for master in masters]
        self._steps = [torch.zeros((), device=device or master.device) for master in masters]
        sizes = [master.numel() for master in masters]
        for kind in MOMENTS:
            if device is None:
                values = [torch.zeros_like(state["master"]) for state in self.states]
            else:
                values = [*host_zeros(self, sum(sizes), masters[0].dtype, device).split(sizes)]
            for state, value in zip(self.states, values, strict=True):
                state[kind] = value

    @property
    def num_steps(self) -> int:
        return int(self._steps[0]) if self._steps else 0

    def begin(self, num_steps: int) -> None:
        """Sets the number of steps; a resumed run then overwrites the states."""
        for step in self._steps:
            step.fill_(num_steps)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], *, lr: float) -> None:
        """Makes one step with the gradients of the masters."""
        torch._foreach_add_(self._steps, 1)
        if self._device is None:
            self._update(dict(enumerate(self.states)), gradients, lr)
            return
        kinds = ["master", *MOMENTS] if self._weights else MOMENTS
        away = [[state[kind] for kind in kinds] for state in self.states]
        for place, there in enumerate(visits(away, self._device)):
            self._update({place: self.states[place] | dict(zip(kinds, there, strict=True))}, gradients, lr)

    def _update(self, states: Mapping[int, Mapping[str, Tensor]], gradients: Sequence[Tensor], lr: float) -> None:
        """Updates some places, whose states are on the device."""
        for weight_decay, parts in self._parts.items():
            here = [(states[place], gradients[place], place, part) for place, part in parts if place in states]
            if here:
                torch._fused_adamw_(
                    [_view(state["master"], part) for state, _, _, part in here],
                    [_view(gradient, part) for _, gradient, _, part in here],
                    [_view(state["exp_avg"], part) for state, _, _, part in here],
                    [_view(state["exp_avg_sq"], part) for state, _, _, part in here],
                    [],
                    [self._steps[place] for _, _, place, _ in here],
                    lr=lr,
                    weight_decay=weight_decay,
                    amsgrad=False,
                    maximize=False,
                    **self._settings,
                )
        for place, state in states.items():
            if self._weights:
                self._weights[place].copy_(state["master"])


def _parts(masters: Sequence[Tensor], bare: Sequence[tuple[int, slice]], weight_decay: float) -> dict[float, list]:
    """Groups the parts of masters by their weight decay, as place and interval (None: all of a master)."""
    found: dict[float, list[tuple[int, slice | None]]] = {weight_decay: [], 0.0: []}
    for place, master in enumerate(masters):
        start, own = 0, [part for other, part in bare if other == place]
        if not own:
            found[weight_decay].append((place, None))
            continue
        for part in own:
            found[weight_decay] += [(place, slice(start, part.start))] if start < part.start else []
            found[0.0].append((place, part))
            start = part.stop
        found[weight_decay] += [(place, slice(start, master.numel()))] if start < master.numel() else []
    return {decay: parts for decay, parts in found.items() if parts}


def _view(x: Tensor, part: slice | None) -> Tensor:
    return x if part is None else x.view(-1)[part]

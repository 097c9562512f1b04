"""What an optimizer step knows of the routers of a mixture: how often each expert is chosen in the global mini-batch,
and the losses that follow from it."""

# B rows, T tokens, N real ones, L sparse layers, E experts, k experts of a token

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_spmd.config.options import Experts
from rlhf_spmd.model.routes import RouterLosses, Routes
from rlhf_spmd.model.sequences import Sequences, forward
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.calls import LossCall
from rlhf_spmd.plan.runtime_words import routes_of
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.world.metric_sums import Meter

NAMES = ("router_balance", "router_z", "router_entropy")  # in the log, of RouterLosses.sums


def choices(call: LossCall, rows: Mapping[str, Tensor], shape: ModelShape) -> Tensor:
    """Returns how often each expert of each sparse layer is chosen in these rows, float64 [L E]; [0] if these
    have no routes."""
    responses = call.responses[0]
    if (routes := routes_of(responses)) not in rows:
        return torch.zeros(0, dtype=torch.float64, device=rows[responses].device)
    took_B = sum((rows[key] >= 0).sum(1) for key in (call.prompts, responses)) - 1  # the last token took none
    took_BT = torch.arange(rows[routes].shape[1], device=took_B.device) < took_B[:, None]
    return Routes(rows[routes].flatten(0, 1), took_BT.flatten()).choices(shape.num_experts)


@torch.no_grad()
def counted(model: Transformer, batches: Sequence[Sequences], shape: ModelShape) -> tuple[list[Sequences], Tensor]:
    """Returns sequences with the experts that the routers choose now, and how often they choose each, float64 [L E]; of
    the last token of a row none counts."""
    made, total_LE = [], torch.zeros((), dtype=torch.float64)
    for batch in batches:
        recorded = Routes()
        forward(model, replace(batch, routes=recorded))
        counts_N = torch.ones_like(batch.tokens_N, dtype=torch.bool)
        counts_N[batch.last_B()] = False
        routes = Routes(recorded.taken[: len(counts_N)], counts_N)
        made.append(replace(batch, routes=routes))
        total_LE = total_LE + routes.choices(shape.num_experts)
    return made, total_LE


def begin(
    passes: Sequence[Routes], choices_LE: Tensor, shape: ModelShape, options: Experts, meter: Meter, *, counts: bool
) -> None:
    """Logs the load of experts, and gives their losses to the passes of a step.

    choices_LE: of the mini-batch of all ranks.
    counts: whether this rank has the first slice of its stage: the others compute the same routers.
    """
    choices_LE = choices_LE.view(-1, shape.num_experts)
    meter.add("expert_load", choices_LE.max() / choices_LE.mean(), 1)
    number = float(choices_LE.sum()) / shape.experts_per_token
    if counts and (options.balance_coef or options.z_coef):
        for routes in passes:
            routes.losses = RouterLosses(choices_LE.sum(0) / number, number, options.balance_coef, options.z_coef)


def log(passes: Sequence[Routes], meter: Meter) -> None:
    """Logs the losses of a step."""
    for losses in (routes.losses for routes in passes if routes.losses is not None):
        for of_layer_4 in losses.sums.values():
            for name, total in zip(NAMES, of_layer_4[:-1].tolist(), strict=True):
                meter.add(name, total, float(of_layer_4[-1]))

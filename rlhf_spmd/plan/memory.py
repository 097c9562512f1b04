"""Bytes that a rank holds all through an iteration: weights, gradients and optimizer state by ZeRO stage.

Mixed precision as runtime/train_engine.py lays it out (ZeRO, arXiv 1910.02054, section 3): with p parameters and c
bytes per weight in the compute precision, a trained model holds c*p weights, gradients that are accumulated in float32,
the two AdamW moments in float32, and, where c < 4, float32 master weights.
"""

from rlhf_spmd.plan.program import Program


def forecast_bytes(program: Program, rank: int) -> dict[str, int]:
    """Static bytes on a rank by what they are, plus the largest full copy that ZeRO 3 gathers for a call, and the
    packed copies of the weights that leave or arrive at the end of an iteration."""
    total = {"weights": 0, "gradients": 0, "optimizer": 0, "gathered": 0, "in transit": 0}
    workload = program.workload
    for move in program.transfers:
        if move.model is not None:
            arriving = sum(message.num_bytes for message in move.messages if message.destination == rank)
            leaving = max((message.num_bytes for message in move.messages if message.source == rank), default=0)
            total["in transit"] += arriving + leaving
    for model in program.copies(rank):
        shape = workload.models[model]
        if shape is None:
            continue
        params, c = shape.num_params, workload.param_bytes
        train = workload.workflow.train_call(model)
        home = program.placement.layouts[train.name if train else _first_use(program, model)]
        if rank not in home.ranks:
            total["weights"] += c * params
            continue
        shard = -(-params // home.dp)
        total["weights"] += c * (shard if home.zero == 3 else params)
        if home.zero == 3 and home.dp > 1:
            total["gathered"] = max(total["gathered"], c * params)
        if train is None:
            continue
        total["gradients"] += 4 * (shard if home.zero >= 2 else params)
        total["optimizer"] += (8 + (4 if c < 4 else 0)) * (shard if home.zero >= 1 else params)
    return total


def _first_use(program: Program, model: str) -> str:
    return next(call.name for call in program.workload.workflow.placed_calls if call.model == model)

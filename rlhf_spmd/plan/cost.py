"""Seconds of what a rank does, from the constants of a machine: one-line formulas that simulate.py puts together.

A layer's products take 2 FLOPs per weight and token, its causal attention 4 per pair of tokens and number of a head, of
which half is masked. Under tensor parallelism with sequence parallelism each block gathers its tokens before and
scatters their sum behind (Korthikanti et al., arXiv 2205.05198): 4 (tp - 1) / tp of t x h numbers per layer and pass,
which no product hides, nor the time to start it. A backward pass takes two forwards, and one more where activations
are computed again. A decode step reads all weights and all keys and values, but takes no less than starting its layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_spmd.plan.calibration import Calibration, Device, Link
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.memory import num_params, sequence_bytes
from rlhf_spmd.plan.pipeline import usual_number
from rlhf_spmd.plan.placement import uses_home
from rlhf_spmd.plan.program import Load, Message, Program, Run
from rlhf_spmd.plan.shard import split
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.plan.workload import ModelShape

STATE_BYTES = 28  # that AdamW reads and writes per weight: master weight, two moments, gradient, and the new weight


def layer_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """FLOPs of one layer's forward pass; context: tokens that a token attends to, on average."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = 2 * shape.hidden_size * (q + kv) + 3 * shape.hidden_size * shape.intermediate_size
    return tokens * (2 * weights + 4 * q * context)


def head_flops(shape: ModelShape, tokens: float) -> float:
    """FLOPs of the logits, or of a scalar head."""
    return 2 * tokens * shape.hidden_size * (1 if shape.scalar_head else shape.vocab_size)


def all_gather_s(link: Link, num_ranks: int, num_bytes: float) -> float:
    """Seconds in which each rank of a ring gets the parts of the others; num_bytes: of the whole. A reduce-scatter
    takes as long, an all-reduce both."""
    if num_ranks == 1:
        return 0.0
    return (num_ranks - 1) / num_ranks * num_bytes / link.bytes_per_s + (num_ranks - 1) * link.latency_s


@dataclass(frozen=True, slots=True)
class Cost:
    """What simulate() asks of a program."""

    calibration: Calibration
    program: Program

    def device(self, rank: int) -> Device:
        """The constants of a rank's device."""
        cluster = self.program.cluster
        return self.calibration.devices[cluster.nodes[cluster.node_of(rank)].device]

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest link within a group."""
        first, last = (self.program.cluster.node_of(edge(ranks)) for edge in (min, max))
        return self.calibration.between if first != last else self.calibration.inside

    def message_s(self, message: Message) -> float:
        """Seconds of a message on the wire."""
        link = self.link((message.source, message.destination))
        return message.num_parts * link.latency_s + message.num_bytes / link.bytes_per_s

    def load_s(self, rank: int, step: Load) -> float:
        """Seconds in which the weights of a frozen model come from host memory."""
        workload, layouts = self.program.workload, self.program.placement.layouts
        calls = [call for call in workload.workflow.placed_calls if call.model == step.model]
        layout = next(layouts[call.name] for call in calls if layouts[call.name].offload)
        params = num_params(workload.models[step.model], layout.shard(rank))
        return workload.param_bytes * params / self.device(rank).host_bytes_per_s

    def run_s(self, rank: int, step: Run) -> float:
        """Seconds of a Run on a rank, its collectives included."""
        workload = self.program.workload
        call, layout = workload.workflow.call(step.call), self.program.layout_of(step)
        if call.kind == "compute" or workload.models[call.model] is None or step.phase == "begin":
            return 0.0
        rows = len(self.program.columns_of(step, rank)) * len(self.program.mini_batches_of(step))
        if call.kind == "generate":
            return self._weights_s(call, layout, rank) + self._generate_s(call, layout, rank, rows)
        if step.phase == "update":
            return self._update_s(call, layout, rank)
        length = workload.max_prompt + workload.max_response
        size = layout.micro_batch or workload.micro_batch
        if layout.tokens:
            size = max(1, layout.tokens // length)
        number = usual_number(self.program, step) if step.phase else max(1, -(-rows // size))
        tokens = rows * length / number
        if step.phase:  # of a pipeline
            return self._pass_s(call, layout, rank, tokens, length, backward=step.phase == "backward")
        forward_s = number * self._pass_s(call, layout, rank, tokens, length)
        if call.kind != "train":
            return self._weights_s(call, layout, rank) + forward_s
        backward_s = number * self._pass_s(call, layout, rank, tokens, length, backward=True)
        gathers_s = 2 * number * self._weights_s(call, layout, rank)  # before each forward and each backward
        return gathers_s + forward_s + backward_s + self._update_s(call, layout, rank)

    def _pass_s(
        self, call: Call, layout: Layout, rank: int, tokens: float, length: float, *, backward: bool = False
    ) -> float:
        """A forward or backward pass of some tokens, in sequences of one length, through a rank's stage."""
        shape, shard, device = self.program.workload.models[call.model], layout.shard(rank), self.device(rank)
        num_layers = len(split(shape.num_layers, shard.pp, shard.stage))
        hidden_bytes = tokens * shape.hidden_size * self.program.workload.param_bytes
        gather_s = all_gather_s(self.link(layout.tensor_ranks(rank)), layout.tp, hidden_bytes)
        flops = layer_flops(shape, tokens, length / 2) / layout.tp
        layer_s = flops / device.matrix_flops + 4 * gather_s + device.layer_s
        is_last = shard.stage == shard.pp - 1
        head_s = head_flops(shape, tokens) / layout.tp / device.matrix_flops if is_last else 0.0
        if backward:
            return (2 + layout.recompute) * num_layers * layer_s + 2 * head_s
        return num_layers * layer_s + head_s

    def _weights_s(self, call: Call, layout: Layout, rank: int) -> float:
        """What ZeRO 3 takes to gather a rank's shard of the weights."""
        workload = self.program.workload
        train = workload.workflow.train_call(call.model)
        if train and uses_home(call, rank, workload, self.program.placement):
            layout = self.program.placement.layouts[train.name]
        if layout.zero < 3:
            return 0.0
        whole_bytes = workload.param_bytes * num_params(workload.models[call.model], layout.shard(rank))
        return all_gather_s(self.link(layout.data_ranks(rank)), layout.dp, whole_bytes)

    def _update_s(self, call: Call, layout: Layout, rank: int) -> float:
        """The gradients' sum over dp, and the optimizer's step."""
        params = num_params(self.program.workload.models[call.model], layout.shard(rank))
        mine = params / layout.dp if layout.zero else params
        reduce_s = 2 * all_gather_s(self.link(layout.data_ranks(rank)), layout.dp, 4 * params)
        return reduce_s + STATE_BYTES * mine / self.device(rank).memory_bytes_per_s

    def _generate_s(self, call: Call, layout: Layout, rank: int, rows: int) -> float:
        """Prompts, then steps of as many rows as are decoded at the same time, through all stages."""
        workload, places = self.program.workload, max(min(rows, self.program.workload.max_sequences), 1)
        number = layout.pp if self.calibration.pipelined_prefill else 1
        tokens, stages = rows * workload.max_prompt / number, layout.stage_ranks(rank)
        passes_s = [self._pass_s(call, layout, other, tokens, workload.max_prompt) for other in stages]
        prefill_s = sum(passes_s) + (number - 1) * max(passes_s)
        step_s = sum(self._decode_s(call, layout, other, places) for other in stages)
        return prefill_s + -(-rows // places) * workload.max_response * step_s

    def _decode_s(self, call: Call, layout: Layout, rank: int, places: int) -> float:
        """A token for each of so many rows through one stage, half-way through their responses."""
        workload, device, shard = self.program.workload, self.device(rank), layout.shard(rank)
        shape = workload.models[call.model]
        least_s = len(split(shape.num_layers, shard.pp, shard.stage)) * device.decode_layer_s
        prompt, response = workload.max_prompt, workload.max_response
        cached = places * (prompt + response / 2) / (prompt + response) * sequence_bytes(workload, call, layout, rank)
        read = workload.param_bytes * num_params(shape, shard) + cached
        return max(least_s, read / device.memory_bytes_per_s)

"""Seconds of what a rank does, from the constants of a machine: one-line formulas that forecast.py puts together.

A layer's products take 2 FLOPs per weight and token, its causal attention 4 per pair of tokens and number of a head, of
which half is masked. Under tensor parallelism with sequence parallelism each block gathers its tokens before and
scatters their sum behind (Korthikanti et al., arXiv 2205.05198): 4 (tp - 1) / tp of t x h numbers per layer and pass,
which no product hides, nor the time to start it. A backward pass takes two forwards, and one more where activations
are computed again. A decode step reads all weights and all keys and values, but takes no less than starting its layers.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_spmd.plan.calibration import Calibration, Device, Link
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.memory import num_params, sequence_bytes
from rlhf_spmd.plan.shard import split
from rlhf_spmd.plan.workflow import Call
from rlhf_spmd.plan.workload import ModelShape, Workload

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


Lengths = Sequence[tuple[int, int]]  # of each row: tokens of the prompt, of the response


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of the parts of calls, in any layout on a cluster."""

    calibration: Calibration
    workload: Workload
    cluster: Cluster

    def device(self, rank: int) -> Device:
        """The constants of a rank's device."""
        return self.calibration.devices[self.cluster.nodes[self.cluster.node_of(rank)].device]

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest link within a group."""
        first, last = (self.cluster.node_of(edge(ranks)) for edge in (min, max))
        return self.calibration.between if first != last else self.calibration.inside

    def message_s(self, source: int, destination: int, num_bytes: int, num_parts: int = 1) -> float:
        """A message from rank to rank, in so many parts."""
        link = self.link((source, destination))
        return num_parts * link.latency_s + num_bytes / link.bytes_per_s

    def load_s(self, model: str, layout: Layout, rank: int) -> float:
        """The weights of a frozen model come from host memory."""
        params = num_params(self.workload.models[model], layout.shard(rank))
        return self.workload.param_bytes * params / self.device(rank).host_bytes_per_s

    def pass_s(
        self, call: Call, layout: Layout, rank: int, tokens: float, length: float, *, backward: bool = False
    ) -> float:
        """A forward or backward pass of some tokens, in sequences of one length, through a rank's stage."""
        shape, shard, device = self.workload.models[call.model], layout.shard(rank), self.device(rank)
        num_layers = len(split(shape.num_layers, shard.pp, shard.stage))
        hidden_bytes = tokens * shape.hidden_size * self.workload.param_bytes
        gather_s = all_gather_s(self.link(layout.tensor_ranks(rank)), layout.tp, hidden_bytes)
        flops = layer_flops(shape, tokens, length / 2) / layout.tp
        layer_s = flops / device.matrix_flops + 4 * gather_s + device.layer_s
        is_last = shard.stage == shard.pp - 1
        head_s = head_flops(shape, tokens) / layout.tp / device.matrix_flops if is_last else 0.0
        if backward:
            return (2 + layout.recompute) * num_layers * layer_s + 2 * head_s
        return num_layers * layer_s + head_s

    def gather_s(self, model: str, layout: Layout, rank: int) -> float:
        """What ZeRO 3 takes to gather a rank's shard of weights that are spread over the dp of a layout."""
        if layout.zero < 3:
            return 0.0
        whole_bytes = self.workload.param_bytes * num_params(self.workload.models[model], layout.shard(rank))
        return all_gather_s(self.link(layout.data_ranks(rank)), layout.dp, whole_bytes)

    def update_s(self, model: str, layout: Layout, rank: int) -> float:
        """The gradients' sum over dp, and the optimizer's step."""
        params = num_params(self.workload.models[model], layout.shard(rank))
        mine = params / layout.dp if layout.zero else params
        reduce_s = 2 * all_gather_s(self.link(layout.data_ranks(rank)), layout.dp, 4 * params)
        return reduce_s + STATE_BYTES * mine / self.device(rank).memory_bytes_per_s

    def generate_s(self, call: Call, layout: Layout, rank: int, rows: Lengths, places: int) -> list[float]:
        """When each row is done: the prompts first, then steps of as many rows as are decoded at the same time, through
        all stages. The place of a row that has ended is taken by the next one."""
        number = layout.pp if self.calibration.pipelined_prefill else 1
        tokens, stages = sum(prompt for prompt, _ in rows), layout.stage_ranks(rank)
        length = tokens / max(len(rows), 1)
        passes_s = [self.pass_s(call, layout, other, tokens / number, length) for other in stages]
        clock_s, done_s = sum(passes_s) + (number - 1) * max(passes_s), [0.0] * len(rows)
        for num_steps, active, ended in decode_steps([response for _, response in rows], places):
            clock_s += num_steps * sum(self.decode_s(call, layout, other, active) for other in stages)
            for row in ended:
                done_s[row] = clock_s
        return done_s

    def decode_s(self, call: Call, layout: Layout, rank: int, places: int) -> float:
        """A token for each of so many rows through one stage, half-way through their responses."""
        workload, device, shard = self.workload, self.device(rank), layout.shard(rank)
        shape = workload.models[call.model]
        least_s = len(split(shape.num_layers, shard.pp, shard.stage)) * device.decode_layer_s
        prompt, response = workload.max_prompt, workload.max_response
        cached = places * (prompt + response / 2) / (prompt + response) * sequence_bytes(workload, call, layout, rank)
        read = workload.param_bytes * num_params(shape, shard) + cached
        return max(least_s, read / device.memory_bytes_per_s)


def decode_steps(responses: Sequence[int], places: int) -> Iterator[tuple[int, int, list[int]]]:
    """Steps with the same rows under way: their number, how many rows, and which of them then end. The rows take their
    turns in order, at most `places` at a time."""
    ends: list[tuple[int, int]] = []  # step at which a row ends, row
    step, waiting = 0, 0
    while waiting < len(responses) or ends:
        while waiting < len(responses) and len(ends) < places:
            heapq.heappush(ends, (step + responses[waiting], waiting))
            waiting += 1
        active, end, ended = len(ends), ends[0][0], []
        while ends and ends[0][0] == end:
            ended.append(heapq.heappop(ends)[1])
        yield end - step, active, ended
        step = end

"""Seconds of a rank's work from the constants of a machine: one-line formulas, which forecast.py combines.

A layer's products take 2 FLOPs per weight and token, its causal attention 4 per pair of tokens and number of a head,
half of which is masked. Under tensor parallelism with sequence parallelism each block gathers its tokens before and
scatters their sum after (Korthikanti et al., arXiv 2205.05198): 4 (tp - 1) / tp of t x h numbers per layer and pass.
No product hides these messages or the start of a layer. A backward pass takes two forwards, and one more with
recomputation; one less where a base is frozen, of which it computes no gradients. Adapters add 2 FLOPs per number and
token, three times that where they train; none in generation with copies of the weights that have them.

A sparse layer of a mixture multiplies a token with its router and with k of its E experts. Where losses of routers
count experts that no generation has chosen, a step has one more forward pass.

A decode step of b rows and L layers takes max(start, max(read, products) + reduces): starting it, L decode_layer_s + 2
L decode_reduce_s (tp > 1); reading keys, values and all weights, of the experts of a layer the E (1 - (1 - k/E)^b) that
its rows hit; its products; and two all-reduces of b x h numbers per layer (Megatron, arXiv 1909.08053), 2 (tp - 1) / tp
of them over the link. As a CUDA graph it takes max(read, products) + reduces + L graph_layer_s: the host starts it at
once, and the device pauses between kernels.

If the calibration has tables of a shape (Measured), seconds of passes, steps and updates come from these instead.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_spmd.plan.adapters import NUMBER_BYTES
from rlhf_spmd.plan.calls import Generate, Infer, Measure, ModelCall
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration, Device, Link, Measured
from rlhf_spmd.plan.cost.memory import copied_bytes, num_params, num_trained, sequence_bytes, state_bytes
from rlhf_spmd.plan.cost.step_messages import RINGS, Collective, step_messages
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.shard import Shard, split
from rlhf_spmd.plan.workload import ModelShape, Workload

if TYPE_CHECKING:
    from rlhf_spmd.plan.cost.lengths import LengthDistribution

MOMENTS_BYTES = 24  # summed over the ranks of a train call per optimizer step (runtime/execute/optimizer_step.py)
STATE_BYTES = 28  # read and written by AdamW per weight: master weight, two moments, gradient, and the new weight


def layer_flops(shape: ModelShape, tokens: float, context: float, tp: int = 1, *, layers: range | None = None) -> float:
    """Returns the FLOPs of one layer's forward pass on the rank with the largest of tp slices, for which the others
    wait.

    context: tokens that a token attends to, on average.
    layers: those of a stage, of which this is the mean if some are sparse and others are not; None: all.
    """
    heads, kv_heads, intermediate = shape.slice_sizes(tp, tp - 1)
    q, kv = heads * shape.head_dim, kv_heads * shape.head_dim
    mlp: float = shape.mlp_matrices * shape.hidden_size * intermediate
    if sparse := shape.sparse_in(layers := range(shape.num_layers) if layers is None else layers):
        mixture = shape.hidden_size * (shape.num_experts + 3 * shape.experts_per_token * shape.expert_size / tp)
        mlp += sparse / len(layers) * (mixture - mlp)
    weights = 2 * shape.hidden_size * (q + kv) + mlp
    return tokens * (2 * weights + 4 * q * context)


def head_flops(shape: ModelShape, tokens: float, tp: int = 1) -> float:
    """Returns the FLOPs of the logits on the rank with the largest of tp slices, or of a scalar head, which is not
    sliced."""
    return 2 * tokens * shape.hidden_size * (1 if shape.scalar_head else len(split(shape.vocab_size, tp, tp - 1)))


def num_read(shape: ModelShape, shard: Shard, rows: float) -> float:
    """Returns the parameters of a shard that a decode step of some rows reads: all but those of experts that no row
    hits."""
    params = num_params(shape, shard)
    if sparse := shape.sparse_in(shard.layers(shape.num_layers)):
        missed = (shape.num_experts - shape.experts_hit(rows)) / shard.tp
        return params - sparse * missed * 3 * shape.hidden_size * shape.expert_size
    return params


def all_gather_s(link: Link, num_ranks: int, num_bytes: float) -> float:
    """Returns seconds of an all-gather in a ring; num_bytes: of the whole. A reduce-scatter takes as long, an
    all-reduce both."""
    if num_ranks == 1:
        return 0.0
    return (num_ranks - 1) / num_ranks * num_bytes / link.bytes_per_s + (num_ranks - 1) * link.latency_s


# of each row: tokens of the prompt (0: an earlier row has the same), of the response
Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of the parts of calls, in any layout on a cluster."""

    calibration: Calibration
    workload: Workload
    cluster: Cluster
    known: dict[tuple[int, ...], Link] = field(default_factory=dict, repr=False, compare=False)  # of groups

    def device(self, rank: int) -> Device:
        """Returns the constants of a rank's device."""
        return self.calibration.devices[self.cluster.nodes[self.cluster.node_of(rank)].device]

    def link(self, ranks: tuple[int, ...]) -> Link:
        """Returns the link of a collective: inside a node the node's; between nodes those of all its ranks on one node
        at once, since as many rings share the work."""
        first, last = (self.cluster.node_of(edge(ranks)) for edge in (min, max))
        if first == last:
            return self.calibration.inside
        if ranks not in self.known:
            inside, between = self.calibration.inside, self.calibration.between
            fewest = min(Counter(map(self.cluster.node_of, ranks)).values())
            rate = max(between.bytes_per_s, min(inside.bytes_per_s, fewest * between.bytes_per_s))
            self.known[ranks] = Link(rate, between.latency_s)
        return self.known[ranks]

    def table(self, model: str, layout: Layout, rank: int) -> Measured | None:
        """Returns the table of a model's shape; None if it is not measured, its slices are on several nodes, or its
        layers differ."""
        shape = replace(self.workload.shape(model), adapters=None)
        if self.link(layout.tensor_ranks(rank)) is not self.calibration.inside or shape.num_dense_layers:
            return None
        return self.device(rank).table(shape, layout.tp, self.workload.param_bytes)

    def message_s(self, source: int, destination: int, num_bytes: int, num_parts: int = 1) -> float:
        """Returns seconds of a message from rank to rank, in so many parts."""
        same = self.cluster.node_of(source) == self.cluster.node_of(destination)
        link = self.calibration.inside if same else self.calibration.between
        return num_parts * link.latency_s + num_bytes / link.bytes_per_s

    def host_message_s(self, source: int, destination: int, num_bytes: int) -> float:
        """Returns seconds of a message through host memory: a copy to it, the message, and a copy to the other
        device."""
        copies_s = sum(num_bytes / self.device(rank).host_bytes_per_s for rank in (source, destination))
        link = self.calibration.host
        if self.cluster.node_of(source) != self.cluster.node_of(destination):
            between = self.calibration.between
            link = Link(min(link.bytes_per_s, between.bytes_per_s), max(link.latency_s, between.latency_s))
        return copies_s + link.latency_s + num_bytes / link.bytes_per_s

    def load_s(self, model: str, layout: Layout, rank: int) -> float:
        """Returns seconds of loading the weights of a frozen model from host memory."""
        params = num_params(self.workload.shape(model), layout.shard(rank))
        return self.workload.param_bytes * params / self.device(rank).host_bytes_per_s

    def pass_s(
        self,
        call: ModelCall,
        layout: Layout,
        rank: int,
        tokens: float,
        length: float,
        *,
        outputs: float | None = None,
        backward: bool = False,
    ) -> float:
        """Returns seconds of a forward or backward pass of some tokens, in sequences of one length, through a rank's
        stage.

        outputs: tokens that have logits; None: those of responses.
        """
        shape, shard, device = self.workload.shape(call.model), layout.shard(rank), self.device(rank)
        layers, is_last = shard.layers(shape.num_layers), shard.is_last
        num_layers = len(layers)
        adapters_s, of_weights = self.adapters_s(call, layout, rank, tokens), shape.adapters is None
        more = layout.recompute + (call.name in self.workload.counted)  # forward passes without a head
        if (table := self.table(call.model, layout, rank)) is not None:
            forward_s = table.forward.at(num_layers, tokens, length, rest=is_last)
            if not backward:
                return forward_s + adapters_s
            again_s = more * table.forward.at(num_layers, tokens, length, rest=False) if more else 0.0
            backward_s = max(0.0, table.train.at(num_layers, tokens, length, rest=is_last) - forward_s)
            return backward_s / (1 if of_weights else 2) + again_s + (2 + layout.recompute) * adapters_s
        hidden_bytes = tokens * shape.hidden_size * self.workload.param_bytes
        gather_s = all_gather_s(self.link(layout.tensor_ranks(rank)), layout.tp, hidden_bytes)
        flops = layer_flops(shape, tokens, length / 2, layout.tp, layers=layers)
        layer_s = flops / device.matrix_flops + 4 * gather_s + device.layer_s
        if outputs is None:
            outputs = tokens * self.workload.row_lengths[1] / sum(self.workload.row_lengths)
        head_s = head_flops(shape, outputs, layout.tp) / device.matrix_flops if is_last else 0.0
        if backward:
            passes = 1 + of_weights
            layers_s = (passes + more) * num_layers * layer_s
            return layers_s + passes * head_s + (2 + layout.recompute) * adapters_s
        return num_layers * layer_s + head_s + adapters_s

    def adapters_s(self, call: ModelCall, layout: Layout, rank: int, tokens: float) -> float:
        """Returns seconds of the products of some tokens with the adapters on a rank's stage; 0 without adapters, or if
        they are in the weights."""
        shape = self.workload.shape(call.model)
        if shape.adapters is None or self._adds_adapters(call):
            return 0.0
        return 2 * tokens * num_trained(shape, layout.shard(rank)) / self.device(rank).matrix_flops

    def copies_s(self, call: ModelCall, layout: Layout, rank: int) -> float:
        """Returns seconds of adding the adapters to copies of the weights with which a rank generates: reading these,
        their products in float32, and writing the sums."""
        shape, device = self.workload.shape(call.model), self.device(rank)
        num_bytes = copied_bytes(self.workload, call, layout, rank)
        if shape.adapters is None or not num_bytes:
            return 0.0
        numbers = num_bytes / self.workload.param_bytes
        flops_s = 2 * shape.adapters.rank * numbers / device.matrix_flops
        return max(flops_s, (2 * num_bytes + 2 * NUMBER_BYTES * numbers) / device.memory_bytes_per_s)

    def _adds_adapters(self, call: ModelCall) -> bool:
        return self.workload.adds_adapters and isinstance(call, Generate)

    def gather_s(self, call: ModelCall, layout: Layout, rank: int) -> float:
        """Returns seconds in which ZeRO 3 gathers weights for a call; 0 below stage 3."""
        return self.spread_s(call, layout, rank) if layout.zero == 3 else 0.0

    def spread_s(self, call: ModelCall, layout: Layout, rank: int) -> float:
        """Returns the seconds in which a rank gathers its shard of weights that are spread over the dp of a layout: for
        inference each layer by itself, and the weights outside the layers."""
        if layout.dp == 1:
            return 0.0
        shape, link = self.workload.shape(call.model), self.link(layout.data_ranks(rank))
        whole_s = all_gather_s(link, layout.dp, self.workload.param_bytes * num_params(shape, layout.shard(rank)))
        parts = shape.num_layers + 1 if isinstance(call, Infer | Measure) else 1
        return whole_s + (parts - 1) * (layout.dp - 1) * link.latency_s

    def collective_s(self, sent: Collective) -> float:
        """Returns seconds of a collective in rings; in an all-to-all, each rank sends by itself to those of other
        nodes."""
        num_ranks, link = len(sent.ranks), self.link(sent.ranks)
        if sent.kind == "all-to-all" and link is not self.calibration.inside:
            fewest = min(Counter(map(self.cluster.node_of, sent.ranks)).values())
            between_s = all_gather_s(self.calibration.between, num_ranks, sent.num_bytes)
            return between_s * (num_ranks - fewest) / (num_ranks - 1)
        return RINGS[sent.kind] * all_gather_s(link, num_ranks, sent.num_bytes)

    def update_s(self, model: str, layout: Layout, rank: int, num_passes: int) -> float:
        """Returns seconds of the messages of an optimizer step (step_messages.py), and of AdamW, whose states come from
        host memory and go back if they are offloaded."""
        params = num_trained(self.workload.shape(model), layout.shard(rank))
        mine = params / layout.dp if layout.zero else params
        sent = step_messages(self.workload, model, layout, rank, num_passes, self.cluster.node_of)
        sent_s = sum(one.number * self.collective_s(one) for one in sent)
        away = layout.offload * state_bytes(self.workload.param_bytes)
        moved_s = away * mine / self.device(rank).host_bytes_per_s
        if (table := self.table(model, layout, rank)) is not None:
            moments_s = 2 * all_gather_s(self.link(layout.ranks), len(layout.ranks), MOMENTS_BYTES)
            return moments_s + sent_s + max(moved_s, table.update.at(mine))
        return sent_s + max(moved_s, STATE_BYTES * mine / self.device(rank).memory_bytes_per_s)

    def generate_s(
        self, call: ModelCall, layout: Layout, rank: int, rows: Lengths, places: int, parts: int = 1
    ) -> list[float]:
        """Returns when each row ends: first the prompts, then decode steps of at most `places` rows through all stages.
        When a row ends, the next one takes its place, beginning with its prompt. If lengths are forecast to differ, a
        row ends when it and those before it are expected to have ended on the slowest shard; that is exact at the ends
        of as many equal parts."""
        stages, table = layout.stage_ranks(rank), self.table(call.model, layout, rank)
        drawn = int(table is not None and table.prefill is not None)  # tokens of a row that come with its prompt
        if self.workload.forecast_lengths and self.workload.forecast_lengths.differ:
            return self._expected_s(call, layout, rank, rows, places, parts, drawn)
        begun = min(places, len(rows))
        clock_s, done_s = self._start_s(call, layout, rank, rows[:begun]), [0.0] * len(rows)
        for num_steps, active, ended in decode_steps([response - drawn for _, response in rows], places):
            clock_s += num_steps * sum(self.decode_s(call, layout, other, active) for other in stages)
            if table is not None and table.ends is not None:
                clock_s += table.ends.at(min(len(rows), places))
            for row in ended:
                done_s[row] = clock_s
            clock_s += self.prompts_s(call, layout, rank, rows[begun : begun + len(ended)])
            begun += len(ended)
        return done_s

    def _expected_s(
        self, call: ModelCall, layout: Layout, rank: int, rows: Lengths, places: int, parts: int, drawn: int
    ) -> list[float]:
        """Does what generate_s does by the expected decode steps of a distribution of lengths (lengths.py)."""
        from rlhf_spmd.plan.cost.lengths import decode, of_forecast  # late: numpy, which `check` does without

        assert self.workload.forecast_lengths is not None
        responses = of_forecast(self.workload.forecast_lengths, self.workload.max_response, drawn)
        table, begun = self.table(call.model, layout, rank), min(places, len(rows))
        decoding = decode(responses, len(rows), places, layout.dp)
        first_s, later, later_s = self._start_s(call, layout, rank, rows[:begun]), rows[begun:], 0.0
        if fresh := [row for row in later if row[0]]:
            begins = min(decoding.begins, len(fresh))
            few = int(len(fresh) / begins)  # prompts come in groups of so many, or of one more
            more = len(fresh) - few * begins
            for number, size in ((begins - more, few), (more, few + 1)):
                later_s += number * self.prompts_s(call, layout, rank, fresh[:size])
        ends_s = decoding.ends * table.ends.at(begun) if table is not None and table.ends is not None else 0.0
        stages, phases = layout.stage_ranks(rank), []
        for steps, active in decoding.phases:
            phases.append((steps, sum(self.decode_s(call, layout, other, active) for other in stages)))
        done_s, before, before_s = [0.0] * len(rows), 0, 0.0
        for part in range(1, parts + 1):
            stop, end_s = len(rows) * part // parts, first_s
            taken = left = decode(responses, stop, places, layout.dp).steps
            for steps, step_s in phases:
                end_s += min(steps, left) * step_s
                left = max(0.0, left - steps)
            end_s += ends_s * taken / decoding.steps
            if later:
                end_s += later_s * min(1.0, max(0.0, begun * (taken / responses.mean - 1) / len(later)))
            for row in range(before, stop):
                done_s[row] = before_s + (end_s - before_s) * (row + 1 - before) / (stop - before)
            before, before_s = stop, end_s
        return done_s

    def _start_s(self, call: ModelCall, layout: Layout, rank: int, rows: Lengths) -> float:
        """Returns seconds before the first decode step: of copies with adapters, and of the first prompts."""
        copies_s = max(self.copies_s(call, layout, other) for other in layout.stage_ranks(rank))
        return copies_s + self.prompts_s(call, layout, rank, rows)

    def slowest(self, num_rows: int, layout: Layout, num_passes: int) -> float:
        """Returns the seconds of the passes of so many sequences of a shard on the slowest shard over those of mean
        lengths."""
        if not (lengths := self._sequences()):
            return 1.0
        from rlhf_spmd.plan.cost.lengths import slowest  # late: as above

        return slowest(lengths, sum(self.workload.row_lengths), num_rows, layout.dp, num_passes, layout.pp)

    def attended(self) -> float:
        """Returns E[length^2] / E[length]^2 of sequences: attention takes as long as if all were so much longer."""
        lengths = self._sequences()
        return 1.0 + lengths.variance / sum(self.workload.row_lengths) ** 2 if lengths else 1.0

    def _sequences(self) -> "LengthDistribution | None":
        """Returns the forecast lengths of sequences; None if all are equal."""
        if not self.workload.forecast_lengths:
            return None
        from rlhf_spmd.plan.cost.lengths import of_sequences  # late: as above

        return of_sequences(self.workload.forecast_lengths, self.workload.max_response)

    def prompts_s(self, call: ModelCall, layout: Layout, rank: int, rows: Lengths) -> float:
        """Returns seconds of the prompts of some rows through all stages. One of 0 tokens is in the cache already."""
        if not (fresh := [prompt for prompt, _ in rows if prompt]):
            return 0.0
        number, tokens = layout.pp if self.calibration.pipelined_prefill else 1, sum(fresh)
        passes_s = [
            self.prefill_s(call, layout, other, tokens / number, tokens / len(fresh), len(rows) / number)
            for other in layout.stage_ranks(rank)
        ]
        return sum(passes_s) + (number - 1) * max(passes_s)

    def prefill_s(
        self, call: ModelCall, layout: Layout, rank: int, tokens: float, length: float, num_rows: float
    ) -> float:
        """Returns seconds of prompts of one length through one stage, after which so many rows have a token."""
        table = self.table(call.model, layout, rank)
        if table is None or table.prefill is None:
            return self.pass_s(call, layout, rank, tokens, length, outputs=num_rows)
        shard = layout.shard(rank)
        num_layers = len(shard.layers(self.workload.shape(call.model).num_layers))
        shared_s = 0.0  # of the rows without a prompt of their own
        if shard.is_last and table.decode is not None:
            shared_s = table.decode.rest.at(num_rows) - table.decode.rest.at(tokens / length)
        return table.prefill.at(num_layers, tokens, length, rest=shard.is_last) + max(0.0, shared_s)

    def _middle(self) -> float:
        """Returns the expected tokens of a response before the decoded token."""
        if not self.workload.forecast_lengths:
            return self.workload.max_response / 2
        from rlhf_spmd.plan.cost.lengths import of_forecast  # late: as above

        return of_forecast(self.workload.forecast_lengths, self.workload.max_response).middle

    def decode_s(self, call: ModelCall, layout: Layout, rank: int, places: float) -> float:
        """Returns seconds of a token for each of so many rows through one stage, halfway through their responses."""
        workload, device, shard = self.workload, self.device(rank), layout.shard(rank)
        shape = workload.shape(call.model)
        layers = shard.layers(shape.num_layers)
        num_layers = len(layers)
        table = self.table(call.model, layout, rank)
        adapters_s = 0.0
        if shape.adapters is not None and not self._adds_adapters(call):
            read = NUMBER_BYTES * num_trained(shape, shard) / device.memory_bytes_per_s
            adapters_s = max(read, self.adapters_s(call, layout, rank, places))
        if table is not None and table.decode is not None:
            return table.decode.at(num_layers, places, rest=shard.is_last) + adapters_s
        context = workload.row_lengths[0] + self._middle()
        cached = (
            places
            * context
            / (workload.max_prompt + workload.max_response)
            * sequence_bytes(workload, call, layout, rank)
        )
        read_s = (workload.param_bytes * num_read(shape, shard, places) + cached) / device.memory_bytes_per_s
        head = head_flops(shape, places, layout.tp) if shard.is_last else 0.0
        flops = num_layers * layer_flops(shape, places, context, layout.tp, layers=layers) + head
        per_layer = 2 + 2 * shape.qk_norm_of_all  # after attention and after the MLP (Megatron), and of norms
        num_reduces = per_layer * num_layers if layout.tp > 1 else 0
        link, hidden_bytes = self.link(layout.tensor_ranks(rank)), places * shape.hidden_size * workload.param_bytes
        reduce_s = num_reduces * 2 * all_gather_s(link, layout.tp, hidden_bytes)
        busy_s = max(read_s, flops / device.matrix_flops) + adapters_s + reduce_s
        return device.decode_step_s(busy_s, num_layers, num_reduces)


def decode_steps(responses: Sequence[int], places: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yields consecutive steps with the same rows: number of steps, number of rows, and the rows that then end. The
    rows start in order, at most `places` at a time."""
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

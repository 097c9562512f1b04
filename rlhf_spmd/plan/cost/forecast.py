"""Forecasts a program: the seconds of its instructions on a calibrated machine, combined by simulate.py."""

import math
from dataclasses import dataclass, field, replace

from rlhf_spmd.plan.calls import Compute, Generate, ModelCall, Train, is_gate
from rlhf_spmd.plan.cost.answers import generate_s
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.memory import places_of
from rlhf_spmd.plan.cost.partial import drawing, parts_of
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.cost.simulate import Forecast, Times, simulate
from rlhf_spmd.plan.layout import Layout, cut
from rlhf_spmd.plan.placement import weights_layout
from rlhf_spmd.plan.program.instructions import Load, Message, Program, Run
from rlhf_spmd.plan.program.pipeline import usual_number

Key = tuple[object, ...]


def forecast(program: Program, calibration: Calibration) -> Forecast:
    """Returns seconds of one iteration of a program for which `check` finds no error; in a chain, of one that is not
    drained for an evaluation or a checkpoint. Raises UserError if the calibration lacks a type of device."""
    return simulate(program, times_of(program, calibration))


def times_of(program: Program, calibration: Calibration) -> Times:
    """Returns the Times of a program for simulate(). Raises UserError as forecast() does."""
    for device in program.cluster.device_types:
        calibration.require(device)
    costs = _Costs(program, Cost(calibration, program.workload, program.cluster))
    return Times(costs.run_s, costs.message_s, costs.load_s, costs.num_workers, costs.alike)


@dataclass(slots=True)
class _Costs:
    """Seconds of instructions, computed once for all ranks on which they are equal."""

    program: Program
    cost: Cost
    known: dict[Key, float] = field(default_factory=dict)
    sites: dict[tuple[str, int], Key] = field(default_factory=dict)  # (call, rank) -> stage, device and links
    decoded: dict[str, dict[int, int]] = field(default_factory=dict)  # by generate call and rank: rows at once
    done_s: dict[Key, list[float]] = field(default_factory=dict)  # when the rows that a rank generates end

    def num_workers(self, node: int) -> float | None:
        return self.cost.calibration.devices[self.program.cluster.nodes[node].device].num_workers

    def message_s(self, message: Message) -> float:
        if message.through_host:
            return self.cost.host_message_s(message.source, message.destination, message.num_bytes)
        return self.cost.message_s(message.source, message.destination, message.num_bytes, message.num_parts)

    def load_s(self, rank: int, instruction: Load) -> float:
        calls = [call for call in self.program.workload.workflow.placed_calls if call.model == instruction.model]
        layouts = (self.program.placement.layouts[call.name] for call in calls)
        mine = next(layout for layout in layouts if layout.offload and rank in layout.ranks)
        return self.cost.load_s(instruction.model, mine, rank)

    def run_s(self, rank: int, run: Run) -> float:
        """Returns seconds of a Run on a rank, its collectives included."""
        workload = self.program.workload
        call, layout = workload.workflow.call(run.call), self.program.layout_of(run)
        if isinstance(call, Compute) or workload.models[call.model] is None or run.phase == "begin":
            return 0.0
        key = self.alike(rank, run)
        if key not in self.known:
            self.known[key] = self._run_s(call, layout, rank, run)
        return self.known[key]

    def alike(self, rank: int, run: Run) -> Key:
        """Returns a key, equal for Runs that take equally long."""
        layout = self.program.layout_of(run)
        site = (run.consumer or run.call, rank)
        if site not in self.sites:
            groups = layout.tensor_ranks(rank), layout.data_ranks(rank)
            device = self.program.cluster.nodes[self.program.cluster.node_of(rank)].device
            self.sites[site] = layout.coordinates(rank)[1], device, *map(self.cost.link, groups)
        columns = self.program.columns_of(run, rank)
        alone = self.program.workload.workflow.call(run.call).kind == "generate"  # no two mini-batches are alike
        number = run.mini_batch if alone else run.mini_batch is None
        places = self.decoded_of(run.call)[rank] if alone else 0
        different = self.program.workload.num_distinct_prompts(columns) if alone else 0
        return run.call, run.phase, number, len(columns), self.sites[site], places, different, run.round

    def _run_s(self, call: ModelCall, layout: Layout, rank: int, run: Run) -> float:
        cost = self.cost
        if isinstance(call, Generate):
            return self._gather_s(call, rank) + self._generate_s(call, rank, run)
        if run.phase == "update":
            return cost.update_s(call.model, layout, rank, usual_number(self.program, run))
        passes = self._passes(rank, run, layout)
        if run.phase:  # one micro-batch of a pipeline
            number = usual_number(self.program, run)
            tokens, length = (sum(kind) / len(passes) for kind in zip(*passes, strict=True)) if passes else (0, 0)
            tokens *= len(passes) / number
            return cost.pass_s(call, layout, rank, tokens, length, backward=run.phase == "backward")
        forward_s = sum(cost.pass_s(call, layout, rank, *one) for one in passes)
        if not isinstance(call, Train):
            return self._gather_s(call, rank) + forward_s
        backward_s = sum(cost.pass_s(call, layout, rank, *one, backward=True) for one in passes)
        number = len(self._passes(layout.ranks[-1], run, layout))  # that shard has as many rows as any
        return forward_s + backward_s + cost.update_s(call.model, layout, rank, number)

    def decoded_of(self, name: str) -> dict[int, int]:
        """Returns how many sequences each rank of a generate call decodes at once."""
        if name not in self.decoded:
            call = self.program.workload.workflow.call(name)
            assert isinstance(call, Generate)
            self.decoded[name] = places_of(self.program, call)
        return self.decoded[name]

    def _gather_s(self, call: ModelCall, rank: int) -> float:
        """Returns seconds to gather the weights that a call runs with, where ZeRO 3 spreads them."""
        layout = weights_layout(call, rank, self.program.workload, self.program.placement)
        return self.cost.gather_s(call, layout, rank)

    def _passes(self, rank: int, run: Run, layout: Layout) -> list[tuple[float, float]]:
        """Returns tokens of every micro-batch, and the length of its sequences for attention. If lengths are spread: of
        the slowest shard."""
        workload, attended = self.program.workload, self.cost.attended()
        num = workload.workflow.placed_call(run.call).num_sequences
        length = sum(workload.row_lengths)
        if layout.tokens is not None and attended > 1.0:  # rows that no longer fit a micro-batch are long ones
            wasted = (attended - 1.0) * length / 2
            layout = replace(layout, tokens=max(1, round(layout.tokens - wasted)))
        num_batches = len(self.program.mini_batches_of(run))
        rows = self._share(run) * len(self.program.columns_of(run, rank))
        num_rows = math.ceil(rows)
        parts = cut([num * length] * num_rows, layout, layout.micro_batch or workload.micro_batch) * num_batches
        slowest = self.cost.slowest(num * num_rows * num_batches, layout, len(parts)) * (rows / max(num_rows, 1))
        passes = []
        for size in [part.stop - part.start for part in parts]:
            tokens = size * num * length
            passes.append((slowest * tokens, attended * tokens / size / num))
        return passes

    def _share(self, run: Run) -> float:
        """Returns the share of its rows that a Run is forecast to compute: in later rounds that of groups that fail,
        and of responses that take several iterations that of those that it draws, or that have ended."""
        workload = self.program.workload
        share: float = workload.failed_groups**run.round
        if workload.partial_steps and not is_gate(call := workload.workflow.call(run.call)):
            parts = parts_of(workload)
            share = parts.drawn if isinstance(call, Generate) else parts.ended
        return share

    def _generate_s(self, call: ModelCall, rank: int, run: Run) -> float:
        """Returns the seconds of generation. While streaming, the rows of all mini-batches are one queue, and each Run
        waits for its part."""
        workload, layout = self.program.workload, self.program.layout_of(run)
        columns = self.program.columns_of(run, rank)
        rows = workload.generated_rows(columns)
        rows = rows[: math.ceil(self._share(run) * len(rows))]
        if not rows:
            return 0.0
        places = self.decoded_of(call.name)[rank]
        if run.mini_batch is not None:
            places = min(places, self.program.placement.decode_mini_batches * len(columns))
        key = (run.call, rank, columns, run.round)
        if key not in self.done_s:
            cost = self.cost
            if workload.partial_steps:
                cost, carried = replace(cost, workload=drawing(workload)), round(parts_of(workload).carried)
                rows = [(prompt + carried, cost.workload.row_lengths[1]) for prompt, _ in rows]
            parts = 1 if run.mini_batch is None else workload.num_mini_batches
            self.done_s[key] = generate_s(cost, call, layout, rank, rows, places, parts)
        done_s = self.done_s[key]
        if run.mini_batch is None:
            return max(done_s)
        first = run.mini_batch * len(columns)
        return max(done_s[: first + len(columns)]) - max(done_s[:first], default=0.0)

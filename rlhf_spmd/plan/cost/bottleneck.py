"""The bottleneck of each call: the resource that would save most of its time if it were infinitely fast.

The time of a call is computed once for each resource of the calibration, with this resource infinitely fast, as in a
roofline (Williams et al., CACM 52(4), 2009). Instructions are costed one by one, and nothing is simulated again. Tables
of measured shapes are not used, because they do not separate resources.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from rlhf_spmd.plan.cost.calibration import Calibration, Device, Link
from rlhf_spmd.plan.cost.forecast import times_of
from rlhf_spmd.plan.cost.simulate import Times
from rlhf_spmd.plan.program.instructions import Load, Program, Run
from rlhf_spmd.plan.program.pipeline import expand, usual_number

NOTHING = "waiting"  # for a call that no resource would make faster: it only waits for others


def limits(program: Program, calibration: Calibration) -> dict[str, str]:
    """Returns, by call of the workflow, what limits it: "products", "memory", "kernel starts", "messages" (inside the
    call), "host memory", or "waiting", on the rank on which the call computes longest. Raises UserError as forecast()
    does."""
    program = expand(program, lambda run: usual_number(program, run))
    calibration = _of_devices(calibration, lambda device: replace(device, measured=()))
    usual = times_of(program, calibration)
    endless = {resource: times_of(program, changed) for resource, changed in _endless(calibration).items()}
    bottlenecks = {}
    for name, ranks in _instructions(program).items():
        rank, instructions = max(ranks.items(), key=lambda item: _seconds(usual, *item))
        left_s = {resource: _seconds(times, rank, instructions) for resource, times in endless.items()}
        best = min(left_s, key=lambda resource: left_s[resource])
        bottlenecks[name] = best if left_s[best] < _seconds(usual, rank, instructions) else NOTHING
    return bottlenecks


def _seconds(times: Times, rank: int, instructions: list[Run | Load]) -> float:
    """Returns the seconds of some instructions of a rank, without waiting."""
    runs = [times.run_s(rank, step) for step in instructions if isinstance(step, Run)]
    return sum(runs) + sum(times.load_s(rank, step) for step in instructions if isinstance(step, Load))


def _instructions(program: Program) -> dict[str, dict[int, list[Run | Load]]]:
    """Returns the Runs of each rank for each call, and the Loads of its model."""
    workflow = program.workload.workflow
    instructions_of: dict[str, dict[int, list[Run | Load]]] = {call.name: {} for call in workflow.calls}
    users = {call.model: call.name for call in workflow.placed_calls}  # a frozen model has one call
    for rank, instructions in enumerate(program.instructions):
        for instruction in instructions:
            if isinstance(instruction, Run | Load):
                name = instruction.call if isinstance(instruction, Run) else users[instruction.model]
                instructions_of[name].setdefault(rank, []).append(instruction)
    return instructions_of


def _of_devices(calibration: Calibration, change: Callable[[Device], Device]) -> Calibration:
    """Returns the calibration with every type of device changed alike."""
    return replace(calibration, devices={kind: change(one) for kind, one in calibration.devices.items()})


def _without_starts(device: Device) -> Device:
    graph_layer_s = None if device.graph_layer_s is None else 0.0
    return replace(device, layer_s=0.0, decode_layer_s=0.0, decode_reduce_s=0.0, graph_layer_s=graph_layer_s)


def _endless(calibration: Calibration) -> dict[str, Calibration]:
    """Returns calibrations in which one resource takes no time."""
    return {
        "products": _of_devices(calibration, lambda one: replace(one, matrix_flops=inf)),
        "memory": _of_devices(calibration, lambda one: replace(one, memory_bytes_per_s=inf)),
        "kernel starts": _of_devices(calibration, _without_starts),
        "messages": replace(calibration, inside=Link(inf, 0.0), between=Link(inf, 0.0)),
        "host memory": _of_devices(calibration, lambda one: replace(one, host_bytes_per_s=inf)),
    }

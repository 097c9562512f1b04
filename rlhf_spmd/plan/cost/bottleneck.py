"""The bottleneck of each call: the resource that would save most of its time if it were infinitely fast.

A call's own seconds are computed again with each resource of the calibration infinitely fast in turn, as in a roofline
(Williams et al., CACM 52(4), 2009). Instructions are costed one by one, and nothing is simulated again. Tables of
measured shapes are not used, because they do not separate resources.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from rlhf_spmd.plan.cost.calibration import Calibration, Device, Link
from rlhf_spmd.plan.cost.forecast import times_of
from rlhf_spmd.plan.program.instructions import Load, Program, Run
from rlhf_spmd.plan.program.pipeline import expand, usual_number

NOTHING = "waiting"  # for a call that no resource would make faster: it only waits for others


def limits(program: Program, calibration: Calibration) -> dict[str, str]:
    """Returns, by call of the workflow, what limits it: "products", "memory", "kernel starts", "messages" (inside the
    call), "host memory", or "waiting", on the rank on which the call computes longest. Raises UserError as forecast()
    does."""
    program = expand(program, lambda run: usual_number(program, run))
    instructions = _instructions(program)
    calibration = _of_devices(calibration, lambda one: replace(one, measured=()))
    usual = _seconds_of(program, calibration)
    busiest: dict[str, int] = {}
    for name, ranks in instructions.items():
        whole = {rank: usual(rank, mine) for rank, mine in ranks.items()}
        busiest[name] = max(whole, key=whole.__getitem__)
    least = {what: _seconds_of(program, changed) for what, changed in _endless(calibration).items()}
    bottlenecks = {}
    for call in program.workload.workflow.calls:
        rank = busiest[call.name]
        mine = instructions[call.name][rank]
        whole_s = usual(rank, mine)
        saved_s = {what: whole_s - seconds(rank, mine) for what, seconds in least.items()}
        best = max(saved_s, key=saved_s.__getitem__)
        bottlenecks[call.name] = best if saved_s[best] > 0 else NOTHING
    return bottlenecks


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


def _seconds_of(program: Program, calibration: Calibration) -> Callable[[int, list[Run | Load]], float]:
    """Returns a function from a rank and some of its instructions to their seconds, without waiting."""
    times = times_of(program, calibration)

    def seconds(rank: int, instructions: list[Run | Load]) -> float:
        return sum(
            times.run_s(rank, instruction) if isinstance(instruction, Run) else times.load_s(rank, instruction)
            for instruction in instructions
        )

    return seconds


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

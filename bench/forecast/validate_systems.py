"""Published RLHF systems as placements of this project, for bench/forecast/validate.py: who runs what where, and what
differs.

What they run is documented: in the launch scripts with which the authors of ReaL measured the others (repositories
garrett4wade/DeepSpeedExamples and garrett4wade/OpenRLHF: sosp_benchmark.py, slurm_launch.py, slurm_ray_launch.py), in
the code of the systems that these start, and in ReaLHF's issue 10. Where the scripts tried several configurations and
kept the fastest, so do we. No number here is fitted by regression, but USABLE, HOST_ADAM and EAGER_LAYER_S were chosen
with the published rows in sight (bench/data/README.md says how much hangs on them).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import Generate, Train
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast, times_of
from rlhf_spmd.plan.cost.memory import call_bytes, num_params, peak_bytes, static_bytes, working_bytes
from rlhf_spmd.plan.cost.seconds import STATE_BYTES, Cost, all_gather_s
from rlhf_spmd.plan.cost.simulate import Forecast, simulate
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.program.pipeline import usual_number
from rlhf_spmd.plan.workload import Workload

# Of a device's memory; the rest is for CUDA, NCCL, DeepSpeed's buckets, fragments. From 0.70 to 0.85 nothing changes.
USABLE = 0.8
# Weights per second and rank of DeepSpeed's Adam in host memory: 72.7e9 weights on 32 A100 in about 10 s (DeepSpeed's
# issue 6834: four nodes, taken as 8 devices each). Good to a factor of two: threads and processors differ.
HOST_ADAM = 0.23e9
# Seconds in which `generate` of transformers starts a layer of a decode step: about 26 tokens a second of 7 billion
# weights, as users report of an A100. DeepSpeed-Chat's hybrid engine is taken to be no faster.
EAGER_LAYER_S = 1.2e-3
MODELS = ("actor", "critic", "reference", "reward")
# OpenRLHF's GPUs of actor, critic, reference, reward and vLLM; in the second table actor and critic share theirs
SPLITS = {8: (4, 2, 1, 1, 0), 16: (8, 4, 2, 2, 0), 32: (16, 4, 4, 2, 6), 64: (32, 8, 8, 4, 12)}
SHARED = {8: (4, 0, 1, 1, 2), 16: (8, 0, 2, 2, 4), 32: (16, 0, 4, 8, 4), 64: (48, 0, 4, 8, 4)}


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration of a system.

    num_gathers: how often DeepSpeed's ZeRO 3 gathers a weight for a micro-batch of training; None: not DeepSpeed.
    host_adam: the optimizer's states lie in host memory, where the host makes the step.
    decode_layer_s, graphs: how a decode step is started, unless as the calibration says: by the host, in so many
        seconds a layer, or as a CUDA graph, which takes none.
    """

    name: str
    placement: Placement
    num_gathers: int | None = None
    host_adam: bool = False
    decode_layer_s: float | None = None
    graphs: bool = False


def real_heuristic(workload: Workload, cluster: Cluster) -> Iterator[Plan]:
    """Yields configurations with every call on all devices: tp 8, pp = nodes; twice as many micro-batches as stages in
    training."""
    pp = len(cluster.nodes)
    number = 2 * pp if pp > 1 else 1
    grid = Layout.grid_of(cluster.ranks, pp=pp, tp=8)
    train = replace(grid, micro_batch=workload.mini_batch // number, recompute=True)
    infer = replace(grid, micro_batch=min(workload.num_sequences // pp, workload.mini_batch))
    layouts = {}
    for call in workload.workflow.placed_calls:
        layouts[call.name] = train if isinstance(call, Train) else infer
        if call.model in ("reference", "reward"):
            layouts[call.name] = replace(infer, offload=True)
    yield Plan(f"pp {pp}, tp 8", Placement(layouts))


def deepspeed_chat(workload: Workload, cluster: Cluster) -> Iterator[Plan]:
    """Yields configurations with every call on all devices, data-parallel, all rows of a device in one pass (a
    mini-batch in training).

    ZeRO 3, generation with tp 1, 2, 4 or 8 (hybrid engine: gathered once); or ZeRO 2, where reference and reward are
    whole on every device and generation has tp 1. Its configuration keeps 3e7 gathered weights alive, less than a
    layer, so that recomputation and backward pass gather apart.
    """
    train, infer = _data_parallel(cluster.ranks, workload)
    for zero, tp in ((2, 1), (3, 1), (3, 2), (3, 4), (3, 8)):
        layouts = {}
        for call in workload.workflow.placed_calls:
            frozen = workload.workflow.train_call(call.model) is None
            layouts[call.name] = replace(infer, zero=0 if frozen and zero == 2 else zero)
            if isinstance(call, Train):
                layouts[call.name] = replace(train, zero=zero)
            elif isinstance(call, Generate) and tp > 1:
                layouts[call.name] = Layout.grid_of(cluster.ranks, tp=tp)
        yield Plan(f"ZeRO {zero}, generation tp {tp}", Placement(layouts), num_gathers=3, decode_layer_s=EAGER_LAYER_S)


def openrlhf(workload: Workload, cluster: Cluster) -> Iterator[Plan]:
    """Yields configurations with each model on devices of its own, data-parallel like deepspeed_chat; ZeRO 2 up to 13
    billion weights, else 3.

    Generation by vLLM (tp 2, and 4 for 70 billion weights) on devices of its own, or by the actor where it has none.
    Adam on the devices, or in host memory where that does not fit.
    """
    where, engines = _split(workload, cluster)
    largest = max(workload.models[model].num_params for model in MODELS)
    zero = 2 if largest < 20e9 else 3
    tp = 4 if workload.models["actor"].num_params > 50e9 else 2
    layouts = {}
    for call in workload.workflow.placed_calls:
        train, infer = _data_parallel(where[call.model], workload)
        frozen = workload.workflow.train_call(call.model) is None
        layouts[call.name] = replace(infer, zero=0 if frozen and zero == 2 else zero)
        if isinstance(call, Train):
            layouts[call.name] = replace(train, zero=zero)
        elif isinstance(call, Generate) and engines:
            layouts[call.name] = Layout.grid_of(engines, tp=tp)
    for host in (False, True):
        name = f"ZeRO {zero}{', Adam in host memory' if host else ''}{f', vLLM tp {tp}' if engines else ''}"
        decode = {"graphs": True} if engines else {"decode_layer_s": EAGER_LAYER_S}
        yield Plan(name, Placement(layouts), num_gathers=2, host_adam=host, **decode)


def _data_parallel(ranks: tuple[int, ...], workload: Workload) -> tuple[Layout, Layout]:
    """Returns the layouts of training and of the rest: one pass for all rows that a rank has in a mini-batch, or at
    all."""
    layout = Layout.data_parallel(ranks)
    train = replace(layout, micro_batch=-(-workload.mini_batch // len(ranks)), recompute=True)
    return train, replace(layout, micro_batch=-(-workload.num_sequences // len(ranks)))


def _split(workload: Workload, cluster: Cluster) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """Returns OpenRLHF's ranks of each model, and of vLLM. Of more devices than documented, the same shares."""
    size = cluster.num_devices
    table = SHARED if workload.models["critic"].num_params > 10e9 else SPLITS
    known = max(number for number in table if size % number == 0)
    parts, start = [], 0
    for number in table[known]:
        parts.append(cluster.ranks[start : start + number * (size // known)])
        start += len(parts[-1])
    return dict(zip(MODELS, (parts[0], parts[1] or parts[0], *parts[2:4]), strict=True)), parts[4]


def queue_of_engine(workload: Workload, cluster: Cluster) -> Workload:
    """Returns the queue of OpenRLHF's vLLM engines, which get the prompts of one actor rank in one request, and
    requests one after another."""
    where, engines = _split(workload, cluster)
    return replace(workload, max_sequences=-(-workload.num_sequences // len(where["actor"]))) if engines else workload


@dataclass(frozen=True, slots=True)
class System:
    """plans: its configurations. recomputes: whether the actor computes the logprobs of responses in a call of its own.
    sized: sizes of its batches that differ from the workload's."""

    plans: Callable[[Workload, Cluster], Iterator[Plan]]
    recomputes: bool = True
    sized: Callable[[Workload, Cluster], Workload] = lambda workload, cluster: workload


SYSTEMS = {
    "ReaL-Heuristic": System(real_heuristic, recomputes=False),
    "DeepSpeedChat": System(deepspeed_chat),
    "OpenRLHF": System(openrlhf, sized=queue_of_engine),
}


def fastest(name: str, workload: Workload, cluster: Cluster, calibration: Calibration) -> tuple[Forecast, str]:
    """Returns one iteration of a system (its devices: a multiple of 8) and its configuration: the fastest of those that
    fit, or the only one that there is. Raises UserError if none fits."""
    system, found = SYSTEMS[name], []
    workload = system.sized(workload, cluster)
    plans = list(system.plans(workload, cluster))
    for plan in plans:
        program = compile_program(workload, plan.placement, cluster)
        if len(plans) == 1 or fits(program, plan):
            found.append((simulated(program, plan, calibration), plan.name))
    if not found:
        raise UserError(f"no configuration of {name} fits into {cluster.num_devices} devices; give the row more")
    return min(found, key=lambda one: one[0].makespan_s)


def fits(program: Program, plan: Plan) -> bool:
    """Returns whether the ranks that train have room. DeepSpeed gathers layer by layer, so gathered weights do not
    count. These systems keep the gradients of all models between steps."""
    for rank in program.cluster.ranks:
        if not program.trained(rank):
            continue
        calls = program.workload.workflow.train_calls
        kept = sum(call_bytes(program, call, rank).get("gradients", 0) for call in calls)
        static, working = static_bytes(program, rank), working_bytes(program, rank) | {"gathered": 0, "gradients": 0}
        static |= {"optimizer": 0} if plan.host_adam else {"kept gradients": static["kept gradients"] + kept}
        if peak_bytes(static, working) > USABLE * program.cluster.device_bytes(rank):
            return False
    return True


More = Callable[[Cost, int, Run], float]  # of a rank's step: seconds that it takes more


def simulated(
    program: Program, plan: Plan, calibration: Calibration, more_s: More = lambda cost, rank, step: 0.0
) -> Forecast:
    """Forecasts a program, with what the system does in another way than ours.

    more_s: of DeepSpeed, beside that.
    """
    started = {"graph_layer_s": 0.0} if plan.graphs else {}
    if plan.decode_layer_s is not None:
        started = {"decode_layer_s": plan.decode_layer_s}
    devices = {name: replace(device, **started) for name, device in calibration.devices.items()}
    calibration = replace(calibration, devices=devices)
    if plan.num_gathers is None:
        return forecast(program, calibration)
    times, cost = times_of(program, calibration), Cost(calibration, program.workload, program.cluster)

    def run_s(rank: int, step: Run) -> float:
        return times.run_s(rank, step) + _deepspeed_s(program, plan, cost, rank, step) + more_s(cost, rank, step)

    return simulate(program, replace(times, run_s=run_s))


def _deepspeed_s(program: Program, plan: Plan, cost: Cost, rank: int, step: Run) -> float:
    """Returns the seconds that a step of theirs takes more than one of ours (less, if negative).

    Gradients are reduced in the weights' precision, not in float32, and scattered, not summed everywhere, in each
    micro-batch; ZeRO 2 then gathers the weights. The optimizer's step may be on the host.
    """
    call, layout = program.workload.workflow.call(step.call), program.layout_of(step)
    if not isinstance(call, Train):
        return 0.0
    params = num_params(program.workload.models[call.model], layout.shard(rank))
    whole_s = all_gather_s(cost.link(layout.data_ranks(rank)), layout.dp, program.workload.param_bytes * params)
    part, device = params / layout.dp, cost.device(rank)
    adam_s = part / HOST_ADAM if plan.host_adam else STATE_BYTES * part / device.memory_bytes_per_s
    number = usual_number(program, step)
    passes_s = number * (whole_s + plan.num_gathers * cost.gather_s(call, layout, rank))
    gathered_s = 0.0 if layout.zero == 3 else whole_s
    return passes_s + gathered_s + adam_s - cost.update_s(call.model, layout, rank, number)

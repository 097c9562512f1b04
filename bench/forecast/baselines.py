"""Two systems that others measured against, for any models and layout: what one iteration would take them.

DEEPSPEED_CHAT is DeepSpeed-Chat as in its release (repository DeepSpeedExamples, step 3): data-parallel with ZeRO 2 or
3, a pass of its own for old logprobs, weights gathered layer by layer in each pass, and a hybrid engine that gathers
them once for all tokens of a batch, with tp 1, 2, 4 or 8. PER_TOKEN is ZeRO 3 without that engine: `generate` of
transformers gathers all weights for each token.

Both generate and train the most rows at once that fit (powers of two, unless it is all of them), as DeepSpeed-Chat's
page on its benchmark says of itself. They have the same batches as our strategies, full training and Adam on the
devices; the fastest configuration that fits counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from bench.forecast.validate_systems import USABLE, Plan, deepspeed_chat, simulated
from bench.rows import PER_TOKEN
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import load_algorithm
from rlhf_spmd.plan.calls import Compute, Generate, Train
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.memory import activation_bytes, num_params, sequence_bytes, static_bytes, zero_bytes
from rlhf_spmd.plan.cost.seconds import Cost
from rlhf_spmd.plan.cost.simulate import Forecast
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.workload import Workload

LOGITS_BYTES = 8  # of a token and an entry of the vocabulary: logits, log-softmax, and both gradients, in 16 bits


@dataclass(frozen=True, slots=True)
class Setup:
    """A configuration that fits, the rows that a device generates and trains at once, and its bytes at the peak."""

    plan: Plan
    workload: Workload
    generated: int
    trained: int
    peak_bytes: int
    per_token: bool

    @property
    def name(self) -> str:
        return f"{self.plan.name}, {self.generated} rows generated and {self.trained} trained at once"


def recomputing(workload: Workload) -> Workload:
    """Returns the PPO workload with a pass of the actor for old logprobs."""
    ppo = load_algorithm("ppo")
    return replace(workload, workflow=ppo.workflow(ppo.options(epochs=workload.epochs, old_logprobs="recompute")))


def fastest_baseline(
    name: str, workload: Workload, cluster: Cluster, calibration: Calibration
) -> tuple[Forecast, Setup]:
    """Forecasts an iteration of a baseline in its fastest configuration. Raises UserError if none fits."""
    tried = setups(name, recomputing(workload), cluster)
    found = [(baseline_forecast(setup, cluster, calibration), setup) for setup in tried]
    if not found:
        raise UserError(f"no configuration of {name} fits into {cluster.num_devices} devices")
    return min(found, key=lambda one: one[0].makespan_s)


def setups(name: str, workload: Workload, cluster: Cluster) -> Iterator[Setup]:
    """Yields the configurations of a baseline that fit."""
    per_token = name == PER_TOKEN
    generate = workload.workflow.generate_calls[0].name
    for plan in deepspeed_chat(workload, cluster):
        layouts, train = plan.placement.layouts, plan.placement.layouts["actor_train"]
        tp = layouts[generate].tp
        if per_token and (train.zero < 3 or tp > 1):
            continue
        alone = Placement({**layouts, generate: replace(train, recompute=False)})  # so tp ranks hold no copy
        program = Program(workload, alone, cluster, {}, (), ((),) * cluster.num_devices)
        generated, trained, peak = rows_at_once(program, tp, per_token=per_token)
        if not (generated and trained):
            continue
        sized = {
            call.name: layouts[call.name]
            if isinstance(call, Generate)
            else replace(layouts[call.name], micro_batch=trained if isinstance(call, Train) else generated)
            for call in workload.workflow.placed_calls
        }
        batched = replace(workload, max_sequences=generated * tp)
        placed = replace(plan, placement=Placement(sized))
        yield Setup(placed, batched, generated, trained, peak, per_token)


def rows_at_once(program: Program, tp: int, *, per_token: bool) -> tuple[int, int, int]:
    """Returns the most rows that a device can generate and train at once, and the bytes that it then needs. Generation
    has the layout of training, so that no copy is held; `tp` is that of gathered weights."""
    workload, cluster = program.workload, program.cluster
    limit = min(cluster.device_bytes(rank) for rank in cluster.ranks) * USABLE
    held = sum(static_bytes(program, 0).values())
    all_rows, step_rows = (-(-rows // cluster.num_devices) for rows in (workload.num_sequences, workload.mini_batch))

    def generates(rows: int) -> int:
        return held + generation_bytes(program, tp, rows, per_token=per_token)

    def trains(rows: int) -> int:
        return held + training_bytes(program, rows)

    generated = largest(all_rows, lambda rows: generates(rows) <= limit)
    trained = largest(step_rows, lambda rows: trains(rows) <= limit)
    return generated, trained, max(generates(generated), trains(trained))


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Returns the most rows that fit: all of them, else a power of two; 0 if not even one fits."""
    powers = (2**power for power in reversed(range(limit.bit_length())))
    return next((rows for rows in (limit, *powers) if fits(rows)), 0)


# ---- bytes of a rank ------------------------------------------------------------------------------------------------


def generation_bytes(program: Program, tp: int, rows: int, *, per_token: bool) -> int:
    """Counts the bytes of the rows' cache and of gathered weights: all / tp or, for each token, one layer."""
    workload, (call, *_) = program.workload, program.workload.workflow.generate_calls
    layout, shape = program.placement.layouts[call.name], workload.models[call.model]
    weights = workload.param_bytes * shape.num_params
    gathered = 0 if layout.zero < 3 else weights // shape.num_layers if per_token else weights // tp
    return gathered + rows * sequence_bytes(workload, call, layout, layout.ranks[0])


def training_bytes(program: Program, rows: int) -> int:
    """Counts the bytes of the rows' activations, of the inputs of layers, of all logits and of gradients."""
    workload, most = program.workload, 0
    for call in workload.workflow.placed_calls:
        if not isinstance(call, Train):
            continue
        layout = replace(program.placement.layouts[call.name], micro_batch=rows)
        shape, rank = workload.models[call.model], layout.ranks[0]
        params = num_params(shape, layout.shard(rank))
        gradients = zero_bytes(layout, params, 0, workload.param_bytes, trains=True)["gradients"]
        tokens = rows * (workload.max_prompt + workload.max_response)
        logits = 0 if shape.scalar_head else LOGITS_BYTES * tokens * shape.vocab_size
        most = max(most, activation_bytes(workload, call, layout, rank) + logits + gradients)
    return most


# ---- seconds --------------------------------------------------------------------------------------------------------


def baseline_forecast(setup: Setup, cluster: Cluster, calibration: Calibration) -> Forecast:
    """Forecasts an iteration of a configuration."""
    program = compile_program(setup.workload, setup.plan.placement, cluster)

    return simulated(program, setup.plan, calibration, partial(gathers_s, setup, program))


def gathers_s(setup: Setup, program: Program, cost: Cost, rank: int, step: Run) -> float:
    """Returns the seconds of gathers beyond one for a call that does not train.

    Without the hybrid engine: response tokens x batches x (bytes of all weights / link). With it: once for each batch.
    """
    workload = setup.workload
    call, size = workload.workflow.call(step.call), program.cluster.num_devices
    if isinstance(call, Compute | Train):
        return 0.0
    home = _home(program, call.model)
    one_s = cost.gather_s(call, home, rank)
    passes = -(-workload.num_sequences // (size * setup.generated))
    if isinstance(call, Generate) and setup.per_token:
        return passes * workload.max_response * one_s
    return (passes - 1) * one_s


def _home(program: Program, model: str) -> Layout:
    """Returns the layout in which the weights of a model are spread: that of its training, or of its one call."""
    workflow, layouts = program.workload.workflow, program.placement.layouts
    train = workflow.train_call(model)
    names = [train.name] if train else [call.name for call in workflow.placed_calls if call.model == model]
    return layouts[names[0]]

"""The stages of alignment that generate nothing, in `bench scan`: their lengths, what is searched over, and what their
rows say beside those of other algorithms."""

from dataclasses import replace
from math import inf
from typing import Any

from bench.stage_tables import ZERO3
from rlhf_spmd.plan.cost.bottleneck import limits
from rlhf_spmd.plan.cost.calibration import Calibration, Link
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.simulate import Forecast

STAGES = {"sft": (1024, 1024), "reward_model": (512, 512), "dpo": (512, 512)}  # tokens of prompts, of responses
MICRO_BATCHES = (1, 2, 4, 8)  # as many as the planner tries for workloads of MICRO_BATCH
MICRO_BATCH = 4
SEARCHED: dict[str, dict[str, Any]] = {  # strategy of rows -> options, beside those of suites.grid_of()
    ZERO3: {"zero": 3, "tp": 1, "recompute": False, "micro_batch": MICRO_BATCHES},
    "flattening": {"micro_batch": MICRO_BATCHES},
    "reallocation": {"generation_tp": 1, "micro_batch": MICRO_BATCHES},
    "separation": {"generation_tp": (1, 2, 4, 8), "micro_batch": MICRO_BATCHES, "ratios": ((),)},
    "planner": {},
}
WORDS = {"products": "compute", "messages": "network"}  # of limits()


def overrides_of(algorithm: str) -> tuple[str, ...]:
    """The options of a stage: its lengths, and how many rows a forward has."""
    prompt, response = STAGES[algorithm]
    return f"data.max_prompt={prompt}", f"generation.max_new_tokens={response}", f"micro_batch={MICRO_BATCH}"


def strategies_of(algorithm: str) -> list[str]:
    """The strategies of rows that apply: without a reference there is nothing to separate, and nothing of these
    algorithms can be interleaved."""
    return [name for name in SEARCHED if name != "separation" or algorithm == "dpo"]


def about(seen: Forecast, calibration: Calibration) -> dict[str, Any]:
    """What a row says of a forecast: seconds of a step, tokens per second of a device, what limits each call, and
    seconds of an iteration in which messages take no time."""
    workload, program = seen.program.workload, seen.program
    sequences = workload.num_sequences * max(call.num_sequences for call in workload.workflow.placed_calls)
    tokens = sequences * (workload.max_prompt + workload.max_response)
    free = replace(calibration, inside=Link(inf, 0.0), between=Link(inf, 0.0))
    return {
        "step_s": seen.makespan_s / workload.num_mini_batches,
        "tokens_per_s_device": tokens / seen.makespan_s / program.cluster.num_devices,
        "limits": {call: WORDS.get(what, what) for call, what in limits(program, calibration).items()},
        "without_messages_s": forecast(program, free).makespan_s,
    }

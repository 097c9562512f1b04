"""What partial rollouts gain: iterations that sample a part of long responses, measured beside their forecast.

Two ranks as in `bench lengths`, whose layers sleep: one trains, and the other one samples ahead, all responses at once.
Their lengths are lognormal with sigma 1. A token of a pass takes half of its time there, and a decode step twice as
long, so that generation takes longer than training. An iteration with `partial_steps` trains fewer responses, in less
time: the row has seconds per trained response, over iterations after the first ones, in which few have ended.

Cost: 18 minutes on two cores. Command: python -m bench partial
"""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

from bench.forecast import lengths as sleeping
from bench.ranks import rows_of_ranks
from bench.rows import Arguments, write
from bench.tables import ended
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.lengths import lognormal
from rlhf_spmd.plan.cost.partial import parts_of
from rlhf_spmd.plan.proof import token_lags
from rlhf_spmd.plan.workload import ResponseLengths

STEPS = (0, 16, 8)  # of an iteration; 0: all
TOKEN_S, DECODE_S = sleeping.TOKEN_S / 2, sleeping.DECODE_S * 2
MEAN, SIGMA, LIMIT = 10.0, 1.0, 64  # tokens
WARM_UP, COUNTED = 6, 31  # iterations
TOLERANCE = 0.15


class Tokens(dict[Any, int]):
    """Tokens of a response by its first random bits, once the steps of an iteration are known."""

    lengths = lognormal(MEAN, SIGMA, LIMIT)

    def get(self, bits: int, default: Any = None) -> int:
        """Returns a quantile. A response that would fill its last part has a token less, for such a part goes on."""
        number, steps = sleeping.length_at(bits % 2**32 / 2**32, self.lengths, LIMIT), self["steps"]
        return number - 1 if steps and not number % steps and number < LIMIT else number


def measure(world: Any, config: Any, program: Any) -> dict[str, Any]:
    """Returns seconds and trained responses of iterations, and how old tokens are."""
    from rlhf_spmd.runtime.execute.executor import Executor
    from rlhf_spmd.runtime.run.loop import Loop
    from rlhf_spmd.runtime.run.prepare import prepare
    from rlhf_spmd.runtime.world.trace import Tracer

    job = prepare(dataclasses.replace(config, iterations=WARM_UP + COUNTED), program, world).job
    done = [one.metrics for one in Loop(job, Executor(job, Tracer()), []).iterations()][WARM_UP:-1]
    rows = statistics.fmean(config.rollout_batch * (1 - one.get("held_groups", 0.0)) for one in done)
    seconds = statistics.fmean(one["iteration_s"] for one in done)
    lags = [one["lag_tokens"] for one in done if "lag_tokens" in one]
    return {"iteration_s": seconds, "trained": rows, "measured_s": seconds / rows, "lag": statistics.fmean(lags or [1])}


def run_cases(world: Any, folder: Path) -> list[dict]:
    """Runs all cases on each rank."""
    rows = []
    with sleeping.planted(Tokens(), TOKEN_S, DECODE_S) as tokens:
        base = sleeping.config_of("ppo", folder, LIMIT, 64)
        configs = [dataclasses.replace(base, partial_steps=steps) for steps in STEPS]
        separation, cluster = load_strategy("separation"), Cluster.parse("1x2")
        programs = [separation.compile(make_workload(one), cluster, {"ahead": 1}) for one in configs]
        calibration = sleeping.start(world, programs, base)
        for config, program in zip(configs, programs, strict=True):
            steps, began = config.partial_steps, time.perf_counter()
            tokens["steps"] = steps
            workload = dataclasses.replace(program.workload, forecast_lengths=ResponseLengths(MEAN, SIGMA))
            found = forecast(dataclasses.replace(program, workload=workload), calibration).makespan_s
            trained = config.rollout_batch * (parts_of(workload).ended if steps else 1.0)
            row = {"bench": "partial", "steps": steps, "mean": MEAN, "sigma": SIGMA, "limit": LIMIT}
            row |= {"forecast_s": found / trained, "most_lag": token_lags.most(program)}
            row |= measure(world, config, program) | {"wall_s": time.perf_counter() - began}
            row["error"] = row["forecast_s"] / row["measured_s"] - 1
            rows.append(row | {"ok": abs(row["error"]) <= TOLERANCE})
    return rows


def main(arguments: list[str]) -> int:
    Arguments("partial", __doc__).parse_args(arguments)
    rows = rows_of_ranks(__name__, 2, inputs=sleeping.write_inputs)
    write("partial", rows)
    return ended("partial", rows)

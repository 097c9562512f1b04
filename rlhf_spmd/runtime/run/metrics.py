"""The metrics of a run: those of its algorithm's page, those that every run has, and warnings about unusual values."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.config.options import Config, function_labels
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import Algorithm
from rlhf_spmd.plan.calls import Workflow
from rlhf_spmd.plan.cost.model_flops import iteration_flops
from rlhf_spmd.plan.runtime_words import PLACES_USED, SCORES, STEP_TOKENS, STEPS_MADE, TIMEOUTS
from rlhf_spmd.runtime.checkpoint.resume import PROMPTS_USED
from rlhf_spmd.runtime.data.step_order import NO_ROW
from rlhf_spmd.runtime.environments.episodes import CHANGED, DROPPED, ROWS
from rlhf_spmd.runtime.execute.handlers.infer import ENVIRONMENT
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.partial_rollouts import HELD, TOKEN_LAG
from rlhf_spmd.runtime.execute.response_hashes import tokens_sha256
from rlhf_spmd.runtime.generation.episodes import REASONS
from rlhf_spmd.runtime.run.forecast_report import token_counts
from rlhf_spmd.runtime.world.metric_sums import combine

EXPLODED = 10.0  # times the largest value so far
NUM_BEFORE = 3  # iterations before the first warning
IDLE = {  # whether responses are generated -> why a model has no gradient
    True: "no response remains to train on, or none differs from its baseline; look at the rewards, at ended_fraction "
    "(truncated responses), and at what the algorithm's options leave out",
    False: "its rows have no token or pair to learn from; look at them, and at data.turns",
}
# Sums and means are global: over all ranks.
GENERATION = {
    "response_length": Metric("generation", "length", "{:6.1f}"),  # tokens, mean per response
    "ended_fraction": Metric("generation"),  # share of the responses that were not cut at max_new_tokens
    # largest and mean |logprob when generated - logprob when first trained on|, nats
    "parity_max_abs": Metric("generation"),
    "parity_mean_abs": Metric("generation"),
    # of mixtures of experts: share of the choices of routers that training would have made otherwise
    "route_disagreement": Metric("generation"),
    # of these: choices of the expert of a layer that is chosen most, relative to the mean, per mini-batch; with a
    # coefficient in experts: load-balancing and z-loss, and the entropy of a router, nats
    "expert_load": Metric("optimizer"),
    **{name: Metric("optimizer") for name in ("router_balance", "router_z", "router_entropy")},
    # where batches are drawn ahead: iterations that have trained since, and what parity_ is for weights that have not
    "lag": Metric("generation"),  # with partial_steps: of the oldest token
    TOKEN_LAG: Metric("generation"),  # with partial_steps: mean over the tokens of responses that ended
    HELD: Metric("generation"),  # with it: share of the groups that go on in the next iteration
    "lag_max_abs": Metric("generation"),
    "lag_mean_abs": Metric("generation"),
    "gen_tokens": Metric("generation"),
    # with rounds: share of the groups drawn before the last round that were drawn again; prompts used by all iterations
    "failed_groups": Metric("generation"),
    PROMPTS_USED: Metric("generation"),
}
TURNS = {  # of episodes
    "turns": Metric("generation", "turns", "{:6.2f}", leaves=7),  # mean per episode
    "tool_calls": Metric("generation", "calls", "{:6.2f}", leaves=6),  # mean per episode, as those below
    **{name: Metric("generation") for name in ("tool_failures", "tool_timeouts")},
    **{f"end_{reason}": Metric("generation") for reason in REASONS},  # share of the episodes that ended so
    # requests of an agent that were refused because they changed the conversation, mean per episode
    CHANGED: Metric("generation", limits=(0.0, 0.05), advice="let the agent only add messages to its conversation"),
    ROWS: Metric("generation"),  # rows that an agent opened, mean per episode, with episode.rows above 1
    # share of the episodes that are left out because an environment broke, with episode.on_failure=drop_group
    DROPPED: Metric("generation", limits=(0.0, 0.25), advice="look at the notes about the environment, and repair it"),
}
ALL_BROKE = "repair the environment, which broke each time (the notes say how)"
INEXACT = (TIMEOUTS, "tool_timeouts", "end_rollout_timeout", DROPPED)  # ends of the names of metrics
BUDGET = {  # means per optimizer step
    PLACES_USED: Metric("optimizer"),
    STEP_TOKENS: Metric("optimizer", "tokens/step", "{:11,.0f}", leaves=7),
}
SPEED = {
    "gen_tokens_per_s": Metric("speed", "gen tok/s", "{:9,.0f}", leaves=9),  # of all ranks together
    "moved_bytes": Metric("speed"),  # between layouts, all ranks together; `check` forecasts it
    "moved_messages": Metric("speed"),
    "generate_s": Metric("speed"),
    "tflops": Metric("speed"),  # 10^12 FLOP/s of a rank: those that the models need, see plan/cost/model_flops.py
    "mfu": Metric("speed"),  # share of the FLOP/s of large products by the calibration
    "peak_bytes": Metric("speed"),  # of the fullest rank since its start: of its GPU; on a CPU, of its process
    "iteration_s": Metric("speed", "seconds", "{:7.2f}", leaves=1),
}


def metrics_of(algorithm: Algorithm, workflow: Workflow, functions: Iterable[str] = ()) -> dict[str, Metric]:
    """Returns the metrics by name, in the order of the console's columns.

    functions: names of the reward functions, if several.
    """
    own = algorithm.metrics
    found = {name: metric for name, metric in own.items() if metric.headline is not None} | GENERATION | dict(own)
    has_turns = any(call.has_turns for call in workflow.generate_calls)
    found |= TURNS if has_turns else {}
    for call in workflow.placed_calls:
        if call.function == SCORES and algorithm.roles[call.model].judge:
            name = call.outputs[0].removesuffix("s")  # mean of the judge's scores
            for judge in (name, *(f"{name}_{one}" for one in (*functions, *([ENVIRONMENT] if has_turns else [])))):
                found |= {judge: Metric(call.model), f"{judge}_std": Metric(call.model)}
            found |= {f"{name}_{one}": Metric(call.model, one, leaves=3) for one in functions}
            found[TIMEOUTS] = Metric(call.model, "timeouts", "{:8.0f}", leaves=2)  # responses, of all ranks together
    for model in workflow.trained_models:
        advice = f"lower optimizer.{model}_lr, or look at the data"
        zero = f"the {model} learned nothing in this iteration: {IDLE[bool(workflow.generate_calls)]}"
        found[f"{model}_grad_norm"] = Metric("optimizer", floor=1.0, advice=advice, zero=zero)  # before clipping
        found[f"{model}_lr"] = Metric("optimizer")
        train = workflow.train_call(model)
        found |= {f"{model}{STEPS_MADE}": Metric("optimizer")} if train and (train.stop or train.loglinear) else {}
    return found | ({} if workflow.generate_calls else BUDGET) | SPEED


def columns_of(known: Mapping[str, Metric], config: Config, workflow: Workflow) -> list[str]:
    """Returns the metrics that have a column on the console in a run with these options, in the order of the
    columns."""
    absent = dict.fromkeys((*GENERATION, "gen_tokens_per_s"), not workflow.generate_calls)
    absent |= {STEP_TOKENS: not config.mini_batch_tokens, TIMEOUTS: not config.reward_timeout_s}
    return [
        name
        for name, metric in known.items()
        if metric.column and not absent.get(name) and (metric.when is None or metric.when(config.options))
    ]


def summarize(job: Job, answers: Sequence[Mapping[str, Any]], state: Any) -> dict[str, Any]:
    """Summarises one iteration as global metrics, the same on every rank; the numbers of the algorithm's state when the
    iteration began are metrics, too. A sum NAME_sq beside NAME becomes the standard deviation NAME_std, or the
    effective sample size NAME_ess as a share of the samples."""
    means, weights = combine(answers)
    metrics: dict[str, Any] = dict(means)
    known = metrics_of(job.config.algorithm, job.workload.workflow, function_labels(job.config))
    for name in [name for name in metrics if f"{name}_sq" in metrics and f"{name}_sq" not in known]:
        square = metrics.pop(f"{name}_sq")
        if f"{name}_std" in known:
            metrics[f"{name}_std"] = math.sqrt(max(square - metrics[name] ** 2, 0.0))
            continue
        mean = metrics.pop(name)  # only `after_iteration` may use it
        if f"{name}_ess" in known:
            metrics[f"{name}_ess"] = mean**2 / square if square else 0.0
    values = asdict(state) if state else {}
    metrics |= {name: value for name, value in values.items() if isinstance(value, float) and name in known}
    if "response_length" in weights:  # whose weight is 0 where all responses go on
        metrics["gen_tokens"] = metrics.get("response_length", 0.0) * weights["response_length"]
        metrics["gen_tokens_per_s"] = metrics["gen_tokens"] / metrics["generate_s"]
    if TIMEOUTS in metrics:
        metrics[TIMEOUTS] = float(round(metrics[TIMEOUTS] * weights[TIMEOUTS]))
    for what in ("bytes", "messages"):
        metrics[f"moved_{what}"] = sum(answer["sent"][what] for answer in answers)
    if job.workload.workflow.generate_calls:
        metrics["tokens_sha256"] = tokens_sha256(answer["rows"] for answer in answers)
    return metrics


def speed(
    job: Job, data: Iteration, answers: Sequence[Mapping[str, Any]], seconds: float, device_flops: float | None
) -> dict[str, float]:
    """Returns how fast an iteration was, and the memory that it took.

    device_flops: FLOP/s of large products; None: unknown.
    """
    flops = iteration_flops(job.workload, *_lengths(job, data, answers)) / (job.world.size * seconds)
    speed = {"iteration_s": seconds, "tflops": flops / 1e12}
    speed |= {"mfu": flops / device_flops} if device_flops else {}
    speed |= {} if data.rounds is None else {PROMPTS_USED: float(data.rounds.cursor)}
    return speed | {"peak_bytes": float(max(answer["peak_bytes"] for answer in answers))}


def _lengths(job: Job, data: Iteration, answers: Sequence[Mapping[str, Any]]) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the tokens of the prompt and of the response of each sequence of an iteration."""
    if job.workload.workflow.generate_calls:
        return token_counts(answers, job.prompts.prompts)
    numbers = [row for row in data.prompt_MC.flatten().tolist() if row != NO_ROW]
    pairs = [(row, responses.row(row)) for responses in job.prompts.responses.values() for row in numbers]
    return [len(job.prompts.prompts[row]) for row, _ in pairs], [len(response) for _, response in pairs]


def num_timeouts(rows: Sequence[Mapping]) -> int:
    """Counts the responses for which a reward function ran out of time.

    rows: metrics of iterations and evaluations.
    """
    return int(sum(row.get(TIMEOUTS, 0.0) for row in rows))


def timeouts_note(rows: Sequence[Mapping]) -> str:
    """Says that a run cannot be repeated exactly, because time limits were reached or episodes were dropped; else
    empty.

    rows: as in num_timeouts.
    """
    reached = {name for row in rows for name, value in row.items() if name.endswith(INEXACT) and value}
    if not reached:
        return ""
    return (
        f"time limits were reached, or environments broke ({', '.join(sorted(reached))}), so this run cannot be "
        "repeated exactly: which responses those are depends on the speed of the machine"
    )


def check_finite(metrics: Mapping, where: str) -> None:
    """Raises UserError if a metric is not finite, before the next iteration spoils the weights further. where: the
    title of the iteration. Also if all of its episodes were dropped."""
    if any(value == 1.0 for name, value in metrics.items() if name.endswith(DROPPED)):
        raise UserError(f"{where}: every episode was dropped: {ALL_BROKE}")
    wrong = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    if wrong:
        raise UserError(f"{where}: {', '.join(wrong)} is not finite; lower the learning rates or look at the scores")


class Alarm:
    """Warns once of each metric that is far larger than ever before, long before it becomes infinite, outside its
    limits, or 0 where that says that nothing is learned. known: the metrics of the run. history: their values in
    earlier iterations of a resumed run."""

    def __init__(self, known: Mapping[str, Metric], history: Iterable[Mapping] = ()) -> None:
        self._known = known
        self._largest: dict[str, float] = {}
        self._num_seen = 0
        self._warned: set[tuple[str, str]] = set()  # metrics with an advice
        for metrics in history:
            self.notes({name: value for name, value in metrics.items() if isinstance(value, int | float)})

    def notes(self, metrics: Mapping[str, float | str]) -> list[str]:
        """Returns warnings about the metrics of one iteration."""
        found: dict[tuple[str, str], str] = {}  # metric and advice -> warning
        for name, metric in self._known.items():
            value, texts = float(metrics.get(name, 0.0)), {}
            if metric.floor:
                before = self._largest.get(name, 0.0)
                if self._num_seen >= NUM_BEFORE and abs(value) > max(EXPLODED * before, metric.floor):
                    texts[metric.advice] = f"is {abs(value):.4g}, and was at most {before:.4g} before"
                self._largest[name] = max(before, abs(value))
            if metric.limits and name in metrics and not metric.limits[0] <= value <= metric.limits[1]:
                texts[metric.advice] = f"is {value:.4g}, not in {metric.limits[0]:g} to {metric.limits[1]:g}"
            if metric.zero and name in metrics and value == 0:
                texts[metric.zero] = "is 0"
            found |= {(name, advice): f"warning: {name} {text}: {advice}" for advice, text in texts.items()}
        self._num_seen += 1
        new = [text for key, text in found.items() if key not in self._warned]
        self._warned |= found.keys()
        return new

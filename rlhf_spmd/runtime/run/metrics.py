"""The metrics of a run: those of its algorithm's page, those that every run has, and warnings about unusual values."""

from collections.abc import Iterable, Mapping

from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.pages.algorithm import Algorithm
from rlhf_spmd.plan.runtime_words import PLACES_USED, SCORES, STEP_TOKENS, TIMEOUTS
from rlhf_spmd.plan.workflow import Workflow

EXPLODED = 10.0  # times the largest value so far
NUM_BEFORE = 3  # iterations before the first warning
IDLE = {  # whether responses are generated -> why a model has no gradient
    True: "no response is left to train on, or none differs from its baseline; look at the rewards, at ended_fraction "
    "(truncated responses), and at what the algorithm's options leave out",
    False: "no token or pair of its rows is learned; look at the rows, and at data.turns",
}
# Sums and means are global: over all ranks.
GENERATION = {
    "response_length": Metric("generation", "length", "{:6.1f}"),  # tokens, mean per response
    "ended_fraction": Metric("generation"),  # share of the responses that were not cut at max_new_tokens
    # largest and mean |logprob when generated - logprob when first trained on|, nats
    "parity_max_abs": Metric("generation"),
    "parity_mean_abs": Metric("generation"),
    "gen_tokens": Metric("generation"),
}
BUDGET = {  # means per optimizer step
    PLACES_USED: Metric("optimizer"),
    STEP_TOKENS: Metric("optimizer", "tokens/step", "{:11,.0f}"),
}
SPEED = {
    "gen_tokens_per_s": Metric("speed", "gen tok/s", "{:9,.0f}"),  # of all ranks together
    "moved_bytes": Metric("speed"),  # between layouts, all ranks together; `check` forecasts it
    "moved_messages": Metric("speed"),
    "generate_s": Metric("speed"),
    "iteration_s": Metric("speed", "seconds", "{:7.2f}"),
}


def metrics_of(algorithm: Algorithm, workflow: Workflow, functions: Iterable[str] = ()) -> dict[str, Metric]:
    """Name -> metric, in the order of the console's columns. functions: names of the reward functions, if several."""
    own = algorithm.metrics
    found = {name: metric for name, metric in own.items() if metric.headline is not None} | GENERATION | dict(own)
    for call in workflow.placed_calls:
        if call.function == SCORES and algorithm.roles[call.model].judge:
            name = call.outputs[0].removesuffix("s")  # mean of the judge's scores
            for judge in (name, *(f"{name}_{function}" for function in functions)):
                found |= {judge: Metric(call.model), f"{judge}_std": Metric(call.model)}
            found[TIMEOUTS] = Metric(call.model, "timeouts", "{:8.0f}")  # responses, of all ranks together
    for model in workflow.trained_models:
        advice = f"lower optimizer.{model}_lr, or look at the data"
        zero = f"the {model} learned nothing in this iteration: {IDLE[bool(workflow.generate_calls)]}"
        found[f"{model}_grad_norm"] = Metric("optimizer", floor=1.0, advice=advice, zero=zero)  # before clipping
        found[f"{model}_lr"] = Metric("optimizer")
    return found | ({} if workflow.generate_calls else BUDGET) | SPEED


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
        """Warnings about the metrics of one iteration."""
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

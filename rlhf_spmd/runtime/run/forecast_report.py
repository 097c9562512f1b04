"""Compares a run with its forecast (plan/cost/forecast.py) for lengths like its own: the seconds of every call.

Both are seconds per iteration on the rank that a call keeps busy longest, without waits: a Run with a group begins when
its last rank has arrived (plan/cost/forecast_summary.py), and waits between pipeline stages have spans of their own.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rlhf_spmd.config.forecast_options import PROMPT_LENGTH, measured
from rlhf_spmd.plan.calls import Compute
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.cost.forecast import forecast
from rlhf_spmd.plan.cost.forecast_summary import call_s
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.program.pipeline import is_pipelined
from rlhf_spmd.plan.runtime_words import PLACES_USED
from rlhf_spmd.plan.workload import Answers, ResponseLengths
from rlhf_spmd.runtime.data.prompts import PromptSet
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.profile.calibration_probe import AtHand, at_hand
from rlhf_spmd.runtime.records.run_folder import RunFolder
from rlhf_spmd.runtime.world.trace import Lane, Span, lanes

WHOLE = "iteration"  # the row of the whole iteration
FIRST_ROWS = 1000  # of a data set, whose lengths are taken


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """Seconds per iteration of one call, or of the whole iteration. forecast_s: None if there is no forecast."""

    call: str
    forecast_s: float | None
    measured_s: float


def token_counts(
    answers: Sequence[Mapping], prompts: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Counts the tokens of the prompts, and of the responses, of an iteration.

    answers: of every rank at its end.
    prompts: tokens by prompt index.
    """
    rows = [pair for answer in answers for pair in answer["rows"][["prompt", "length"]].tolist()]
    return tuple(len(prompts[prompt]) for prompt, _ in rows), tuple(length for _, length in rows)


def given_counts(data: PromptSet, used: float = 1.0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Counts the tokens of the first rows of a data set with responses: of each row, the mean over its responses.

    used: the share of the places that have a row; all places together have as many tokens as those.
    """
    rows = range(min(len(data), FIRST_ROWS))
    responses = [[len(of_key.row(row)) for of_key in data.responses.values()] for row in rows]
    prompts = tuple(max(1, round(used * len(data.prompts.row(row)))) for row in rows)
    return prompts, tuple(max(1, round(used * statistics.fmean(lengths))) for lengths in responses)


@dataclass(frozen=True, slots=True)
class Compared:
    """A row for every call that takes time, in the order of the workflow, and one for the whole iteration.

    scaled_by: forecast seconds of an iteration by the scaled calibration / those by the unscaled one; None: there is no
        forecast.
    why_not: there is none.
    """

    rows: Sequence[CallSeconds]
    calibration: str
    scaled_by: float | None
    why_not: str = ""
    episodes: Mapping[str, Answers] = field(default_factory=dict)  # how they were "forecast" to be answered; "measured"

    @property
    def whole(self) -> CallSeconds:
        """The row of the iteration."""
        return self.rows[-1]

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as JSON-able values."""
        values = asdict(self)
        return values if self.episodes else {name: value for name, value in values.items() if name != "episodes"}

    @property
    def notes(self) -> list[str]:
        """For the end of a run: why there is no forecast; how episodes were answered, beside the forecast."""
        notes = [f"no forecast beside the measured time: {self.why_not}"] if self.why_not else []
        if self.episodes:
            texts = {name: _of_answers(answers) for name, answers in self.episodes.items()}
            notes.append(f"episodes, measured: {texts['measured']}; forecast: {texts['forecast']}")
        return notes


def _of_answers(answers: Answers) -> str:
    return (
        f"{answers.turns:.3g} turns with {answers.tokens:.3g} tokens of answers, and {answers.mean_s:.3g} s between "
        f"two turns (95th percentile {answers.p95_s:.3g} s)"
    )


def compare(
    program: Program,
    found: AtHand,
    records: Sequence[Mapping[str, object]],
    lengths: Sequence[tuple[int, ...]],
    answers: Answers | None = None,
) -> Compared:
    """Compares the iterations in `records` (of every rank) with their forecast by a calibration, unless this says
    nothing of these ranks. Medians over the iterations, without the run's first one if there are others.

    lengths: from token_counts.
    answers: of the run's episodes.
    """
    prompts, responses = lengths
    expected = program.workload.answers
    if answers is not None and answers.problem:
        found = replace(found, why_not=f"episodes were not answered as forecasts assume: {answers.problem}")
    met_lengths = ResponseLengths.of(responses, prompts)
    met_answers = expected if found.why_not else answers
    met = replace(program, workload=replace(program.workload, forecast_lengths=met_lengths, answers=met_answers))
    here = forecast(met, found.calibration)
    as_given_s = here.makespan_s if found.scale is None else forecast(met, found.given).makespan_s
    all_lanes = lanes(records)
    ran: dict[int, set[str]] = {}  # iteration -> calls
    for span in (span for lane in all_lanes for span in lane.spans):
        if span.iteration is not None:
            ran.setdefault(span.iteration, set()).add(span.name)
    every = {
        call.name for call in program.workload.workflow.calls
    }  # the last step of a run that draws ahead draws none
    numbers = sorted(number for number, names in ran.items() if every <= names)
    if program.chains:  # an iteration lasts from the end of the one before
        numbers = [number for number in numbers if number - 1 in numbers] or numbers
    measured = [_measured_s(program, all_lanes, number) for number in ([n for n in numbers if n] or numbers)]
    forecast_s = call_s(here) | {WHOLE: here.makespan_s}
    seconds = {name: statistics.median(one[name] for one in measured) for name in forecast_s if measured}
    shown = {name: None if found.why_not else s for name, s in forecast_s.items() if s > 0 and name in seconds}
    rows = [CallSeconds(name, s, seconds[name]) for name, s in shown.items()]
    episodes = {"forecast": expected, "measured": answers} if expected and answers else {}
    scaled_by = None if found.why_not else here.makespan_s / as_given_s
    return Compared(rows, found.calibration.name, scaled_by, found.why_not, episodes)


def _measured_s(program: Program, all_lanes: Sequence[Lane], number: int) -> dict[str, float]:
    """Returns seconds of every call in one iteration, on the rank that it keeps busy longest, and of the whole."""
    workflow = program.workload.workflow
    spans: list[list[Span]] = [[span for span in lane.spans if span.iteration == number] for lane in all_lanes]
    of_rank: dict[tuple[str, int], float] = {}
    pairs: list[tuple[int, Run, Span]] = []
    for call in workflow.calls:
        for rank, mine in enumerate(spans):
            taken = [span for span in mine if span.category == "compute" and span.name == call.name]
            runs = [run for run in program.instructions[rank] if isinstance(run, Run) and run.call == call.name]
            if runs and not isinstance(call, Compute) and is_pipelined(call, program.layout_of(runs[0])):
                of_rank[call.name, rank] = sum(span.end_s - span.start_s for span in taken)
            else:  # a full recorder has dropped the first spans
                pairs += [(rank, *pair) for pair in zip(runs[len(runs) - len(taken) :], taken, strict=True)]
    came_s: dict[Run, float] = {}
    for _, run, span in pairs:
        came_s[run] = max(came_s.get(run, span.start_s), span.start_s)
    for rank, run, span in pairs:
        begin_s = span.start_s if run.group is None else came_s[run]
        of_rank[run.call, rank] = of_rank.get((run.call, rank), 0.0) + max(span.end_s - begin_s, 0.0)
    begin_s = min(span.start_s for mine in spans for span in mine)
    if program.chains:
        before = (span.end_s for lane in all_lanes for span in lane.spans if span.iteration == number - 1)
        begin_s = max(before, default=begin_s)
    whole_s = max(span.end_s for mine in spans for span in mine) - begin_s
    calls = {call.name: max(s for (name, _), s in of_rank.items() if name == call.name) for call in workflow.calls}
    return calls | {WHOLE: whole_s}


def compared_run(
    job: Job,
    folder: RunFolder,
    calibration: Calibration | None,
    history: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping],
) -> Compared | None:
    """Compares the last iterations of a run with their forecast, and writes it to the run folder. Returns the
    comparison, on rank 0 if there is a calibration. Collective.

    history: metrics of all iterations.
    records: of the last ones' timeline.
    answers: of every rank at the end of the last.
    """
    if calibration is None:
        return None
    trained_s = sum(metrics["iteration_s"] for metrics in history)
    found = at_hand(job.world, job.config, job.program, calibration, trained_s)
    if job.world.rank > 0:
        return None
    lengths = token_counts(answers, job.prompts.prompts)
    if not job.workload.workflow.generate_calls:
        used = statistics.fmean(metrics.get(PLACES_USED, 1.0) for metrics in history)
        lengths = given_counts(job.prompts, used)
    of_episodes = measured(history)
    if of_episodes is not None:  # environments open prompts, for example with a list of tools
        prompt = statistics.fmean(metrics[PROMPT_LENGTH] for metrics in history if PROMPT_LENGTH in metrics)
        lengths = (max(1, round(prompt)),) * len(lengths[1]), lengths[1]
    if not lengths[1]:  # all responses go on (partial_steps)
        return None
    compared = compare(job.program, found, records, lengths, of_episodes)
    if not compared.rows:  # no iteration had all calls
        return None
    folder.write_values("forecast.json", compared.to_json())
    folder.notes += compared.notes
    return compared

"""The interface of an algorithm file. No torch, no ranks.

An algorithm file is a module with

    TITLE                 the algorithm's name for people
    Options               a frozen dataclass derived from `page.Options`: `NAME.option=value` on the command line
    ROLES                 model -> plan.workflow.Role
    DATA                  key -> what the data set has of it: a column with prompts (`prompts`) or with responses (all
                          other keys), a Number, or AssistantTokens
    METRICS               name -> Metric, of the sums that its functions return
    workflow(options, model, compute, prompts, ...)     straight-line code on symbolic values (plan/workflow.py)
    SAMPLES_PER_PROMPT    optional: the default of samples_per_prompt, if not 1
    State, initial_state, read_state, after_iteration   optional: what changes between iterations; the last one has the
                          parameters state, options, means, weights and num_sequences
    STATE_SUMS            optional: the sums that after_iteration reads, if all are of computes; then an iteration need
                          not wait for the training of the one before (strategy.chain)
    refused               optional: why options make no sense for a model whose responses cannot end early
    VARIANTS              optional: methods that options make of it
    problem               optional: why options make no sense together, or with rollout_batch, samples_per_prompt,
                          mini_batch or max_new_tokens, if it has such a parameter

`workflow` and `after_iteration` get their arguments by keyword. So do the functions that calls name, which are looked
up in the algorithm file, then in advantages.py, group_advantages.py, surrogates.py, likelihood.py and preferences.py.
A parameter of theirs is the name of an argument of the call, a word of the runtime (plan/runtime_words.py: `mask`,
`ended`; in a loss also `logprobs`, `most_likely`, `entropy`, `values` or `scores` of the model that trains, after the
name of the responses where a call reads two, and `lag_share` with loglinear=True), an option or a part of the state,
without the letters of its shape (`logprobs_BG` is `logprobs`). Besides its results a function may return sums for the
log, name -> (sum, weight).

    NAME_sums, NAME_prepare    of a loss: float64 sums of its arguments over the global mini-batch; and new values of
                               arguments, by parameter, from these `sums` and the `divisor`
    NAME_sums, NAME_finish     of a compute with sums=True: the same for its results, over the batch
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

Fraction01 = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
# options of policy losses, and parameters of their functions in surrogates.py and importance.py
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
RatioLevel = Literal["token", "sequence", "product"]
Surrogate = Literal["clip", "cispo", "dppo", "dppo_kl", "sapo", "gmpo", "reinforce"]
Loss = Literal["sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down", "simpo", "orpo"]  # of pairs
KLEstimator = Literal["k1", "k2", "k3"]
ImportanceWeights = Literal["none", "token", "sequence", "geometric"]
Rejection = Literal["none", "token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True)
class Number:
    """In DATA: a column with a number of each row. default: of rows that have none; None: every row must have one."""

    column: str
    default: float | None = None


@dataclass(frozen=True, slots=True)
class AssistantTokens:
    """In DATA, where there is one key of responses: 1 for each of their tokens that is to be learned, 0 for those of
    other turns of a conversation."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A method that options make of an algorithm.

    words: the options, each without `NAME.` before it, and what the user puts in for capitals.
    formula: what differs.
    source: where it is published.
    """

    name: str
    words: str
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Options:
    """The options of every algorithm."""

    epochs: PositiveInt = 1  # number of training passes over the rows of an iteration


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of the log.

    group: in TensorBoard.
    column, form: title and format of its column on the console.
    when: whether a run with these options has the column; None: every run has.
    leaves: where the columns do not fit on a line, those with the largest number are left out first, and of equal ones
        the last.
    std_of: the metric of which this is the standard deviation; its squares are summed as NAME_sq.
    headline: the unit ("": none) with which the first and last value are reported at the end of a run; None: not
        reported.
    floor: values below it cause no warning.
    advice: what to do when a value is ten times the largest so far (metrics.py).
    limits: the range without a warning.
    zero: the text of a warning where the value is 0; empty: 0 is not unusual.
    over: what becomes of the values of all calls in an iteration: their mean by weights, or the largest or smallest
        value whose weight is not 0.
    better: whether larger or smaller values are better, for checkpoint.best.
    """

    group: str
    column: str = ""
    form: str = "{:8.4f}"
    when: Callable[[Any], bool] | None = None
    leaves: int = 0
    std_of: str = ""
    headline: str | None = None
    floor: float | None = None
    limits: tuple[float, float] | None = None
    advice: str = ""
    zero: str = ""
    over: Literal["mean", "max", "min"] = "mean"
    better: Literal["more", "less"] = "more"

"""What the page of an algorithm is made of. No torch, no ranks.

A page is a module with

    TITLE                 the algorithm's name for people
    Options               a frozen dataclass, a kind of `page.Options`: `NAME.option=value` on the command line
    ROLES                 model -> plan.workflow.Role
    DATA                  key -> column of the data set; `prompts` are prompts, all other keys are responses
    METRICS               name -> Metric, of what its functions count
    workflow(options, model, compute, prompts, ...)     straight-line code on symbolic values (plan/workflow.py)
    State, initial_state, read_state, after_iteration           what changes between iterations, if anything does
    refused               if need be: why options make no sense for a model of which nothing can end a response

and the functions that its calls name are found by their names: in the page itself, or in advantages.py and losses.py.
They are bound by keyword. A parameter is what the call gives under its name, a word of the runtime (plan/words.py:
`mask`, `ended`; in a loss also `logprobs`, `values`, `scores` or `entropy` of the model that trains, behind the name of
the responses where a call reads two), an option or a part of the state; letters of a shape at its end do not count
(`logprobs_BG` is `logprobs`). Beside its results a function may return sums for the log, name -> (sum, weight).

    NAME_sums, NAME_prepare    of a loss: float64 sums over the global mini-batch of what it reads, and new values of
    what
                               it reads, keyed by parameter, from these `sums` and the `divisor`
    NAME_sums, NAME_finish     of a compute with sums=True: the same over the batch, of its results
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveInt

Fraction01 = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Options:
    """What every algorithm has."""

    epochs: PositiveInt = 1  # passes over the rows of an iteration


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of the log.

    group: of TensorBoard. column, form: heading and format of its column on the console. std_of: it is the standard
    deviation of that metric, whose squares are counted as NAME_sq. headline: unit of a metric whose first and last
    value end the run; "" for none, None: it is not told. floor: what is small whatever it was before, advice: what to
    do when it is ten times as large as ever (metrics.py). limits: the range that is no alarm.
    """

    group: str
    column: str = ""
    form: str = "{:8.4f}"
    std_of: str = ""
    headline: str | None = None
    floor: float | None = None
    limits: tuple[float, float] | None = None
    advice: str = ""

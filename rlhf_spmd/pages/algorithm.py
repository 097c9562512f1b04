"""Finds an algorithm by name or file; algorithms/page.py defines the contents of its file. Imports no torch."""

import dataclasses
import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_spmd.algorithms import page
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.functions import COMPANIONS, PageFunction, bound, check_call, words_of
from rlhf_spmd.pages.user_module import calling, described, load_module, modules_in, naming
from rlhf_spmd.plan.calls import Compute, LossCall, Train, Workflow
from rlhf_spmd.plan.runtime_words import PROMPTS, Shape
from rlhf_spmd.plan.workflow import ComputeFunction, Data, Models, Role, trace

# modules in which a call's function is looked up after the page
FUNCTIONS = ("advantages", "group_advantages", "surrogates", "likelihood", "preferences")
NO_PAGES = (  # modules beside the pages
    "page",
    "policy_gradient",
    "off_policy",
    "training_order",
    "masks",
    "logprob_parity",
    "importance",
    "other_surrogates",
    "controllers",
    *FUNCTIONS,
)
STATEFUL = ("State", "initial_state", "read_state", "after_iteration")
OF_WORKFLOW = ("options", "model", "compute")  # and the keys of DATA: what workflow() is called with, by name
OF_ITERATION = ("state", "options", "means", "weights", "num_sequences")  # the same of after_iteration()
Word = Annotated[str, Field(pattern=r"^[^\W\d]\w*$")]  # a name that Python may have, too
WRONG_VALUES = (ValueError, KeyError, TypeError, AttributeError)  # of read_state()


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A loaded algorithm file. `source` is its text, kept in the run folder and compared across ranks."""

    name: str  # of its options on the command line
    from_file: bool  # it does not come with the package
    source: str = field(repr=False)
    module: ModuleType = field(repr=False, compare=False)
    title: str = field(repr=False, compare=False)
    options: type[page.Options] = field(repr=False, compare=False)  # their dataclass
    roles: Mapping[str, Role] = field(repr=False, compare=False)
    data: Mapping[str, str | page.Number | page.AssistantTokens] = field(repr=False, compare=False)  # see page.py
    metrics: Mapping[str, page.Metric] = field(repr=False, compare=False)

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """Roles that may train: those with a learning rate."""
        return tuple(name for name, role in self.roles.items() if role.lr is not None)

    @property
    def prompts(self) -> str:
        """The data set's column of prompts."""
        return str(self.data[PROMPTS])

    @property
    def responses(self) -> dict[str, str]:
        """The responses that the data set has: key -> column."""
        return {key: name for key, name in self.data.items() if isinstance(name, str) and key != PROMPTS}

    @property
    def row_numbers(self) -> dict[str, page.Number]:
        """The numbers of rows that the data set has, by key."""
        return {key: number for key, number in self.data.items() if isinstance(number, page.Number)}

    @property
    def assistant_tokens(self) -> str:
        """The key of page.AssistantTokens; empty if there is none."""
        return next((key for key, value in self.data.items() if isinstance(value, page.AssistantTokens)), "")

    def over(self, metric: str) -> str:
        """Returns how the values of a metric are aggregated in an iteration (page.Metric)."""
        return self.metrics[metric].over if metric in self.metrics else "mean"

    def is_better_lower(self, metric: str) -> bool:
        """Returns whether smaller values of a metric are better."""
        return metric in self.metrics and self.metrics[metric].better == "less"

    @property
    def has_state(self) -> bool:
        return hasattr(self.module, "State")

    def workflow(
        self,
        options: page.Options,
        *,
        replay: bool = False,
        episodes: bool = False,
        routes: frozenset[str] = frozenset(),
    ) -> Workflow:
        """Returns the graph of one iteration. Raises UserError.

        replay: sampling is restricted (top-k, ...).
        episodes: responses have several turns.
        routes: mixtures of experts that train with the experts that they took when they generated.
        """

        def on_symbols(model: Models, compute: ComputeFunction, **data: Data) -> None:
            with self.calling("workflow", self.module.workflow):
                self.module.workflow(options=options, model=model, compute=compute, **data)

        shapes: dict[str, Shape] = {key: "prompt" if key == PROMPTS else "response" for key in self.data}
        shapes |= dict.fromkeys(self.row_numbers, "row")
        shapes |= {self.assistant_tokens: "token"} if self.assistant_tokens else {}
        with naming(f"algorithm {self.name}: "):
            return trace(on_symbols, self.roles, shapes, replay=replay, episodes=episodes, routes=routes)

    def function(self, name: str, module: str = "") -> PageFunction:
        """Finds the function that a call names, and its companions. Raises UserError if there is no such function.

        module: its module; empty: the algorithm file, then those of FUNCTIONS. A companion must be in the module of the
            function, so that a user's function gets none of a shared function of the same name.
        """
        if module and module not in FUNCTIONS:
            raise UserError(f"algorithm {self.name}: {module}.{name}: functions are in {', '.join(FUNCTIONS)}")
        shared = [importlib.import_module(f"rlhf_spmd.algorithms.{place}") for place in FUNCTIONS]
        places = [place for place in [self.module, *shared] if not module or place.__name__.endswith(f".{module}")]
        function = next((getattr(place, name) for place in places if callable(getattr(place, name, None))), None)
        if function is None:
            where = module or f"the algorithm file or in {', '.join(FUNCTIONS)}"
            raise UserError(f"algorithm {self.name}: no function {name} is in {where}; write it there")
        if callable(other := getattr(self.module, name, None)) and other is not function:
            raise UserError(
                f"algorithm {self.name}: its workflow names {module}.{name}, so the {name} of this file would not be "
                f"called: copy the workflow into the file and name {name!r} in it, or rename the function"
            )
        same = [place for place in places if getattr(place, name, None) is function]
        sums, prepare, finish = (
            next((getattr(place, name + suffix) for place in same if hasattr(place, name + suffix)), None)
            for suffix in COMPANIONS
        )
        return PageFunction(name, function, sums, prepare, finish, words_of(function))

    def functions(self, workflow: Workflow) -> dict[str, PageFunction]:
        """Returns the functions of all calls that have one, by the name of the call. Raises UserError."""
        return {
            call.name: self.function(call.function, call.module)
            for call in workflow.calls
            if isinstance(call, Compute | LossCall)
        }

    @property
    def samples(self) -> int:
        """Its default number of responses to a prompt."""
        return int(getattr(self.module, "SAMPLES_PER_PROMPT", 1))

    def refused(self, options: page.Options, *, can_end: bool) -> str:
        """Returns why the algorithm refuses a model whose responses cannot end before max_new_tokens; empty if it does
        not."""
        return self._answer("refused", options=options, can_end=can_end)

    def problem(self, options: page.Options, **sizes: int) -> str:
        """Returns why the algorithm refuses its options in a run of these sizes; empty if it does not.
        sizes: options of the run by name, of which the file asks for some."""
        return self._answer("problem", options=options, **sizes)

    def _answer(self, name: str, **available: Any) -> str:
        """Returns the answer of an optional function of the algorithm file; empty if it has none."""
        function = getattr(self.module, name, None)
        if function is None:
            return ""
        with self.calling(name, function):
            answer: str = function(**bound(function, available))
            return answer

    def calling(
        self, name: str, function: Callable[..., Any], *, lets: tuple[type[Exception], ...] = ()
    ) -> AbstractContextManager[None]:
        """Handles errors of a function that the algorithm names; an error in an algorithm of the package is one of the
        program."""
        if not self.from_file:
            return nullcontext()
        return calling(f"algorithm {self.name}: {name}()", function, "fix the algorithm file", lets=lets)

    # ---- what changes between iterations ----------------------------------------------------------------------------

    @property
    def state_sums(self) -> tuple[str, ...]:
        """The sums of computes from which the state follows; empty: the algorithm file names none."""
        return tuple(getattr(self.module, "STATE_SUMS", ()))

    def initial_state(self, options: page.Options) -> Any:
        """Returns the state before the first iteration; None where nothing changes."""
        return self._state_by("initial_state", options=options)

    def read_state(self, values: Mapping[str, Any]) -> Any:
        """Returns the state of a checkpoint. Raises one of WRONG_VALUES, or UserError if the algorithm raises anything
        else."""
        return self._state_by("read_state", values=values)

    def after_iteration(
        self,
        state: Any,
        options: page.Options,
        means: Mapping[str, float],
        weights: Mapping[str, float],
        num_sequences: int,
    ) -> Any:
        """Returns the state after an iteration, from global numbers only."""
        values = {"means": means, "weights": weights, "num_sequences": num_sequences}
        return self._state_by("after_iteration", state=state, options=options, **values)

    def _state_by(self, name: str, **arguments: Any) -> Any:
        """Returns the state that a function of the algorithm makes; None if it has none. Raises UserError if a user's
        function fails."""
        if not self.has_state:
            return None
        function = getattr(self.module, name)
        with self.calling(name, function, lets=WRONG_VALUES if name == "read_state" else ()):
            state = function(**arguments)
        if not isinstance(state, self.module.State):
            raise UserError(f"algorithm {self.name}: {name}() returned a {type(state).__name__}; return a State")
        return state

    def check_state(self, options: page.Options) -> None:
        """Raises UserError if a checkpoint could not hold the state, or if `after_iteration` cannot be called: both
        would show only after an iteration."""
        if not self.has_state:
            return
        state = self.initial_state(options)
        try:
            inspect.signature(self.module.after_iteration).bind(**dict.fromkeys(OF_ITERATION))
            if self.read_state(json.loads(json.dumps(dataclasses.asdict(state)))) != state:
                raise ValueError("read_state() makes another State of its values")
        except (*WRONG_VALUES, RecursionError) as error:
            raise UserError(
                f"algorithm {self.name}: the state cannot be kept in a checkpoint, as JSON, or after_iteration does "
                f"not take {', '.join(OF_ITERATION)} by these names: {described(error, self.module.read_state)}"
            ) from None

    def numbers(self, options: page.Options, state: Any) -> dict[str, Any]:
        """Returns the arguments of functions besides data, by name: every option and every part of the state."""
        sources = [options] if state is None else [options, state]
        return {part.name: getattr(source, part.name) for source in sources for part in dataclasses.fields(source)}


def check_functions(algorithm: Algorithm, workflow: Workflow, options: page.Options) -> None:
    """Raises UserError if a call gives a function an unknown argument, or lacks one that the function needs, or if the
    state is not one."""
    algorithm.check_state(options)
    numbers = algorithm.numbers(options, algorithm.initial_state(options))
    for call in workflow.calls:
        if isinstance(call, Compute | Train):
            with naming(f"algorithm {algorithm.name}: "):
                check_call(algorithm.function(call.function, call.module), workflow, call, numbers)


def algorithm_names() -> list[str]:
    """Returns the algorithms that come with the package."""
    return modules_in("rlhf_spmd.algorithms", besides=NO_PAGES)


def load_algorithm(name: str, title: str | None = None) -> Algorithm:
    """Loads an algorithm by name (`ppo`) or by file (`path/to/mine.py`). title: the name of its options (None: that of
    the file). Raises UserError naming the error."""
    stem, from_file = Path(name).stem, name.endswith(".py")
    if from_file and not stem.isidentifier():
        raise UserError(f"algorithm file {name}: its options are {stem}.NAME=value; give it a name of letters")
    module, source = load_module("algorithm", name, "rlhf_spmd.algorithms", algorithm_names())
    if problem := _problem(module):
        raise UserError(
            f"algorithm {name}: {problem}; rlhf_spmd/algorithms/page.py says what an algorithm file contains"
        )
    return Algorithm(
        name=title or stem,
        from_file=from_file,
        source=source,
        module=module,
        title=module.TITLE,
        options=module.Options,
        roles=module.ROLES,
        data=module.DATA,
        metrics=module.METRICS,
    )


class _Page(BaseModel):
    """The types of the contents of an algorithm file; page.py explains them."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True, revalidate_instances="always")

    TITLE: Annotated[str, Field(pattern=r"^[^\n]*\S[^\n]*$")]
    Options: type[page.Options]
    ROLES: Annotated[dict[Word, Role], Field(min_length=1)]
    DATA: dict[Word, str | page.Number | page.AssistantTokens]
    METRICS: dict[str, page.Metric]
    workflow: Callable[..., Any]


def _problem(module: ModuleType) -> str:
    """Returns the first mistake in an algorithm file; empty: none."""
    try:
        _Page.model_validate({name: getattr(module, name) for name in _Page.model_fields if hasattr(module, name)})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']} (it is {first['input']!r:.60})"
    if "__dataclass_fields__" not in vars(module.Options):  # @dataclass is not inherited
        return "Options is not a dataclass of its own: write @dataclass before it"
    words = (*OF_WORKFLOW, *module.DATA)
    columns = [key for key, column in module.DATA.items() if isinstance(column, str)]
    roles = module.ROLES
    try:
        module.Options()
        for metric in module.METRICS.values():
            metric.form.format(0.0)
        inspect.signature(module.workflow).bind(**dict.fromkeys(words))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        return (
            "each option needs a default, each form of METRICS writes a number, and workflow() is called with "
            f"{', '.join(words)} by their names ({error})"
        )
    if PROMPTS not in columns:
        return f"DATA has no {PROMPTS} with the name of a column"
    if len(columns) != 2 and any(isinstance(column, page.AssistantTokens) for column in module.DATA.values()):
        return "DATA has AssistantTokens, which are for one key of responses"
    if len({hasattr(module, name) for name in STATEFUL}) > 1:
        return f"it has some of {', '.join(STATEFUL)} and not all of them"
    for name, role in roles.items():
        if role.lr is not None and not 0 < role.lr < math.inf or not set(role.starts_from) <= roles.keys():
            starts = ", ".join(role.starts_from) or "none"
            return (
                f"the role {name} has lr={role.lr!r} and starts from {starts}: give a positive number, or None if it "
                "never trains, and roles of this file"
            )
    return ""

"""The workflow: calling an algorithm with symbolic values records its calls; edges come from the data keys alone.

A *call*, a node of this graph, is one use of a model (Generate, Infer, Train) or a pure computation on data (Compute,
which has no model and runs wherever its results are consumed).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, Protocol, get_args

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.runtime_words import (
    LOGPROBS,
    READOUTS,
    SCORES,
    Shape,
    actions_of,
    generated_keys,
    opened_of,
    rewards_of,
)

Scope = Literal["row", "group", "mini_batch", "batch"]
STOP_TYPES = ([str, float], [str, int])  # name of a logged sum, limit
DIVISORS = ("tokens", "responses", "rows")
COLDEST = 1e-6  # temperature, besides 0: below it the rounding of a logit in float32 (2e-6 of 16 to 32) counts in nats
NOTHING_REPEATED = (
    "precomputed logprobs are those that a frozen model gives the responses of the data set, and this algorithm has "
    "no such model"
)
MAX_RESPONSES = 2  # response keys that one call of a model reads, e.g. of a pair


@dataclass(frozen=True, slots=True)
class Role:
    """A model of an algorithm.

    head: the output, logits (`lm`) or one number per token (`scalar`; zeros at first if the model trains and its folder
        has no such head).
    lr: default learning rate; None: the model never trains.
    starts_from: roles whose folder it is read from if it has none of its own: the first one with a folder and the first
        role's tokenizer.
    judge: it scores whole responses, so a reward function may replace it, and with another tokenizer it reads text.
    saved: the trained model is written as a Hugging Face folder at the end of a run.
    """

    head: Literal["lm", "scalar"]
    lr: float | None = None
    starts_from: tuple[str, ...] = ()
    judge: bool = False
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    """A symbolic value: the key under which every rank's store holds its rows.

    kept, logprobs, model: for generated responses, the keys of their sampling supports and logprobs, and the model that
        made them.
    """

    key: str
    kept: str = ""
    logprobs: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class _ModelCall:
    """A use of a model.

    name: of the call, in a workflow.
    function: what is computed, e.g. "logprobs", or a loss.
    inputs, outputs: all keys that it reads and makes.
    tokens: the inputs that the model's sequences consist of: prompts, then one or two keys of responses.
    """

    name: str
    model: str
    kind: Literal["generate", "infer", "train"] = field(init=False)
    function: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tokens: tuple[str, ...]

    @property
    def prompts(self) -> str:
        """The key of the prompts."""
        return self.tokens[0]

    @property
    def responses(self) -> tuple[str, ...]:
        """The keys of the responses that are read."""
        return self.tokens[1:]

    @property
    def num_sequences(self) -> int:
        """Sequences that the model reads for each row."""
        return max(1, len(self.responses))


@dataclass(frozen=True, slots=True)
class _LossCall(_ModelCall):
    """A model call that computes a loss.

    arguments: parameter of the loss -> key.
    drawn: the key of the generator's logprobs, which training compares with its own.
    kept: the key of the sampling supports.
    only: the key of numbers that are 0 for rows that are not trained on.
    divisor: the loss of a mini-batch is divided by its response tokens, responses or rows, or by the sum of a key's
        numbers.
    stop: (name of a mean, limit); beyond it the model's remaining steps of the iteration are skipped.
    entropy: whether the loss reads it.
    loglinear: whether its old logprobs lie between the generator's and the current ones, at the share that the loss
        gets as `lag_share`.
    module: that the loss is from; empty: it is looked up.
    """

    arguments: tuple[tuple[str, str], ...] = ()
    drawn: str = ""
    kept: str = ""
    only: str = ""
    divisor: str = "tokens"
    stop: tuple[str, float] | None = None
    entropy: bool = False
    module: str = field(default="", repr=False)
    loglinear: bool = False


@dataclass(frozen=True, slots=True)
class Generate(_ModelCall):
    """Samples responses. temperature: if not that of the options."""

    kind: Literal["generate"] = field(default="generate", init=False)
    temperature: float | None = None

    @property
    def has_turns(self) -> bool:
        """Whether responses are episodes of several turns."""
        return actions_of(self.outputs[0]) in self.outputs


@dataclass(frozen=True, slots=True)
class Infer(_ModelCall):
    """A forward pass without gradients that makes one key.

    kept: the key of the sampling supports.
    current: where the next batch is drawn while one trains, it belongs to training, and has the weights with which that
        begins; else it has the weights that drew.
    drawn: the key of the generator's logprobs, with which the parity gate compares the result; a call without outputs
        does nothing else, for the first mini-batch (program/ahead.py).
    """

    kind: Literal["infer"] = field(default="infer", init=False)
    kept: str = ""
    current: bool = False
    drawn: str = ""


@dataclass(frozen=True, slots=True)
class Train(_LossCall):
    """Optimizer steps on a loss."""

    kind: Literal["train"] = field(default="train", init=False)


@dataclass(frozen=True, slots=True)
class Measure(_LossCall):
    """A forward pass without gradients that logs a loss, in the program of an evaluation."""

    kind: Literal["infer"] = field(default="infer", init=False)


@dataclass(frozen=True, slots=True)
class Compute:
    """A pure computation on data.

    arguments: parameter of the function -> key.
    scope: the rows that it must see at once to make one of them.
    sums: whether it ends with sums over the whole batch.
    module: that the function is from; empty: it is looked up.
    """

    name: str
    model: None = field(default=None, init=False)
    kind: Literal["compute"] = field(default="compute", init=False)
    function: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: tuple[tuple[str, str], ...] = ()
    scope: Scope = "row"
    sums: bool = False
    module: str = field(default="", repr=False)


LossCall = Train | Measure
ModelCall = Generate | Infer | Train | Measure
Call = ModelCall | Compute


@dataclass(frozen=True, slots=True)
class Workflow:
    """Calls in the order in which the algorithm makes them, which is a topological order."""

    calls: tuple[Call, ...]
    given: tuple[str, ...]  # keys that exist before the first call, on every rank
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of every key
    heads: Mapping[str, str] = field(default_factory=dict)  # of every model
    _by_name: dict[str, Call] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {call.name: call for call in self.calls})

    @property
    def models(self) -> tuple[str, ...]:
        """Models in order of first use."""
        return tuple(dict.fromkeys(call.model for call in self.calls if call.model))

    @property
    def placed_calls(self) -> tuple[ModelCall, ...]:
        """Calls that a strategy must place: those of models."""
        return tuple(call for call in self.calls if not isinstance(call, Compute))

    @property
    def computes(self) -> tuple[Compute, ...]:
        """Calls without a model."""
        return tuple(call for call in self.calls if isinstance(call, Compute))

    @property
    def generate_calls(self) -> tuple[Generate, ...]:
        """Calls that sample responses."""
        return tuple(call for call in self.calls if isinstance(call, Generate))

    @property
    def train_calls(self) -> tuple[Train, ...]:
        """Calls that train."""
        return tuple(call for call in self.calls if isinstance(call, Train))

    @property
    def trained_models(self) -> tuple[str, ...]:
        """Models that some call trains, in order of first use."""
        return tuple(model for model in self.models if self.train_call(model))

    @property
    def frozen_models(self) -> tuple[str, ...]:
        """Models that nothing trains, in order of first use."""
        return tuple(model for model in self.models if not self.train_call(model))

    @property
    def frozen_calls(self) -> tuple[ModelCall, ...]:
        """Calls of models that nothing trains."""
        return tuple(call for call in self.placed_calls if not self.train_call(call.model))

    @property
    def repeated_calls(self) -> tuple[Infer, ...]:
        """Calls that give a row the same logprobs in every iteration: those of frozen models that read given rows."""
        found = (call for call in self.frozen_calls if isinstance(call, Infer) and call.function == LOGPROBS)
        return tuple(call for call in found if set(call.inputs) <= set(self.given))

    def without(self, calls: Sequence[Call]) -> "Workflow":
        """Returns a workflow in which the results of these calls are given."""
        outputs = tuple(key for call in calls for key in call.outputs)
        left = tuple(call for call in self.calls if call not in calls)
        return replace(self, calls=left, given=(*self.given, *outputs))

    def independent(self, calls: Sequence[Call]) -> bool:
        """Returns whether none of these calls depends on another one of them, directly or through other calls."""
        made: set[str] = set()
        names = {call.name for call in calls}
        for call in self.calls:
            reads = bool(made & set(call.inputs))
            if reads and call.name in names:
                return False
            made |= set(call.outputs) if reads or call.name in names else set()
        return True

    def call(self, name: str) -> Call:
        """Returns the call of a name. Raises KeyError if there is none."""
        return self._by_name[name]

    def placed_call(self, name: str) -> ModelCall:
        """Returns the call of a model that has a name. Raises KeyError if there is none."""
        call = self._by_name[name]
        assert not isinstance(call, Compute), f"{name} has no model"
        return call

    def train_call(self, model: str) -> Train | None:
        """Returns the call that trains a model, or None."""
        return next((call for call in self.calls if call.model == model and isinstance(call, Train)), None)

    def producer(self, key: str) -> Call | None:
        """Returns the call that makes a key; None for given keys."""
        return next((call for call in self.calls if key in call.outputs), None)

    def consumers(self, keys: tuple[str, ...]) -> tuple[Call, ...]:
        """Calls that read any of the keys."""
        return tuple(call for call in self.calls if set(keys) & set(call.inputs))


def trains(call: Call, workflow: Workflow) -> bool:
    """Returns whether a call belongs to the training of a batch: it trains, it infers with the weights with which
    training begins, or it is a compute that only such calls read, which therefore has the state of the iteration that
    trains."""
    if not isinstance(call, Compute):
        return isinstance(call, Train) or is_current(call)
    readers = workflow.consumers(call.outputs)
    return bool(readers) and all(trains(reader, workflow) for reader in readers)


def is_current(call: Call | None) -> bool:
    """Returns whether a call infers with the weights with which the training of its batch begins."""
    return isinstance(call, Infer) and call.current


def is_gate(call: Call) -> bool:
    """Returns whether a call only compares the generator's logprobs with its own, for the first mini-batch."""
    return isinstance(call, Infer) and not call.outputs


def is_read_by_both(call: Call, workflow: Workflow) -> bool:
    """Returns whether a compute is read by calls that train a batch and by calls that draw one."""
    readers = {trains(reader, workflow) for reader in workflow.consumers(call.outputs)}
    return isinstance(call, Compute) and len(readers) == 2


@dataclass(slots=True)
class Recorder:
    """Collects calls while the algorithm runs on symbolic values.

    replay: sampling is restricted (top-k, ...), so every pass over generated responses also reads their sampling
        supports.
    episodes: responses have several turns, so every call with a mask of responses also reads which of their tokens were
        drawn.
    """

    roles: Mapping[str, Role]
    shapes: dict[str, Shape]
    replay: bool = False
    episodes: bool = False
    calls: list[Call] = field(default_factory=list)

    def model(self, name: str) -> "Model":
        """Returns a symbolic model. Raises UserError if no role has this name."""
        if name not in self.roles:
            raise UserError(f"the workflow uses the model {name!r}; ROLES has {', '.join(self.roles)}")
        return Model(name, self)

    def expect(self, call: str, prompts: Data, *responses: Data) -> None:
        """Raises UserError unless these are prompts and responses."""
        for value, shape in ((prompts, "prompt"), *((one, "response") for one in responses)):
            found = self.shapes.get(value.key) if isinstance(value, Data) else None
            if found != shape:
                what = value.key if isinstance(value, Data) else f"{value!r:.40}"
                raise UserError(f"{call}: {what} is not a {shape}; the order is prompts, then responses")

    def turns_of(self, keys: Iterable[str], *, rewards: bool = False) -> tuple[str, ...]:
        """Returns the keys that say which tokens of responses were drawn and, on request, the rewards of turns; none
        where responses have one turn. keys: any."""
        wanted = (of(key) for of in (actions_of, *([rewards_of] if rewards else [])) for key in keys)
        return tuple(key for key in wanted if key in self.shapes)

    def tokens_of(self, call: str, prompts: Data, responses: Sequence[Data]) -> tuple[str, ...]:
        """Returns the keys of the sequences that a call reads. Raises UserError for two episodes, which have two
        prompts."""
        opened = [key for key in (opened_of(one.key) for one in responses) if key in self.shapes]
        if opened and len(responses) > 1:
            raise UserError(
                f"{call} reads two responses to one prompt, which an environment opens for each; drop environment"
            )
        return (*(opened or [prompts.key]), *(one.key for one in responses))

    def record(self, call: Call, shapes: Mapping[str, Shape]) -> None:
        """Adds a call, renamed if its name is taken, and the shapes of its outputs. Raises UserError if no name is free
        or an output exists already."""
        again = [key for key in shapes if key in self.shapes]
        if again:
            raise UserError(f"the workflow makes {', '.join(again)} twice; give the second one another name (output=)")
        taken = {other.name for other in self.calls}
        wishes = [call.name, f"{call.name}_{call.function}", *(f"{call.name}_{key}" for key in call.outputs)]
        name = next((wish for wish in wishes if wish not in taken), None)
        if name is None:
            raise UserError(f"the workflow has two calls {call.name}; give the second one another name")
        self.calls.append(replace(call, name=name))
        self.shapes |= shapes

    def compute(
        self, function: str, *, makes: Mapping[str, Shape], scope: Scope = "row", sums: bool = False, **arguments: Data
    ) -> Data | tuple[Data, ...]:
        """Records a pure computation on data, e.g. advantages, on the ranks that read its results.

        function: its name; `advantages.estimate_advantages` is that of a file.
        makes: key -> shape of each result.
        arguments: parameter of the function -> data.
        scope: the rows that the function must see at once: one, all samples of a prompt, a mini-batch, the batch.
        sums: the results become final in `FUNCTION_finish`, which gets the sums of `FUNCTION_sums` over the batch.
        """
        keys = tuple((name, _data(function, name, value).key) for name, value in arguments.items())
        _one_of(f"{function}(scope={scope!r})", scope, get_args(Scope))
        for key, shape in makes.items():
            _one_of(f"{function}(makes={{{key!r}: {shape!r}}})", shape, ("token", "token+1", "row"))
        inputs = tuple(dict.fromkeys(key for _, key in keys))
        inputs = tuple(dict.fromkeys((*inputs, *self.turns_of(inputs))))
        module, _, own = function.rpartition(".")
        call = Compute(own, own, inputs, tuple(makes), keys, scope, sums, module)
        self.record(call, makes)
        made = tuple(Data(key) for key in makes)
        return made[0] if len(made) == 1 else made


class ComputeFunction(Protocol):
    """Recorder.compute, as a page sees it: the symbolic value that it makes, or a tuple of several."""

    def __call__(
        self, function: str, *, makes: Mapping[str, Shape], scope: Scope = "row", sums: bool = False, **arguments: Data
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Model:
    """A symbolic model: its methods record calls."""

    name: str
    recorder: Recorder

    def generate(self, prompts: Data, *, name: str = "", temperature: float | None = None) -> tuple[Data, Data]:
        """Samples responses; returns them and the logprobs of their tokens. name: prefix of the keys of a second
        generate call. temperature: replaces generation.temperature; 0 is greedy."""
        self.recorder.expect(f"{self.name}.generate", prompts)
        is_number = isinstance(temperature, int | float) and 0 <= temperature < inf
        if temperature is not None and not is_number:
            raise UserError(f"{self.name}.generate(temperature={temperature!r}): give a number of at least 0, or None")
        check_temperature(f"{self.name}.generate(): temperature", temperature or 0)
        how, tokens = {"replay": self.recorder.replay, "episodes": self.recorder.episodes}, (prompts.key,)
        made = generated_keys(name, **how)
        outputs, wish = tuple(made), f"{self.name}_generate" + (f"_{name}" if name else "")
        call = Generate(wish, self.name, "sample", tokens, outputs, tokens, temperature)
        self.recorder.record(call, made)
        responses, logprobs, *_ = outputs
        kept = next((key for key, shape in made.items() if shape == "kept"), "")
        return Data(responses, kept, logprobs, self.name), Data(logprobs)

    def infer(
        self, function: str, prompts: Data, *responses: Data, output: str | None = None, current: bool = False
    ) -> Data:
        """Records a forward pass without gradients.

        function: the readout (`logprobs` of an lm head, `values` or `scores` of a scalar one).
        output: its key.
        current: with the weights with which training begins, also where the responses are drawn with older ones.
        """
        head, shape = READOUTS.get(function, ("", "row"))
        own = self.recorder.roles[self.name].head
        if head != own:
            known = ", ".join(name for name, (of, _) in READOUTS.items() if of == own)
            raise UserError(f"{self.name}.infer({function!r}): a model with head {own!r} can infer {known}")
        if len(responses) != 1:
            raise UserError(f"{self.name}.infer({function!r}) reads prompts and one key of responses")
        self.recorder.expect(f"{self.name}.infer", prompts, *responses)
        kept = responses[0].kept if function == "logprobs" else ""
        tokens, key = self.recorder.tokens_of(f"{self.name}.infer", prompts, responses), output or function
        turns = self.recorder.turns_of(tokens, rewards=True) if function == SCORES else ()
        inputs = (*tokens, *turns, kept) if kept else (*tokens, *turns)
        if current and self.recorder.roles[self.name].lr is None:
            raise UserError(f"{self.name}.infer({function!r}, current=True): {self.name} does not train; drop current")
        call = Infer(f"{self.name}_infer", self.name, function, inputs, (key,), tokens, kept, current)
        self.recorder.record(call, {key: shape})
        return Data(key)

    def train(
        self,
        function: str,
        prompts: Data,
        *responses: Data,
        divisor: Literal["tokens", "responses", "rows"] | Data = "tokens",
        stop: tuple[str, float] | None = None,
        entropy: bool = False,
        only: Data | None = None,
        loglinear: bool = False,
        **arguments: Data,
    ) -> None:
        """Records optimizer steps on a loss, over all epochs and mini-batches; see Train for the options.

        function: its name; `surrogates.policy_loss` is that of a file.
        only: a number of each row; rows where it is 0 are neither read by the model nor counted in the divisor, and
            their places in the mini-batches stay empty.
        arguments: parameter of the loss -> data.
        """
        if not 1 <= len(responses) <= MAX_RESPONSES:
            raise UserError(f"{self.name}.train({function!r}) reads prompts and one key of responses or two")
        self.recorder.expect(f"{self.name}.train", prompts, *responses)
        counted = self._number(function, "divisor", divisor, ("token", "row")) if isinstance(divisor, Data) else ""
        if not counted:
            _one_of(f"{self.name}.train(divisor={divisor!r})", divisor, DIVISORS)
        if stop is not None and not (isinstance(stop, tuple) and [type(one) for one in stop] in STOP_TYPES):
            raise UserError(f"{self.name}.train(stop={stop!r}): give the name of a logged sum and a limit, or None")
        is_lm = self.recorder.roles[self.name].head == "lm"
        if self.recorder.roles[self.name].lr is None:
            raise UserError(f"the workflow trains {self.name}, whose Role has no learning rate; give it lr=")
        keys = tuple((name, _data(function, name, value).key) for name, value in arguments.items())
        tokens = self.recorder.tokens_of(f"{self.name}.train", prompts, responses)
        sampled = responses[0] if is_lm and len(responses) == 1 else Data("")
        drawn, kept = sampled.logprobs if sampled.model == self.name else "", sampled.kept
        chosen = self._number(function, "only", only, ("row",)) if only is not None else ""
        others = filter(None, (drawn, kept, chosen, counted, *self.recorder.turns_of(tokens)))
        inputs = tuple(dict.fromkeys((*tokens, *(key for _, key in keys), *others)))
        module, _, own = function.rpartition(".")
        options = keys, drawn, kept, chosen, counted or str(divisor), stop, entropy, module, loglinear
        self.recorder.record(Train(f"{self.name}_train", self.name, own, inputs, (), tokens, *options), {})

    def _number(self, function: str, option: str, value: object, shapes: Sequence[Shape]) -> str:
        """Returns the key of numbers of some shapes. Raises UserError for others."""
        key = _data(function, option, value).key
        where = f"{self.name}.train({function!r}, {option}={key})"
        _one_of(f"{where}: it must be a number, of a shape", self.recorder.shapes[key], shapes)
        return key


def _one_of(where: str, word: object, known: Sequence[str]) -> None:
    """Raises UserError unless a word is one of the known ones."""
    if word not in known:
        raise UserError(f"{where}: choose one of {', '.join(known)}")


def _data(function: str, name: str, value: object) -> Data:
    if not isinstance(value, Data):
        raise UserError(
            f"{function}({name}={value!r:.40}): the arguments of a call are data of other calls; numbers are options "
            "of the algorithm, which its functions get by name"
        )
    return value


Models = Callable[[str], Model]  # a role's name -> its symbolic model


def trace(
    workflow: Callable[..., None],
    roles: Mapping[str, Role],
    given: Mapping[str, Shape],
    *,
    replay: bool = False,
    episodes: bool = False,
) -> Workflow:
    """Runs `workflow(model, compute, KEY=...)` on symbolic values and returns what it recorded. Raises UserError for a
    workflow that cannot become a program.

    given: the keys of the data set with their shapes.
    replay, episodes: see Recorder.

    `workflow` gets a function from a role's name to the symbolic `Model`, the recorder's `compute`, and the given data
    by keyword.
    """
    recorder = Recorder(roles, dict(given), replay, episodes)
    workflow(recorder.model, recorder.compute, **{key: Data(key) for key in given})
    heads = {name: role.head for name, role in roles.items()}
    recorded = Workflow(tuple(recorder.calls), tuple(given), recorder.shapes, heads)
    _refuse(recorded)
    return recorded


def check_temperature(name: str, temperature: float, *, or_zero: bool = True) -> None:
    """Raises UserError for a temperature that makes rounding, or infinity, of logits. name: of the option. or_zero: 0
    is another choice."""
    if 0 < temperature < COLDEST:
        raise UserError(
            f"{name}={temperature:g}: logits are divided by it, so that their rounding would count for more than they "
            f"do; give at least {COLDEST:g}{', or 0 for the most likely token' * or_zero}"
        )


def _refuse(workflow: Workflow) -> None:
    """Raises UserError for calls in an order that no program has."""
    trains = workflow.train_calls
    if not trains:
        raise UserError("the workflow trains no model")
    twice = {call.model for call in trains if workflow.train_call(call.model) != call}
    if twice:
        raise UserError(
            f"the workflow trains {', '.join(sorted(twice))} in two calls; put both losses into one function"
        )
    computes = [call for call in workflow.calls if isinstance(call, Compute)]
    unread = [call.name for call in computes if not workflow.consumers(call.outputs)]
    if unread:
        raise UserError(f"nothing reads the results of {', '.join(unread)}; use them in a later call, or drop the call")
    late = [call.name for call in workflow.calls[workflow.calls.index(trains[0]) :] if not isinstance(call, Train)]
    if late:
        raise UserError(f"{', '.join(late)} comes after training; put every other call before the first train call")

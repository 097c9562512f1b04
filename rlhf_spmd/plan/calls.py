"""The workflow: the calls of an algorithm, whose edges come from the data keys alone.

A *call*, a node of this graph, is one use of a model (Generate, Infer, Train) or a pure computation on data (Compute,
which has no model and runs wherever its results are consumed).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.runtime_words import LOGPROBS, Shape, actions_of

COLDEST = 1e-6  # temperature, besides 0: below it the rounding of a logit in float32 (2e-6 of 16 to 32) counts in nats
Scope = Literal["row", "group", "mini_batch", "batch"]
DIVISORS = ("tokens", "responses", "rows")
NOTHING_REPEATED = (
    "precomputed logprobs are those that a frozen model gives the responses of the data set, and this algorithm has "
    "no such model"
)


@dataclass(frozen=True, slots=True)
class _ModelCall:
    """A use of a model.

    name: of the call, in a workflow.
    function: the result that is computed, e.g. "logprobs", or a loss.
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
    current: where the next batch is sampled while one trains, it belongs to training, with the weights with which that
        begins; else it has the weights that sampled.
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
    rounds: how often rows are sampled, at most, until it makes 0 for all of them (program/rounds.py).
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
    rounds: int = 1


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
    """Returns whether a compute is read by calls that train a batch and by calls that sample one."""
    readers = {trains(reader, workflow) for reader in workflow.consumers(call.outputs)}
    return isinstance(call, Compute) and len(readers) == 2


def check_temperature(name: str, temperature: float, *, or_zero: bool = True) -> None:
    """Raises UserError for a temperature that makes rounding, or infinity, of logits. name: of the option. or_zero: 0
    is another choice."""
    if 0 < temperature < COLDEST:
        raise UserError(
            f"{name}={temperature:g}: logits are divided by it, so that their rounding would count for more than they "
            f"do; give at least {COLDEST:g}{', or 0 for the most likely token' * or_zero}"
        )

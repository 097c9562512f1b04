"""The workflow: calling an algorithm with symbolic values records its calls; edges come from the data keys alone.

A *call* is one use of a model (`generate`, `infer`, `train`) or a pure computation on data (`compute`, which has no
model and runs wherever its results are consumed). A node of the graph is a call; nobody writes an edge by hand.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

TOKEN_KEYS = ("prompts", "responses")  # what the shapes of a forward follow from


@dataclass(frozen=True, slots=True)
class Data:
    """A symbolic value: the key under which every rank's store holds its rows."""

    key: str


@dataclass(frozen=True, slots=True)
class Call:
    """One node of the workflow. `function` names what is computed (e.g. "logprobs", "policy_loss")."""

    name: str
    model: str | None
    kind: str  # generate | infer | train | compute
    function: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workflow:
    """Calls in the order in which the algorithm states them, which is a topological order."""

    calls: tuple[Call, ...]
    given: tuple[str, ...]  # keys that exist before the first call, on every rank

    @property
    def models(self) -> tuple[str, ...]:
        """Models in order of first use."""
        return tuple(dict.fromkeys(call.model for call in self.calls if call.model))

    @property
    def placed_calls(self) -> tuple[Call, ...]:
        """Calls that a strategy must place: all but `compute`."""
        return tuple(call for call in self.calls if call.kind != "compute")

    @property
    def generate_calls(self) -> tuple[Call, ...]:
        """Calls that sample responses."""
        return tuple(call for call in self.calls if call.kind == "generate")

    def call(self, name: str) -> Call:
        return next(call for call in self.calls if call.name == name)

    def train_call(self, model: str) -> Call | None:
        """The call that trains a model, or None."""
        return next((call for call in self.calls if call.model == model and call.kind == "train"), None)

    def producer(self, key: str) -> Call | None:
        """The call that makes a key; None for given keys."""
        return next((call for call in self.calls if key in call.outputs), None)

    def consumers(self, keys: tuple[str, ...]) -> tuple[Call, ...]:
        """Calls that read any of the keys."""
        return tuple(call for call in self.calls if set(keys) & set(call.inputs))


@dataclass(slots=True)
class Recorder:
    """Collects calls while the algorithm runs on symbolic values."""

    calls: list[Call] = field(default_factory=list)

    def record(self, model, kind, function, inputs, outputs) -> tuple[Data, ...]:
        owner = model or function
        name = f"{owner}_{kind}" if model else function
        taken = sum(call.name == name or call.name.startswith(f"{name}_") for call in self.calls)
        name = name if not taken else f"{name}_{function}"
        made = {key for call in self.calls for key in call.outputs}
        assert not made & set(outputs), f"call {name} makes {sorted(made & set(outputs))} a second time"
        self.calls.append(Call(name, model, kind, function, tuple(data.key for data in inputs), tuple(outputs)))
        return tuple(Data(key) for key in outputs)

    def compute(self, function: str, inputs: tuple[Data, ...], outputs: tuple[str, ...]) -> tuple[Data, ...]:
        """A pure computation on data, e.g. advantages; runs on the ranks that consume its outputs."""
        return self.record(None, "compute", function, inputs, outputs)


@dataclass(frozen=True, slots=True)
class Model:
    """A symbolic model: its methods record calls."""

    name: str
    recorder: Recorder

    def generate(self, prompts: Data, *, replay: bool = False) -> tuple[Data, ...]:
        """Sample responses and the logprobs of their tokens; with `replay` also the set each token was drawn from."""
        outputs = ("responses", "logprobs", *(("kept_tokens",) if replay else ()))
        return self.recorder.record(self.name, "generate", "sample", (prompts,), outputs)

    def infer(self, function: str, *inputs: Data, output: str | None = None) -> Data:
        """A forward pass without gradients; `function` names what is computed, `output` its key."""
        return self.recorder.record(self.name, "infer", function, inputs, (output or function,))[0]

    def train(self, function: str, *inputs: Data) -> None:
        """Optimizer steps on the loss named `function`, over all epochs and mini-batches."""
        self.recorder.record(self.name, "train", function, inputs, ())


def trace(workflow: Callable[..., None]) -> Workflow:
    """Runs `workflow(models, prompts)` on symbolic values and returns what it recorded.

    `workflow` gets a function from model name to symbolic `Model`, the recorder's `compute`, and the given data.
    """
    recorder = Recorder()
    workflow(lambda name: Model(name, recorder), recorder.compute, Data("prompts"))
    return Workflow(tuple(recorder.calls), ("prompts",))

"""Records the workflow of an algorithm: calling it with symbolic values makes its calls (calls.py)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, get_args

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import DIVISORS, Call, Compute, Generate, Infer, Scope, Train, Workflow, check_temperature
from rlhf_spmd.plan.runtime_words import (
    LOGPROBS,
    READOUTS,
    SCORES,
    Shape,
    actions_of,
    generated_keys,
    opened_of,
    rewards_of,
    routes_of,
)

STOP_TYPES = ([str, float], [str, int])  # name of a logged sum, limit
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


@dataclass(slots=True)
class Recorder:
    """Collects calls while the algorithm runs on symbolic values.

    replay: sampling is restricted (top-k, ...), so every pass over generated responses also reads their sampling
        supports.
    episodes: responses have several turns, so every call with a mask of responses also reads which of their tokens were
        drawn.
    routes: mixtures of experts that train, and infer logprobs, with the experts that they took when they generated.
    """

    roles: Mapping[str, Role]
    shapes: dict[str, Shape]
    replay: bool = False
    episodes: bool = False
    routes: frozenset[str] = frozenset()
    calls: list[Call] = field(default_factory=list)

    def model(self, name: str) -> "Model":
        """Returns a symbolic model. Raises UserError if no role has this name."""
        if name not in self.roles:
            raise UserError(f"the workflow uses the model {name!r}; ROLES has {', '.join(self.roles)}")
        return Model(name, self)

    def expect(self, call: str, prompts: Data, *responses: Data) -> None:
        """Raises UserError unless these are prompts and responses."""
        for value, shape in ((prompts, "prompt"), *((response, "response") for response in responses)):
            if self.shapes.get(_data(call, shape, value).key) != shape:
                raise UserError(f"{call}: {value.key} is not a {shape}; the order is prompts, then responses")

    def turns_of(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns the keys that mark which tokens of responses were sampled; none where responses have one turn. keys:
        any."""
        return tuple(key for key in map(actions_of, keys) if key in self.shapes)

    def routes_of(self, model: str, responses: Sequence[Data]) -> tuple[str, ...]:
        """Returns the key of the experts that a model took when it generated the only response that it reads, if
        any."""
        keys = [routes_of(one.key) for one in responses if one.model == model and len(responses) == 1]
        return tuple(key for key in keys if key in self.shapes)

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
        self,
        function: str,
        *,
        makes: Mapping[str, Shape],
        scope: Scope = "row",
        sums: bool = False,
        rounds: int = 1,
        **arguments: Data,
    ) -> Data | tuple[Data, ...]:
        """Records a pure computation on data, e.g. advantages, on the ranks that read its results.

        function: its name; `advantages.estimate_advantages` is that of a file.
        makes: key -> shape of each result.
        arguments: parameter of the function -> data.
        scope: the rows that the function must see at once: one, all samples of a prompt, a mini-batch, the batch.
        sums: the results become final in `FUNCTION_finish`, which gets the sums of `FUNCTION_sums` over the batch.
        rounds: above 1, groups for which the result is not 0 are sampled again with further prompts, so that rows are
            sampled that often at most.
        """
        keys = tuple((name, _data(function, name, value).key) for name, value in arguments.items())
        _one_of(f"{function}(scope={scope!r})", scope, get_args(Scope))
        for key, shape in makes.items():
            _one_of(f"{function}(makes={{{key!r}: {shape!r}}})", shape, ("token", "token+1", "row"))
        inputs = tuple(dict.fromkeys(key for _, key in keys))
        inputs = tuple(dict.fromkeys((*inputs, *self.turns_of(inputs))))
        module, _, own = function.rpartition(".")
        call = Compute(own, own, inputs, tuple(makes), keys, scope, sums, module, rounds)
        drawn = any(isinstance(other, Generate) and set(other.outputs) & set(inputs) for other in self.calls)
        others = any(isinstance(other, Compute) and other.rounds > 1 for other in self.calls)
        if rounds > 1 and (scope != "group" or sums or list(makes.values()) != ["row"] or not drawn or others):
            raise UserError(
                f"{function}(rounds={rounds}): groups are sampled again by one compute with scope='group', without "
                "sums, which reads what a generate call makes, and makes one number of each row"
            )
        self.record(call, makes)
        made = tuple(Data(key) for key in makes)
        return made[0] if len(made) == 1 else made


ComputeFunction = Callable[
    ..., Any
]  # Recorder.compute: returns the symbolic value that it makes, or a tuple of several


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
        how = {"replay": self.recorder.replay, "episodes": self.recorder.episodes}
        made = generated_keys(name, **how, routes=self.name in self.recorder.routes)
        outputs, wish, tokens = tuple(made), "_".join(filter(None, (self.name, "generate", name))), (prompts.key,)
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
        current: with the weights with which training begins, also where the responses are sampled with older ones.
        """
        (head, shape), role = READOUTS.get(function, ("", "row")), self.recorder.roles[self.name]
        if head != role.head:
            known = ", ".join(name for name, (of, _) in READOUTS.items() if of == role.head)
            raise UserError(f"{self.name}.infer({function!r}): a model with head {role.head!r} can infer {known}")
        if len(responses) != 1:
            raise UserError(f"{self.name}.infer({function!r}) reads prompts and one key of responses")
        self.recorder.expect(f"{self.name}.infer", prompts, *responses)
        kept = responses[0].kept if function == LOGPROBS else ""
        tokens, key = self.recorder.tokens_of(f"{self.name}.infer", prompts, responses), output or function
        turns = self.recorder.turns_of(tokens) if function == SCORES else ()
        rewards = (rewards_of(key) for key in tokens if function == SCORES and rewards_of(key) in self.recorder.shapes)
        if current and role.lr is None:
            raise UserError(f"{self.name}.infer({function!r}, current=True): {self.name} does not train; drop current")
        routes = self.recorder.routes_of(self.name, responses) if function == LOGPROBS else ()
        inputs = (*tokens, *turns, *rewards, *filter(None, [kept]), *routes)
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
        if stop is not None and not (isinstance(stop, tuple) and [type(part) for part in stop] in STOP_TYPES):
            raise UserError(f"{self.name}.train(stop={stop!r}): give the name of a logged sum and a limit, or None")
        is_lm = self.recorder.roles[self.name].head == "lm"
        if self.recorder.roles[self.name].lr is None:
            raise UserError(f"the workflow trains {self.name}, whose Role has no learning rate; give it lr=")
        keys = tuple((name, _data(function, name, value).key) for name, value in arguments.items())
        tokens = self.recorder.tokens_of(f"{self.name}.train", prompts, responses)
        sampled = responses[0] if is_lm and len(responses) == 1 else Data("")
        drawn, kept = sampled.logprobs if sampled.model == self.name else "", sampled.kept
        chosen = self._number(function, "only", only, ("row",)) if only is not None else ""
        routes = self.recorder.routes_of(self.name, responses)
        others = filter(None, (drawn, kept, chosen, counted, *self.recorder.turns_of(tokens), *routes))
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
    routes: frozenset[str] = frozenset(),
) -> Workflow:
    """Runs `workflow(model, compute, KEY=...)` on symbolic values and returns the workflow. Raises UserError for a
    workflow that cannot become a program.

    given: the keys of the data set with their shapes.
    replay, episodes, routes: see Recorder.

    `workflow` gets a function from a role's name to the symbolic `Model`, the recorder's `compute`, and the given data
    by keyword.
    """
    recorder = Recorder(roles, dict(given), replay, episodes, routes)
    workflow(recorder.model, recorder.compute, **{key: Data(key) for key in given})
    heads = {name: role.head for name, role in roles.items()}
    recorded = Workflow(tuple(recorder.calls), tuple(given), recorder.shapes, heads)
    _refuse(recorded)
    return _without_unread_routes(recorded)


def _without_unread_routes(workflow: Workflow) -> Workflow:
    """Returns a workflow without routes that no call reads, such as those of responses that are only scored."""
    unread = {key for key, shape in workflow.shapes.items() if shape == "routes" and not workflow.consumers((key,))}
    if not unread:
        return workflow
    calls = (replace(one, outputs=tuple(key for key in one.outputs if key not in unread)) for one in workflow.calls)
    shapes = {key: shape for key, shape in workflow.shapes.items() if key not in unread}
    return replace(workflow, calls=tuple(calls), shapes=shapes)


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
    unread = [call.name for call in computes if call.rounds == 1 and not workflow.consumers(call.outputs)]
    if unread:
        raise UserError(f"nothing reads the results of {', '.join(unread)}; use them in a later call, or drop the call")
    late = [call.name for call in workflow.calls[workflow.calls.index(trains[0]) :] if not isinstance(call, Train)]
    if late:
        raise UserError(f"{', '.join(late)} comes after training; put every other call before the first train call")

"""How the value of another program's option becomes options of this one, by its entry in pages/other_names.toml; and
the functions that entries name.

Each function takes the job, the entry and the value, and returns options with their values, and what the user must do
before they can be used (empty: nothing). It raises `Differs` for a value without a counterpart.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from rlhf_spmd.migration.sources import Source, Value, text_of
from rlhf_spmd.pages.algorithm import Algorithm
from rlhf_spmd.pages.other_names import Kind, Name, find

FREE = re.compile(r"[\w.-]+")  # names of run folders
BETWEEN = re.compile(r"[\s,'\"()\[\]]+")  # values of a list
MOST = 1e9  # of a size
DEVICES = 8  # of a node, where nothing says how many
OFF = ("", "false", "0", "0.0", "1", "1.0", "-1")  # values of what is not used
ALGORITHMS = ("ppo", "grpo", "rloo", "remax", "reinforce_plus_plus", "sft", "dpo", "reward_model", "distill")
FUNCTION_NAMES = {"verl": "compute_score", "openrlhf": "reward_func"}  # by default, of a file
Options = dict[str, Value]
Result = tuple[Options, str]


class Differs(Exception):
    """A value that no option here has.

    kind: what it is then.
    unread: a number was expected, and the value is none: no default may take its place.
    """

    def __init__(self, kind: Kind, why: str, *, unread: bool = False) -> None:
        super().__init__(why)
        self.kind, self.why, self.unread = kind, why, unread


@dataclass(frozen=True, slots=True)
class Job:
    """A configuration of another program, for an algorithm of this one.

    given: its values by the ids of their entries, with that program's defaults.
    """

    source: Source
    page: Algorithm
    given: Mapping[str, Value]

    def text(self, id: str, default: str = "") -> str:
        """Returns a value as text."""
        return text_of(self.given.get(id)) or default

    def number(self, id: str, default: float = 0.0) -> float:
        """Returns a value as a number. Raises Differs if it is none."""
        return number_of(self.text(id, str(default)), id)

    def size(self, id: str, default: float = 0.0) -> int:
        """Returns a whole number above 0. Raises Differs if it is none."""
        number = self.number(id, default)
        if not 1 <= number <= MOST:
            raise Differs("unavailable", f"{id} is not a size above 0", unread=True)
        return round(number)

    def is_so(self, when: Mapping[str, str]) -> bool:
        """Returns whether the conditions of an entry hold."""
        for id, texts in when.items():
            text = self.text(id)
            named = {*text.split(","), "-" if text in ("", "0") else "*"}
            if not named & {*texts.split()}:
                return False
        return True

    @property
    def layout(self) -> str:
        """Nodes and devices of a node."""
        nodes = self.size("nodes", 1)
        return f"{nodes}x{max(1, self.devices // nodes)}"

    @property
    def generates(self) -> bool:
        """Whether the algorithm learns from responses of its own."""
        return not self.page.responses

    @property
    def devices(self) -> int:
        """How many devices it is for."""
        return self.size("processes", self.size("nodes", 1) * self.size("devices", DEVICES))

    @property
    def samples_per_prompt(self) -> int:
        """Responses to a prompt."""
        return self.size("samples_per_prompt", 1) if self.generates else 1

    @property
    def micro_batch(self) -> int:
        """Sequences of a forward pass on one device."""
        return self.size("micro_batch")

    @property
    def mini_batch(self) -> int:
        """Sequences of an optimizer step over all devices."""
        if self.source.program == "trl":
            return self.micro_batch * self.size("accumulation", 1) * self.devices
        return self.size("mini_batch") * (self.samples_per_prompt if self.source.program == "verl" else 1)

    @property
    def rollout_batch(self) -> int:
        """Prompts (or rows) of an iteration."""
        if not self.generates:
            return self.mini_batch
        if self.source.program != "trl":
            return self.size("rollout_batch")
        generated = self.size("steps_per_generation", self.size("accumulation", 1)) * self.micro_batch * self.devices
        return max(1, round(self.size("generation_batch", generated) / self.samples_per_prompt))

    @property
    def responses(self) -> int:
        """Responses of an iteration."""
        return self.rollout_batch * self.samples_per_prompt

    @property
    def steps(self) -> int:
        """Optimizer steps of an iteration."""
        epochs = self.size("*.epochs", 1) if self.generates else 1
        return max(1, round(self.responses / self.mini_batch)) * epochs


def number_of(text: str, name: str) -> float:
    """Returns a text as a number. Raises Differs if it is none."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Differs("unavailable", f"{name} is not a number", unread=True)
    return number


# ---- entries that are data -------------------------------------------------------------------------------------------


def options_of(job: Job, key: str, value: Value) -> Result:
    """Returns the options that an option there becomes, by the first of its entries that is for the algorithm and whose
    conditions hold. Raises Differs if it becomes none."""
    text, algorithm = text_of(value), job.page.name
    is_off = text in OFF
    names = find(job.source.program, key)
    fitting = [name for name in names if not name.of or algorithm in name.of]
    name = next((name for name in fitting or names if job.is_so(name.when)), (fitting or names)[0])
    if name.kind == "unavailable" and is_off:
        raise Differs("no_effect", "it is off")
    if name.kind != "option":
        raise Differs(name.kind, name.why)
    if not text or not job.is_so(name.when):
        raise Differs("no_effect", name.why if text else "it is not set")
    keys = [key for key in (key.replace("*", algorithm) for key in name.ours) if has_option(job.page, key)]
    if not keys or not fitting:
        is_unused = is_off or bool(name.of) or name.ours[0].startswith(("models.", "optimizer."))
        raise Differs("no_effect" if is_unused else "unavailable", name.why or f"{algorithm} has no such option")
    if name.rule:
        return RULES[name.rule](job, name, value)
    options = _values(job, name, keys[:1] if name.first else keys, value)
    is_here = name.type == "path" and all(map(glob, text.split(",")))
    beside = {key.replace("*", algorithm): text for key, text in name.sets.items()}
    return options | beside, "" if is_here else name.later


def has_option(page: Algorithm, key: str) -> bool:
    """Returns whether an algorithm has an option, where that depends on it: its own, and those of its roles."""
    group, _, leaf = key.partition(".")
    if group == "models":
        return leaf in page.roles
    if group == "optimizer" and leaf.endswith("_lr"):
        return leaf.removesuffix("_lr") in page.trained_roles
    return leaf in page.options.__dataclass_fields__ if group == page.name else group not in ALGORITHMS


def _values(job: Job, name: Name, keys: list[str], value: Value) -> Options:
    """Translates a value by the table or the type of its entry."""
    text = text_of(value)
    if name.type == "name" and not FREE.fullmatch(text):
        raise Differs("unavailable", f"{text!r} is not the name of a folder")
    if name.type == "computed":
        return {key: str(getattr(job, key.removeprefix("--"))) for key in keys}
    if name.values:
        return _of_table(job, name, keys, text)
    if name.type in ("text", "mapping", "name", "path"):
        return dict.fromkeys(keys, value if name.type == "mapping" else text)
    texts = [part for part in BETWEEN.split(text.replace("_", ",")) if part]
    numbers = [number_of(part, "it") for part in texts]
    if name.type == "numbers" and len(keys) in (1, len(texts)):
        return dict(zip(keys, texts if len(keys) > 1 else [",".join(texts)], strict=True))
    if len(texts) > 1 and name.type != "largest":
        raise Differs("unavailable", f"{text} is not {len(keys)} numbers")
    return _of_number(job, name, keys, max(numbers), texts[numbers.index(max(numbers))])


def _of_table(job: Job, name: Name, keys: list[str], text: str) -> Options:
    """Looks a value up in the table of its entry, or each value of a list."""
    texts = [name.values.get(part, name.values.get("*")) for part in BETWEEN.split(text.strip("[]"))]
    if None in texts:
        raise Differs("unavailable", f"{name.why or 'a value that is not known'}: {text}")
    joined = ",".join(map(str, texts)).replace("*", job.page.name)
    if not joined:
        raise Differs("no_effect", "that is the default")
    if "=" not in joined:
        return dict.fromkeys(keys, joined)
    options: Options = dict(word.split("=") for word in joined.split())
    if not all(has_option(job.page, key) for key in options):
        raise Differs("unavailable", f"{job.page.name} has no {text}")
    return options


def _of_number(job: Job, name: Name, keys: list[str], number: float, text: str) -> Options:
    """Translates a number.

    text: the number as it is written.
    """
    if name.type == "positive" and number <= name.above:
        if not name.off:
            raise Differs("no_effect", name.why or "it is off")
        text = name.off
    elif number < 1 and name.share:
        return {name.share: text}
    elif name.scale:
        if number < 1:
            raise Differs("unavailable", f"a share of the run: set {keys[0]} to a number of iterations")
        factor = getattr(job, name.scale.removeprefix("1/"))
        text = str(max(1, round(number / factor if name.scale.startswith("1/") else number * factor)))
    return dict.fromkeys(keys, text)


# ---- functions -------------------------------------------------------------------------------------------------------


def reward_function(job: Job, name: Name, value: Value) -> Result:
    """Translates reward functions: of a server, a file, modules, or names that another program knows."""
    text = text_of(value)
    if text.startswith("http"):
        return {"reward_function": "FILE.py:score"}, f"write `score = rlhf_spmd.rewards.remote({text!r})`"
    if text.endswith(".py"):
        function = job.text("function_name", FUNCTION_NAMES.get(job.source.program, "reward_func"))
        return {"reward_function": f"{text}:{function}"}, "" if Path(text).is_file() else "this file is not here"
    modules = re.sub(r"\.(\w+)(?=,|$)", r":\1", text).split(",")
    functions = [part if ":" in part else f"FILE.py:{part}" for part in modules]
    return {"reward_function": ",".join(functions)}, "" if functions == modules else "write these functions into a file"


def mixture(job: Job, name: Name, value: Value) -> Result:
    """Translates several data sets with weights."""
    sets = value.get("datasets") if isinstance(value, dict) else None
    if not isinstance(sets, list) or not all(isinstance(entry, dict) for entry in sets):
        raise Differs("unavailable", "it has no list of data sets")
    ids = ",".join(text_of(entry.get("id", "")) for entry in sets)
    weights = ",".join(text_of(entry.get("weight", "1")) for entry in sets)
    return {"data.prompts": ids, "data.weights": weights}, "give files, one for each data set"


def total_length(job: Job, name: Name, value: Value) -> Result:
    """Splits a limit of prompt and response together: by the one that is given, or a half for each."""
    total = max(2, int(number_of(text_of(value), "it")))
    half = total - total // 2
    response = job.size("generation.max_new_tokens", half) if job.generates else half
    prompt = job.size("data.max_prompt", max(1, total - response))
    return {"data.max_prompt": str(prompt), "generation.max_new_tokens": str(max(1, total - prompt))}, ""


RULES: Mapping[str, Callable[[Job, Name, Value], Result]] = {
    "mixture": mixture,
    "reward_function": reward_function,
    "total_length": total_length,
}

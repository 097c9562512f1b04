"""The arguments of every verb, and the reading of a command line: options with dashes, and KEY=VALUE words."""

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rlhf_spmd.errors import UserError

OWN_JSON = ("rollouts", "coming-from")  # verbs that print no line of JSON as the others do
CHECKED = ("check", "draw", "forecast")  # verbs of strategies, which may stand between options
WORDS = {  # what KEY=VALUE words set -> what help says of them
    "run": "KEY=VALUE words override the preset, e.g. iterations=3 ppo.kl_coef=0.02 strategy.zero=1. Those of a run of "
    "PPO, with the defaults that hold for all presets but where docs/options.md says otherwise:",
    "responses": "A line of a .jsonl file may have fields of its own: max_new_tokens, min_new_tokens, temperature, "
    "top_k, top_p, min_p, stop. KEY=VALUE words, with their defaults:",
}


class Argument(NamedTuple):
    """An argument of a verb: its name and what argparse is told of it."""

    name: str
    settings: dict[str, Any]


class Verb(NamedTuple):
    """A verb. Of arguments in one list only one may be given. words: a key of WORDS, or of other programs (`other`);
    empty: the verb takes none."""

    help: str
    arguments: Sequence[Argument | list[Argument]] = ()
    words: str = ""


def _argument(name: str, text: str, metavar: str | None = None, **settings: Any) -> Argument:
    return Argument(name, {"help": text} | ({"metavar": metavar} if metavar else {}) | settings)


def _flag(name: str, text: str) -> Argument:
    return Argument(name, {"help": text, "action": "store_true"})


def _given(text: str) -> str:
    """A word of the command line that must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty (a variable that is not set?)")
    return text


def _positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _whole(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else _positive(text)


def _replaces(what: str) -> Argument:
    return _flag("--overwrite", f"replace {what}")


RUN = _argument("run", "run folder", "RUN")
JSON = Argument(
    "--json",
    {
        "help": "print the result as a line of JSON, too, or not (default: if the output is no terminal)",
        "action": argparse.BooleanOptionalAction,
    },
)
CLUSTER_OF_RANKS = _argument("--cluster", "device types of the nodes (default: all alike)", "FILE.toml")
CALIBRATION = _argument(
    "--calibration", "measured constants of the machine (default: those shipped for its devices)", "NAME|FILE.json"
)
CONFIG = (
    _argument("--config", "options and names of these; words of the command line replace its values", "FILE.yaml"),
    _argument("--algorithm", "name or file of the algorithm (default: ppo)", "NAME|FILE.py", type=_given),
    _argument("--preset", "named configuration (default: tiny, or with --model one for real models)"),
    _argument("--model", "Hugging Face folder of the first role (PPO: the actor)", "FOLDER"),
)
LAYOUT = (
    _argument("--layout", "N nodes of G devices (default: 1x4)", "NxG", type=_given),
    _argument("--cluster", "nodes of several device types, instead of --layout", "FILE.toml"),
)
DEVICES = (*LAYOUT, _argument("--device-type", "device type (default: the preset's)"))
CALIBRATED_DEVICES = (
    *LAYOUT,
    _argument("--device-type", "device type (default: the calibration's, if it has one, or the preset's)"),
    CALIBRATION,
)
VERBS = {
    "train": Verb(
        "train on the ranks of this MPI world (mpirun -n N ...)",
        (
            _argument("--strategy", "placement of the calls (default: flattening); auto: plan one", "NAME|FILE.py"),
            _argument(
                "--resume",
                "continue the run in this folder from its newest checkpoint; auto: start run --name, or continue it",
                "RUN|auto",
                type=_given,
            ),
            CALIBRATION,
            CLUSTER_OF_RANKS,
            _argument("--runs", "parent of the run folder (default: runs)", "FOLDER"),
            _argument("--name", "name of the run folder (default: date, time and strategy)"),
            _flag("--dry-run", "print the report of `check` for these ranks, and exit"),
            *CONFIG,
        ),
        "run",
    ),
    "generate": Verb(
        "responses to a file of prompts, on one rank or many",
        (
            _argument(
                "--config",
                "options of this verb, and `model`; those of training are ignored, words of the command line win",
                "FILE.yaml",
            ),
            _argument("--model", "Hugging Face checkpoint folder (default: that of --config)", "FOLDER"),
            _argument("--prompts", ".jsonl, .parquet or .txt", "FILE", required=True, type=Path),
            _argument("--out", "one line per response", "FILE.jsonl", required=True, type=Path),
            _replaces("FILE.jsonl if it exists"),
            _argument("--tp", "tensor-parallel ranks per copy of the model (default: 1)", "N"),
            _argument("--dtype", "float32 (default) or bfloat16", "TYPE"),
            _argument("--seed", "random seed (default: 0)", "N"),
        ),
        "responses",
    ),
    "check": Verb(
        "print a placement and prove that its program cannot hang",
        (
            _argument("strategies", "name or FILE.py (default: that of --config)", "STRATEGY", nargs="*"),
            *DEVICES,
            _argument("--rank", "whose instruction list is printed (default: 0)", type=int, default=0),
            *CONFIG,
        ),
        "run",
    ),
    "plan": Verb(
        "search the fastest placement, and write it as a strategy",
        (
            *CALIBRATED_DEVICES,
            _argument("--method", "default: exact", choices=("exact", "two_phase"), default="exact"),
            _argument("--top", "how many plans to show (default: 5)", "N", type=_positive, default=5),
            _argument("--out", "file for the best plan (default: runs/plan-PRESET-LAYOUT.py)", "FILE.py"),
            _argument("--timeline", "draw the forecast timeline of the best plan", "FILE.png"),
            _replaces("these files if they exist"),
            _argument("--measure-top", "under mpirun: run K promising rows as well", "K", type=_positive),
            *CONFIG,
        ),
        "run",
    ),
    "forecast": Verb(
        "seconds, limits and memory of one strategy",
        (
            _argument("strategies", "name or FILE.py (default: of --config)", "STRATEGY", nargs="*"),
            *CALIBRATED_DEVICES,
            _argument("--out", "draw which ranks run which call, and the timeline", "FILE.png"),
            _replaces("FILE.png if it exists"),
            *CONFIG,
        ),
        "run",
    ),
    "draw": Verb(
        "draw which ranks run which call, and forecast timelines",
        (
            _argument("strategies", "names or FILE.py (default: that of --config)", "STRATEGY", nargs="*"),
            *CALIBRATED_DEVICES,
            _argument("--only", "draw only the map or only the timelines", choices=("map", "timelines")),
            _argument("--out", "the picture", "FILE.png", required=True),
            _replaces("FILE.png if it exists"),
            *CONFIG,
        ),
        "run",
    ),
    "precompute": Verb(
        "compute once the logprobs that frozen models give a data set, e.g. DPO's reference (mpirun -n N ...)",
        (
            _argument("--out", "for data.precomputed_logprobs=FILE", "FILE", required=True),
            _replaces("FILE if it exists"),
            _argument("--strategy", "placement of the calls (default: flattening)", "NAME|FILE.py"),
            CLUSTER_OF_RANKS,
            *CONFIG,
        ),
        "run",
    ),
    "evaluate": Verb(
        "evaluate a model once, as a run does (mpirun -n N ...)",
        (
            _argument(
                "--after",
                "random numbers as in a run's evaluation after N iterations (default: 0)",
                "N",
                type=_whole,
                default=0,
            ),
            _argument("--strategy", "placement of the calls (default: flattening)", "NAME|FILE.py"),
            CLUSTER_OF_RANKS,
            *CONFIG,
        ),
        "run",
    ),
    "profile": Verb(
        "measure this machine, for forecasts (mpirun -n N ...)",
        (
            _argument("--out", "the calibration", "FILE.json", required=True),
            _replaces("FILE.json if it exists"),
            *CONFIG,
        ),
        "run",
    ),
    "status": Verb("what the ranks do now", (RUN,)),
    "postmortem": Verb("which rank the others waited for", (RUN,)),
    "rollouts": Verb(
        "show and filter the samples that a run has written (rollouts.every)",
        (
            RUN,
            [
                _argument("--iteration", "its number, from 1 (default: the last one written)", "N", type=int),
                _argument("--evaluation", "the evaluation after N iterations", "N", type=int),
            ],
            _argument(
                "--where",
                "a condition: NAME>=NUMBER (or > < <= = !=), NAME~REGULAR_EXPRESSION; all of several must hold",
                "CONDITION",
                action="append",
                default=[],
            ),
            _argument("--sort", "by a number, ascending", "NAME"),
            _flag("--descending", "with --sort: the largest first"),
            _argument("--limit", "print at most so many rows (default: all)", "N", type=_positive),
            Argument(
                "--json",
                {
                    "help": "print whole rows, with tokens, as lines of JSON; --no-json: nor a line of JSON at the end "
                    "(default: that line, if the output is no terminal)",
                    "action": argparse.BooleanOptionalAction,
                },
            ),
        ),
    ),
    "report": Verb(
        "curves and samples of some runs as one page of HTML",
        (
            _argument("runs", "run folders, in the order of the page", "RUN", nargs="+"),
            _argument("--out", "the page", "FILE.html", required=True),
            _argument("--title", "its heading (default: the names of the runs)"),
            _replaces("FILE.html if it exists"),
        ),
    ),
    "algorithms": Verb("the algorithms that come with the package, with their calls"),
    "coming-from": Verb(
        "print a configuration of TRL, verl or OpenRLHF as a file of options",
        (
            _argument(
                "file_there",
                "its YAML file, or a shell script that starts it; KEY=VALUE words replace its values",
                "FILE",
            ),
            _argument("--program", "default: told from the names of options", choices=("trl", "verl", "openrlhf")),
            _argument("--algorithm", "the algorithm here (default: told from the options)", "NAME"),
        ),
        "other",
    ),
    "convert": Verb(
        "turn a GGUF file into a Hugging Face folder",
        (
            _argument("gguf", "the file", "FILE.gguf", type=Path),
            _argument("folder", "the folder", "FOLDER", type=Path),
        ),
    ),
}


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit: under mpirun every rank would. Options cannot be abbreviated."""

    words = ""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**(settings | {"allow_abbrev": False}))

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the options)")

    def format_help(self) -> str:
        """The help of argparse, and the options that KEY=VALUE words set."""
        return super().format_help() + (_words_help(self.words) if self.words in WORDS else "")


def _words_help(words: str) -> str:
    """The options of a tree, with their defaults and meanings."""
    from rlhf_spmd.config.options import Config
    from rlhf_spmd.pages.option_tree import options_of
    from rlhf_spmd.pages.option_values import text_of
    from rlhf_spmd.runtime.offline.options import GenerateOptions

    width = shutil.get_terminal_size().columns - 2
    lines = [textwrap.fill(WORDS[words], width)]
    options = options_of(Config(preset="") if words == "run" else GenerateOptions())
    options.pop("preset", None)  # it is --preset
    for key, one in options.items():
        text = f"{f'{key}={text_of(one.value)}':<31} {one.meaning}"
        lines.append(textwrap.fill(text, width, initial_indent="  ", subsequent_indent=" " * 34))
    return "\n" + "\n".join(lines) + "\n"


def parser(text: str) -> argparse.ArgumentParser:
    """The parser of all verbs; text: what help says below them."""
    found = _Parser(prog="rlhf_spmd", description="RLHF as one SPMD program.", epilog=text)
    found.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = found.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        of_verb = verbs.add_parser(name, help=verb.help)
        of_verb.words = verb.words
        of_verb.set_defaults(file=None)
        for one in [*verb.arguments, *([] if name in OWN_JSON else [JSON])]:
            group = of_verb if isinstance(one, Argument) else of_verb.add_mutually_exclusive_group()
            for argument in [one] if isinstance(one, Argument) else one:
                group.add_argument(argument.name, **argument.settings)
    return found


def parse(words: Sequence[str], text: str = "") -> argparse.Namespace:
    """The options of a verb; its other words with `=` are overrides. text: see `parser`. Raises UserError."""
    parsed, rest = parser(text).parse_known_args(words)
    if parsed.verb in CHECKED:
        words = parsed.strategies + rest
        names = [word for word in words if not word.startswith("-") and ("=" not in word or word.endswith(".py"))]
        if not names and parsed.config is None:
            raise UserError(
                f"the following arguments are required: STRATEGY (rlhf_spmd {parsed.verb} --help lists the options)"
            )
        if parsed.verb != "draw":
            names = names[:1]
            parsed.strategy = names[0] if names else None
        parsed.strategies, rest = names, [word for word in words if word not in names]
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong:
        raise UserError(
            f"unknown argument {wrong[0]!r}{_hint(wrong[0])}; options start with --, overrides are key=value"
        )
    if rest and not VERBS[parsed.verb].words:
        raise UserError(f"{parsed.verb} takes no overrides such as {rest[0]!r}")
    parsed.overrides = rest
    return parsed


def _hint(word: str) -> str:
    """A suggestion for an unknown word with dashes, for the end of a message."""
    from rlhf_spmd.config.presets import all_keys
    from rlhf_spmd.pages.option_suggestions import suggest_option

    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    if name in all_keys():
        return f" (did you mean {name}=VALUE, without dashes?)"
    return suggest_option(name, (), all_keys())

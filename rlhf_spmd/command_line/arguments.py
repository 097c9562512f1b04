"""The arguments of every subcommand, and the reading of a command line: options with dashes, and KEY=VALUE
arguments."""

import argparse
import math
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.printing import command_lines

PROGRAM, AS_MODULE = "rlhf-spmd", "python -m rlhf_spmd"
OWN_JSON = ("rollouts", "coming-from")  # verbs that print no line of JSON as the others do
CHECKED = ("check", "draw", "forecast", "rehearse")  # verbs of strategies, which may stand between options
WORDS = {  # what KEY=VALUE arguments set -> what help says of them
    "run": "KEY=VALUE arguments set options, e.g. iterations=3 ppo.kl_coef=0.02 strategy.zero=1, and take precedence "
    "over the preset. These are the options of a run of PPO, with their defaults; docs/options.md lists the presets "
    "whose defaults differ, and the options of other algorithms and of the strategies:",
    "responses": "A row of JSON may have fields of its own: max_new_tokens, min_new_tokens, temperature, "
    "top_k, top_p, min_p, stop. KEY=VALUE arguments set these options, here with their defaults:",
}


class Argument(NamedTuple):
    """An argument of a subcommand: its name and what argparse is told of it."""

    name: str
    settings: dict[str, Any]


class Verb(NamedTuple):
    """A subcommand. help: what it does, without the dot of a sentence. Of arguments in one list only one may be given.
    words: a key of WORDS, or of other programs (`other`); empty: the subcommand takes none."""

    help: str
    arguments: Sequence[Argument | list[Argument]] = ()
    words: str = ""


def _argument(name: str, text: str, metavar: str | None = None, **settings: Any) -> Argument:
    return Argument(name, {"help": text} | ({"metavar": metavar} if metavar else {}) | settings)


def _flag(name: str, text: str) -> Argument:
    return Argument(name, {"help": text, "action": "store_true"})


def _given(text: str) -> str:
    """Reads an argument that must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty (a variable that is not set?)")
    return text


def _number(kind: type[int] | type[float], least: float, what: str) -> Callable[[str], float]:
    """Returns a function that reads a number of at least `least`. what: such a number in words."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


_positive = _number(int, 1, "a whole number of at least 1")
_whole = _number(int, 0, "a whole number of at least 0")
_seconds = _number(float, 1e-9, "a number of seconds above 0")


def _replaces(what: str) -> Argument:
    return _flag("--overwrite", f"replace {what}")


RUN = _argument("run", "folder of the run, which `train` printed", "RUN")
JSON = Argument(
    "--json",
    {
        "help": "print the result as a line of JSON, too, or not (default: only if the output is not a terminal)",
        "action": argparse.BooleanOptionalAction,
    },
)
CLUSTER_OF_RANKS = _argument(
    "--cluster", "read the device types of the nodes from a file (default: all nodes are alike)", "FILE.toml"
)
CALIBRATION = _argument(
    "--calibration",
    "constants of the machine, on which forecasts rest (default: those shipped for its devices)",
    "NAME|FILE.json",
)
CONFIG = (
    _argument("--config", "read options from FILE.yaml; arguments on the command line take precedence", "FILE.yaml"),
    _argument("--algorithm", "algorithm, by name or file (default: ppo)", "NAME|FILE.py", type=_given),
    _argument("--preset", "named configuration to start from (default: tiny, or with --model the preset `model`)"),
    _argument("--model", "Hugging Face folder of the model in the first role, such as PPO's actor", "FOLDER"),
)
STRATEGY = _argument("strategies", "name or FILE.py of the strategy (default: that of --config)", "STRATEGY", nargs="?")
PLACEMENT = _argument(
    "--strategy", "placement of the calls, by strategy name or file (default: flattening)", "NAME|FILE.py"
)
SHOW_CONFIG = _flag("--show-config", "print the resolved configuration with the report, as a file for --config")
LAYOUT = (
    _argument("--layout", "assume N nodes of G devices (default: 1x4)", "NxG", type=_given),
    _argument("--cluster", "read nodes of several device types from a file, instead of --layout", "FILE.toml"),
)
DEVICES = (*LAYOUT, _argument("--device-type", "device type to assume (default: the preset's)"))
CALIBRATED_DEVICES = (
    *LAYOUT,
    _argument(
        "--device-type", "device type to assume (default: that of --calibration if it has only one, else the preset's)"
    ),
    CALIBRATION,
)
VERBS = {
    "train": Verb(
        "train models on the ranks of an MPI world (start it with mpirun or srun)",
        (
            _argument(
                "--strategy",
                "placement of the calls, by strategy name or file (default: flattening); auto: plan one",
                "NAME|FILE.py",
            ),
            _argument(
                "--resume",
                "continue the run in this folder from its newest checkpoint; auto: start run --name, or continue it",
                "RUN|auto",
                type=_given,
            ),
            CALIBRATION,
            CLUSTER_OF_RANKS,
            _argument("--runs", "folder in which to make the run folder (default: runs)", "FOLDER"),
            _argument("--name", "name of the run folder (default: date, time and strategy)"),
            _flag("--dry-run", "print the report of `check` for these ranks, and exit"),
            SHOW_CONFIG,
            *CONFIG,
        ),
        "run",
    ),
    "generate": Verb(
        "generate responses to a file of prompts, on one rank or on many (started with mpirun or srun)",
        (
            _argument(
                "--config",
                "read generation options and `model` from FILE.yaml, and ignore those of training; arguments on the "
                "command line take precedence",
                "FILE.yaml",
            ),
            _argument("--model", "Hugging Face folder of the model (default: `model` of --config)", "FOLDER"),
            _argument(
                "--prompts", "file, folder or pattern of prompts, as data.prompts", "FILE", required=True, type=Path
            ),
            _argument("--out", "file to write, with one line per response", "FILE.jsonl", required=True, type=Path),
            _replaces("FILE.jsonl if it exists"),
            _argument("--tp", "number of tensor-parallel ranks per copy of the model (default: 1)", "N"),
            _argument("--dtype", "precision: float32 (default) or bfloat16", "TYPE"),
            _argument("--seed", "seed of the random numbers (default: 0)", "N"),
        ),
        "responses",
    ),
    "check": Verb(
        "print a placement and prove that its program cannot hang",
        (
            STRATEGY,
            *DEVICES,
            _argument("--rank", "rank whose instruction list is printed (default: 0)", type=int, default=0),
            SHOW_CONFIG,
            *CONFIG,
        ),
        "run",
    ),
    "plan": Verb(
        "search the fastest placement, and write it as a strategy",
        (
            *CALIBRATED_DEVICES,
            _argument("--method", "search method (default: exact)", choices=("exact", "two_phase"), default="exact"),
            _argument(
                "--ahead",
                "generate one iteration ahead of training: 0, 1, or auto, which compares both (default: 0)",
                choices=("0", "1", "auto"),
                default="0",
            ),
            _argument("--top", "number of plans to show (default: 5)", "N", type=_positive, default=5),
            _argument("--out", "file to write the best plan to (default: runs/plan-PRESET-LAYOUT.py)", "FILE.py"),
            _argument("--timeline", "draw the forecast timeline of the best plan to this file", "FILE.png"),
            _replaces("these files if they exist"),
            _argument(
                "--measure-top", "also run the K most promising plans (start it with mpirun)", "K", type=_positive
            ),
            *CONFIG,
        ),
        "run",
    ),
    "forecast": Verb(
        "forecast the seconds of one strategy, what limits them, and its memory",
        (
            STRATEGY,
            *CALIBRATED_DEVICES,
            _argument("--out", "draw to this file which ranks run which call, and the timeline", "FILE.png"),
            _replaces("FILE.png if it exists"),
            *CONFIG,
        ),
        "run",
    ),
    "rehearse": Verb(
        "run the processes and messages of a job on this machine, with sleeps in place of computation",
        (
            STRATEGY,
            *CALIBRATED_DEVICES,
            _argument(
                "--iterations",
                "number of iterations, or one ahead of steps between a first batch and a last one (default: 2)",
                "N",
                type=_positive,
                default=2,
            ),
            _argument(
                "--seconds",
                "seconds that an iteration takes here; the more, the less they depend on this machine (default: 15)",
                "S",
                type=_seconds,
                default=15.0,
            ),
            _argument(
                "--deadline",
                "report a hang after S seconds without progress (default: 20)",
                "S",
                type=_seconds,
                default=20.0,
            ),
            _argument("--kill", "end a rank when it begins a call", "RANK@CALL"),
            _argument("--slow", "make a rank compute FACTOR times slower", "RANK=FACTOR", action="append", default=[]),
            _argument("--drop", "lose the messages of the first transfer with this text in its name", "TEXT"),
            _argument("--out", "new folder for the timeline, and the records that `postmortem` reads", "FOLDER"),
            *CONFIG,
        ),
        "run",
    ),
    "draw": Verb(
        "draw which ranks run which call under some strategies, and their forecast timelines",
        (
            _argument(
                "strategies", "names or FILE.py of strategies (default: that of --config)", "STRATEGY", nargs="*"
            ),
            *CALIBRATED_DEVICES,
            _argument("--only", "draw only the map or only the timelines", choices=("map", "timelines")),
            _argument("--out", "file of the picture", "FILE.png", required=True),
            _replaces("FILE.png if it exists"),
            *CONFIG,
        ),
        "run",
    ),
    "evaluate": Verb(
        "evaluate a model once, as a run does (start it with mpirun or srun)",
        (
            _argument(
                "--after",
                "use the random numbers of a run's evaluation after N iterations (default: 0)",
                "N",
                type=_whole,
                default=0,
            ),
            PLACEMENT,
            CLUSTER_OF_RANKS,
            *CONFIG,
        ),
        "run",
    ),
    "profile": Verb(
        "measure this machine, for forecasts (start it with mpirun or srun)",
        (
            _argument("--out", "file of the calibration", "FILE.json", required=True),
            _replaces("FILE.json if it exists"),
            *CONFIG,
        ),
        "run",
    ),
    "status": Verb("show what the ranks of a run do now", (RUN,)),
    "postmortem": Verb("show which rank of a run the others waited for", (RUN,)),
    "rollouts": Verb(
        "show and filter the samples that a run has written (with rollouts.every)",
        (
            RUN,
            [
                _argument(
                    "--iteration",
                    "iteration to show, counted from 1 (default: the last one written)",
                    "N",
                    type=int,
                ),
                _argument("--evaluation", "evaluation to show: the one after N iterations", "N", type=int),
            ],
            _argument(
                "--where",
                "show rows that meet a condition: NAME>=NUMBER (or > < <= = !=), NAME~REGULAR_EXPRESSION; given "
                "several times, all conditions must hold",
                "CONDITION",
                action="append",
                default=[],
            ),
            _argument("--sort", "sort by this number, ascending", "NAME"),
            _flag("--descending", "show the largest first (with --sort)"),
            _argument("--limit", "print at most N rows (default: all)", "N", type=_positive),
            Argument(
                "--json",
                {
                    "help": "print whole rows, with tokens, as lines of JSON; --no-json: no line of JSON at the end "
                    "(default: that line, if the output is not a terminal)",
                    "action": argparse.BooleanOptionalAction,
                },
            ),
        ),
    ),
    "report": Verb(
        "write curves and samples of some runs as one page of HTML",
        (
            _argument("runs", "run folders, in the order of the page", "RUN", nargs="+"),
            _argument("--out", "file of the page", "FILE.html", required=True),
            _argument("--title", "heading of the page (default: the names of the runs)"),
            _replaces("FILE.html if it exists"),
        ),
    ),
    "algorithms": Verb("list the algorithms that come with the package, with their calls"),
    "coming-from": Verb(
        "print a configuration of TRL, verl or OpenRLHF as a file of options",
        (
            _argument(
                "file_there",
                "YAML file of that program, whose values KEY=VALUE arguments replace; or trl, verl or openrlhf, "
                "before the words of its command",
                "FILE|PROGRAM",
            ),
            _argument(
                "--program",
                "program that the file is for (default: told from the names of its options)",
                choices=("trl", "verl", "openrlhf"),
            ),
            _argument("--algorithm", "algorithm to use here (default: told from the options)", "NAME"),
        ),
        "other",
    ),
    "convert": Verb(
        "turn a GGUF file, or an adapter (LoRA), into a Hugging Face folder of a whole model",
        (
            _argument("source", "file to read; with --merge the folder of an adapter", "FILE.gguf|ADAPTER", type=Path),
            _argument("folder", "folder to write", "FOLDER", type=Path),
            _flag("--merge", "merge an adapter, as peft stores it, into its base"),
            _argument("--base", "folder of the base (default: the one that the adapter names)", "FOLDER", type=Path),
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
        """Returns the help of argparse, and the options that KEY=VALUE arguments set."""
        return super().format_help() + (_words_help(self.words) if self.words in WORDS else "")


def _words_help(words: str) -> str:
    """Returns the options of a tree, with their defaults and meanings."""
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


def _fitted(example: str) -> str:
    """Returns the command of an example, on lines of the terminal, with an indent of two."""
    return command_lines(example.split(" "), shutil.get_terminal_size().columns, before=2)


def _fitted_text(text: str) -> str:
    """Returns paragraphs and examples, on lines of the terminal."""
    width, parts = shutil.get_terminal_size().columns, text.strip().split("\n\n")
    return "\n\n".join(
        textwrap.fill(part, width) if part[:1].isupper() else "\n".join(map(_fitted, part.split("\n")))
        for part in parts
    )


class _Version(argparse.Action):
    """Prints the versions, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from rlhf_spmd.command_line.version import version_text
        from rlhf_spmd.files.output import table_width

        columns = table_width()
        for line in version_text().split("\n"):
            print(textwrap.fill(line, columns) if columns else line)
        parser.exit()


def parser(text: str) -> argparse.ArgumentParser:
    """Returns the parser of all subcommands.

    text: what help says below them, with a line for each example of a command.
    """
    settings: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    found = _Parser(prog=PROGRAM, description="RLHF as one SPMD program.", epilog=_fitted_text(text), **settings)
    found.add_argument("--version", action=_Version, nargs=0, help="print the versions of the program and its packages")
    verbs = found.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND", title="subcommands")
    for name, verb in VERBS.items():
        does = textwrap.fill(f"{verb.help[0].upper()}{verb.help[1:]}.", shutil.get_terminal_size().columns - 2)
        examples = "".join(f"\n  {_fitted(line)}" for line in text.split("\n") if f"{AS_MODULE} {name} " in f"{line} ")
        of_verb = verbs.add_parser(
            name, help=verb.help, description=does, epilog=examples and f"examples:{examples}", **settings
        )
        of_verb.words = verb.words
        of_verb.set_defaults(file=None)
        for one in [*verb.arguments, *([] if name in OWN_JSON else [JSON])]:
            group = of_verb if isinstance(one, Argument) else of_verb.add_mutually_exclusive_group()
            for argument in [one] if isinstance(one, Argument) else one:
                group.add_argument(argument.name, **argument.settings)
    return found


def parse(words: Sequence[str], text: str = "") -> argparse.Namespace:
    """Parses a command line into the options of a subcommand; its other arguments with `=` are overrides. Raises
    UserError.

    text: see `parser`.
    """
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        from rlhf_spmd.pages.option_suggestions import did_you_mean

        raise UserError(
            f"{words[0]!r} is not a subcommand{did_you_mean(words[0], VERBS)}; there are {', '.join(VERBS)} ({PROGRAM} "
            "--help says what each does)"
        )
    words, foreign = _foreign_words(words)
    parsed, rest = parser(text).parse_known_args(words)
    parsed.words = foreign
    if parsed.verb in CHECKED:
        first = parsed.strategies or []
        words = [*([first] if isinstance(first, str) else first), *rest]
        names = [word for word in words if not word.startswith("-") and ("=" not in word or word.endswith(".py"))]
        if not names and parsed.config is None:
            raise UserError(
                f"the following arguments are required: STRATEGY ({PROGRAM} {parsed.verb} --help lists the options)"
            )
        if parsed.verb != "draw":
            names = names[:1]
            parsed.strategy = names[0] if names else None
        parsed.strategies, rest = names, [word for word in words if word not in names]
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong and parsed.verb in CHECKED and not any(word.startswith("-") for word in wrong):
        raise UserError(f"{parsed.verb} takes one strategy: drop {', '.join(wrong)}, or compare them with `draw`")
    if wrong:
        raise UserError(f"unknown argument {wrong[0]!r}{_hint(wrong[0], parsed)}; write --NAME VALUE, or KEY=VALUE")
    if rest and not VERBS[parsed.verb].words:
        raise UserError(f"{parsed.verb} takes no KEY=VALUE arguments such as {rest[0]!r}")
    parsed.overrides = rest
    return parsed


def _foreign_words(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the words of this program, and those of the command that `coming-from PROGRAM` translates."""
    from rlhf_spmd.pages.other_names import PROGRAMS

    for place, word in enumerate(words):
        if words[0] == "coming-from" and word in PROGRAMS and words[place - 1] != "--program":
            return words[: place + 1], words[place + 1 :]
    return words, []


def _hint(word: str, parsed: argparse.Namespace) -> str:
    """Returns a suggestion for an unknown word with dashes, for the end of a message."""
    from rlhf_spmd.config.presets import all_keys
    from rlhf_spmd.pages.option_suggestions import suggest_option

    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    if name in all_keys():
        return f" (did you mean {name}=VALUE, without dashes?)"
    hint = suggest_option(name, (), all_keys())
    if "--layout" in hint and not hasattr(parsed, "layout"):
        return " (start N ranks with mpirun -n N or srun)"
    return hint

"""Reads a command line: options with dashes, which arguments.toml lists for every subcommand, and KEY=VALUE
arguments."""

import argparse
import math
import shutil
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.printing import command_lines
from rlhf_spmd.pages.other_names import PROGRAMS

PROGRAM, AS_MODULE = "rlhf-spmd", "python -m rlhf_spmd"
TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
VERBS: Mapping[str, Any] = TABLE["verbs"]
CHECKED = ("check", "draw", "forecast", "rehearse")  # verbs of strategies, which may stand between options
WORDS = {  # what KEY=VALUE arguments set -> what help says of them
    "run": "KEY=VALUE arguments set options, e.g. iterations=3 ppo.kl_coef=0.02 strategy.zero=1, and take precedence "
    "over the preset. These are the options of a run of PPO, with their defaults; docs/options.md lists the presets "
    "whose defaults differ, and the options of other algorithms and of the strategies:",
    "responses": "A row of JSON may have fields of its own: max_new_tokens, min_new_tokens, temperature, "
    "top_k, top_p, min_p, stop. KEY=VALUE arguments set these options, here with their defaults:",
}


def _given(text: str) -> str:
    """Reads an argument that must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty (a variable that is not set?)")
    return text


def _number(kind: type[int] | type[float], least: float, text: str) -> float:
    """Reads a number of at least `least`."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number of at least {least:g}")
    return value


TYPES: dict[str, Callable[[str], Any]] = {
    "text": _given,
    "path": Path,
    "int": int,
    "positive": partial(_number, int, 1),
    "whole": partial(_number, int, 0),
    "seconds": partial(_number, float, 1e-3),
}


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit: under mpirun every rank would. Options cannot be abbreviated."""

    words = ""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the options)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends the process after what was printed has been written; argparse would lose an error of that."""
        print(end="", flush=True)
        super().exit(status, message)

    def format_help(self) -> str:
        """Returns the help of argparse, and the options that KEY=VALUE arguments set."""
        return super().format_help() + (_words_help(self.words) if self.words in WORDS else "")


def _words_help(words: str) -> str:
    """Returns the options of a tree, with their defaults and meanings."""
    from rlhf_spmd.config.options import Config
    from rlhf_spmd.pages.option_tree import options_of
    from rlhf_spmd.pages.option_values import text_of
    from rlhf_spmd.runtime.offline.options import GenerateOptions

    lines = [textwrap.fill(WORDS[words], _columns())]
    for key, option in options_of(Config(preset="") if words == "run" else GenerateOptions()).items():
        text = f"{f'{key}={text_of(option.value)}':<31} {option.meaning}"
        if key != "preset":  # it is --preset
            lines.append(textwrap.fill(text, _columns(), initial_indent="  ", subsequent_indent=" " * 34))
    return "\n" + "\n".join(lines) + "\n"


def _columns() -> int:
    return shutil.get_terminal_size().columns - 2


def _fitted(paragraph: str) -> str:
    """Returns a paragraph, or examples of commands, on lines of the terminal."""
    if paragraph[:1].isupper():
        return textwrap.fill(paragraph, _columns())
    return "\n".join(command_lines(line.split(" "), _columns()) for line in paragraph.split("\n"))


class _Version(argparse.Action):
    """Prints the versions of the program, its checkout, Python and the packages that matter most to results; exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from rlhf_spmd.runtime.records.software import software

        texts = [f"{name.replace('rlhf_spmd', PROGRAM)} {text}" for name, text in software().items()]
        print("\n".join(texts))
        parser.exit()


def parser(text: str) -> argparse.ArgumentParser:
    """Returns the parser of all subcommands.

    text: what help says below them, with a line for each example of a command.
    """
    epilog = "\n\n".join(map(_fitted, text.strip().split("\n\n")))
    parser = _Parser(prog=PROGRAM, description="RLHF as one SPMD program.", epilog=epilog)
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the versions of the program and its packages"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND", title="subcommands")
    for name, verb in VERBS.items():
        title = f"{verb['help'][0].upper()}{verb['help'][1:]}."
        examples = [_fitted(line) for line in text.split("\n") if f"{AS_MODULE} {name} " in f"{line} "]
        of_verb = verbs.add_parser(
            name,
            help=verb["help"],
            description=textwrap.fill(title, _columns()),
            epilog="\n".join(["examples:", *(textwrap.indent(example, "  ") for example in examples)]),
        )
        of_verb.words = verb.get("words", "")
        of_verb.set_defaults(file=None)
        exclusive = of_verb.add_mutually_exclusive_group() if "exclusive" in verb else of_verb
        for argument, settings in arguments_of(name).items():
            group = exclusive if argument in verb.get("exclusive", ()) else of_verb
            settings = settings | ({"type": TYPES[settings["type"]]} if "type" in settings else {})
            if settings.get("action") == "yes_or_no":
                settings = settings | {"action": argparse.BooleanOptionalAction}
            group.add_argument(argument, **settings)
    return parser


def arguments_of(verb: str) -> dict[str, Any]:
    """Returns the arguments of a subcommand, by name."""
    arguments = dict(VERBS[verb].get("arguments", {}))
    for group in VERBS[verb].get("shared", ()):
        arguments |= TABLE["shared"][group]
    return arguments


def parse(words: Sequence[str], text: str = "") -> argparse.Namespace:
    """Parses a command line into the options of a subcommand; its other arguments with `=` are overrides. Raises
    UserError.

    text: see `parser`.
    """
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        from rlhf_spmd.pages.option_suggestions import check_known

        check_known("subcommand", words[0], VERBS)
    foreign = _foreign_words(words)
    parsed, rest = parser(text).parse_known_args(words[: len(words) - len(foreign)])
    parsed.words, verb = foreign, parsed.verb
    for word in rest:
        if word.startswith("-"):
            raise UserError(f"unknown argument {word!r}{_hint(word, parsed)}; write --NAME VALUE, or KEY=VALUE")
    if verb in CHECKED:
        rest = [*parsed.strategies, *rest]
        names = [word for word in rest if "=" not in word or word.endswith(".py")]
        if verb != "draw":  # which takes several
            names = names[:1] + [word for word in names[1:] if "=" not in word]
        parsed.strategies, rest = names, [word for word in rest if word not in names]
        if not names and parsed.config is None:
            raise UserError(f"{verb} lacks the name or file of a STRATEGY ({PROGRAM} {verb} --help lists the options)")
        if verb != "draw" and len(names) > 1:
            raise UserError(f"{verb} takes one strategy: drop {', '.join(names[1:])}, or compare them with `draw`")
        parsed.strategy = next(iter(names), None)
    for word in rest:
        if "words" not in VERBS[verb] or "=" not in word:
            raise UserError(f"unknown argument {word!r} ({PROGRAM} {verb} --help lists the options)")
    parsed.overrides = rest
    return parsed


def _foreign_words(words: Sequence[str]) -> Sequence[str]:
    """Returns the words of the command that `coming-from PROGRAM` translates."""
    for place, word in enumerate(words):
        if words[0] == "coming-from" and word in PROGRAMS and words[place - 1] != "--program":
            return words[place + 1 :]
    return []


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

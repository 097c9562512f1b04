"""Reads a command line: options with dashes, which arguments.toml lists for every subcommand, and KEY=VALUE
arguments."""

import argparse
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.other_names import PROGRAMS, elsewhere

PROGRAM, HELP_COLUMN = "rlhf-spmd", 28
USING = ("run", "responses")  # words of subcommands that set options
TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
VERBS: Mapping[str, Any] = TABLE["verbs"]
CHECKED = ("check", "draw", "forecast", "rehearse")  # verbs of strategies, which may stand between options


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
    """Raises where argparse would print and exit: under mpirun every rank would. Options cannot be abbreviated.

    words: of its subcommand in arguments.toml.
    given: --algorithm and --preset of the command line.
    """

    words = ""
    given: Mapping[str, str | None] = {}

    def __init__(self, **settings: Any) -> None:
        form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=HELP_COLUMN)
        super().__init__(**settings, add_help=False, allow_abbrev=False, formatter_class=form)
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help lists the options)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends the process after what was printed has been written; argparse would lose an error of that."""
        print(end="", flush=True)
        super().exit(status, message)

    def format_help(self) -> str:
        """Returns the help of argparse, with examples and the options that are used most."""
        from rlhf_spmd.command_line.help import examples_of, usual_options

        name = self.prog.removeprefix(PROGRAM).strip()
        text = f"{super().format_help()}\n{examples_of(VERBS, [name] if name else TABLE['first'])}\n"
        return text + (usual_options(self.words, self.given, text.count("\n")) if self.words in USING else "")


class _Version(argparse.Action):
    """Prints the versions of the program, its checkout, Python and the packages that matter most to results; exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from rlhf_spmd.runtime.records.software import software

        texts = [f"{name.replace('rlhf_spmd', PROGRAM)} {text}" for name, text in software().items()]
        print("\n".join(texts))
        parser.exit()


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Returns the parser of all subcommands. words: a command line, whose algorithm help is about."""
    asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--algorithm", "--preset"):
        asked.add_argument(name, nargs="?")
    given = vars(asked.parse_known_args(words)[0])
    parser = _Parser(prog=PROGRAM, description="RLHF as one SPMD program: a strategy decides which rank does what.")
    parser.add_argument_group().add_argument(
        "--version", action=_Version, nargs=0, help="print the versions of the program and its packages"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND ...", title="subcommands")
    for name, verb in VERBS.items():
        arguments = arguments_of(name)
        title = f"{verb['help'][0].upper()}{verb['help'][1:]}."
        of_verb = verbs.add_parser(name, help=verb["help"], description=title, usage=_usage(name, arguments))
        of_verb.words, of_verb.given = verb.get("words", ""), given
        of_verb.set_defaults(file=None)
        plain = of_verb.add_argument_group()
        exclusive = plain.add_mutually_exclusive_group() if "exclusive" in verb else plain
        for argument, settings in sorted(arguments.items(), key=lambda item: item[0].startswith("-")):
            group = exclusive if argument in verb.get("exclusive", ()) else plain
            settings = settings | ({"type": TYPES[settings["type"]]} if "type" in settings else {})
            if settings.get("action") == "yes_or_no":
                settings = settings | {"action": argparse.BooleanOptionalAction}
            group.add_argument(argument, **settings)
    return parser


def _usage(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the first line of the help of a subcommand."""
    parts = [f"{PROGRAM} {name}"]
    for argument, settings in arguments.items():
        if not argument.startswith("-"):
            word, many = settings["metavar"], settings.get("nargs", "")
            parts.append({"": word, "+": f"{word} ...", "?": f"[{word}]", "*": f"[{word} ...]"}[many])
        elif settings.get("required"):
            parts.append(f"{argument} {settings['metavar']}")
    return " ".join([*parts, "[OPTIONS]", *["[KEY=VALUE]"] * (VERBS[name].get("words", "") in USING)])


def arguments_of(verb: str) -> dict[str, Any]:
    """Returns the arguments of a subcommand, by name."""
    arguments = dict(VERBS[verb].get("arguments", {}))
    for group in VERBS[verb].get("shared", ()):
        arguments |= TABLE["shared"][group]
    return arguments


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses a command line into the options of a subcommand; its other arguments with `=` are overrides. Raises
    UserError."""
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        from rlhf_spmd.pages.option_suggestions import check_known

        check_known("subcommand", words[0], VERBS)
    foreign = _foreign_words(words)
    parsed, rest = parser(words).parse_known_args(words[: len(words) - len(foreign)])
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
    from rlhf_spmd.pages.option_suggestions import did_you_mean, suggest_option

    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    if name in all_keys() and VERBS[parsed.verb].get("words", "") in USING:
        return f" (did you mean {name}=VALUE, without dashes?)"
    known = [known for known in arguments_of(parsed.verb) if known.startswith("--")]
    near = "" if name in elsewhere() else did_you_mean(word.partition("=")[0], known)
    hint = near or suggest_option(name, (), all_keys())
    if "--layout" in hint and not hasattr(parsed, "layout"):
        return " (start N ranks with mpirun -n N or srun)"
    return hint

"""The one program: train, evaluate, generate, precompute, profile (on MPI ranks), check, plan, forecast, draw,
algorithms, status, report, rollouts, postmortem, coming-from (no MPI, no torch), convert (GGUF files).

mpirun -n 4 python -m rlhf_spmd train --preset tiny iterations=3 ppo.kl_coef=0.02
mpirun -n 4 python -m rlhf_spmd train --resume runs/RUN
mpirun -n 2 python -m rlhf_spmd generate --model FOLDER --prompts p.jsonl --out r.jsonl generation.temperature=0.7
mpirun -n 2 python -m rlhf_spmd evaluate --model FOLDER eval.prompts=test.jsonl reward_function=FILE.py:NAME
mpirun -n 4 python -m rlhf_spmd train --config FILE.yaml iterations=3
mpirun -n 4 python -m rlhf_spmd precompute --algorithm dpo --model FOLDER data.prompts=pairs.jsonl --out ref.safetensors
python -m rlhf_spmd check flattening --layout 2x8 --preset llama-7b
python -m rlhf_spmd plan --preset llama-13b --layout 2x8 --calibration a100-80g
python -m rlhf_spmd forecast mine.py --preset llama-13b --layout 2x8
python -m rlhf_spmd draw flattening separation mine.py --layout 1x8 --out strategies.png
python -m rlhf_spmd coming-from verl.yaml > options.yaml
python -m rlhf_spmd status runs/NAME
python -m rlhf_spmd report runs/NAME --out report.html
python -m rlhf_spmd postmortem runs/NAME
mpirun -n 2 python -m rlhf_spmd profile --out mine.json
"""

import argparse
import codecs
import importlib
import os
import signal
import stat
import sys
from pathlib import Path
from typing import NoReturn

from rlhf_spmd.errors import UserError

CALIBRATION_HELP = "measured constants of the machine (default: those shipped for its devices)"
USER_STATUS = 2
ASCII_OUTPUT = "ascii:backslashreplace"
PIPE_STATUS = 141  # the status that a shell reports for a program that SIGPIPE ended
ON_RANKS = (
    "train",
    "evaluate",
    "generate",
    "precompute",
    "profile",
)  # verbs that run on the ranks of MPI


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status. The module of a verb is imported when the verb is called.

    arguments: by default those of this process, whose standard streams are then prepared, too.
    """
    from rlhf_spmd.runtime.guard import launcher, signals, streams

    is_process = arguments is None
    if is_process:
        _in_utf8()
    words = sys.argv[1:] if arguments is None else arguments
    os.umask(os.umask(0) | stat.S_IWOTH)  # no other user may change files that later runs execute, e.g. strategies
    verb = words[0] if words else ""
    measures = verb == "plan" and any(word.partition("=")[0] == "--measure-top" for word in words)
    on_ranks = (verb in ON_RANKS or measures) and not {"-h", "--help"} & set(words)
    if is_process:
        launcher.forget_leftovers(os.environ)
        signals.remember_interrupts()
        streams.prepare(is_work=not on_ranks, speaks=launcher.launched(os.environ).rank == 0)
    if on_ranks:
        return _on_ranks(words)
    return _to_the_end(words) if is_process else _alone(words)


def _in_utf8() -> None:
    """Starts this process again, in Python's UTF-8 mode, if names of files would be ASCII: in such a locale a name of
    the command line would be another text than the same one in a file of options. What is printed stays ASCII."""
    again = {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": os.environ.get("PYTHONIOENCODING") or ASCII_OUTPUT}
    has_script = sys.argv[0] not in ("", "-")  # otherwise it came from standard input, which has been read
    may_change = not sys.flags.ignore_environment and os.environ.get("PYTHONUTF8") != "1"
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii" and sys.executable and has_script and may_change:
        os.execve(sys.executable, sys.orig_argv, again)


def _to_the_end(arguments: list[str]) -> NoReturn:
    """Runs a verb in one process, and ends the process, whatever threads own functions have left in it."""
    from rlhf_spmd.runtime.guard.supervise import leave

    try:
        status = _alone(arguments)
    except SystemExit as end:  # of --help
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    leave(status)


def _alone(arguments: list[str]) -> int:
    """Runs a verb in one process.

    The variables of an interactive step of Slurm (srun -n 4 --pty bash) are those of the first of several processes. So
    under srun the first process works, and copies do nothing. Under mpirun the verb is refused.
    """
    from rlhf_spmd.runtime.guard import launcher, signals, streams
    from rlhf_spmd.runtime.guard.failures import explain
    from rlhf_spmd.runtime.guard.surroundings import without_folder

    place = launcher.launched(os.environ)
    try:
        parsed = _with_file(_parse(arguments))
        if place.num > 1 and not place.by_srun:
            raise UserError(
                f"{parsed.verb} runs in one process, but {place.num} were started ({place.variable}): start it without "
                f"mpirun; if it was, with `{launcher.alone(os.environ)}`"
            )
        if place.rank > 0:
            where = f"copy {place.rank} of {place.num} ({place.variable})"
            note = f"rlhf_spmd: note: {parsed.verb} runs in one process: {where} leaves it to copy 0"
            print(note, file=sys.stderr)
            return 0
        status = importlib.import_module(f"rlhf_spmd.verbs.{parsed.verb.replace('-', '_')}").run(parsed)
        print(end="", flush=True)  # a broken pipe must be noticed here, inside the try
        return status
    except BrokenPipeError:  # the reader, e.g. `head`, has exited
        return PIPE_STATUS
    except KeyboardInterrupt:
        streams.say("rlhf_spmd: error: interrupted by SIGINT")
        return signals.INTERRUPTED_STATUS
    except SystemExit:  # of --help
        streams.flush()
        raise
    except (UserError, OSError, MemoryError) as error:
        gone = without_folder()
        text = str(error) if isinstance(error, UserError) else explain(error, alone=True)
        if not gone and text is None:
            raise
        text = f"{text}; {gone}" if gone and isinstance(error, UserError) else gone or text
        if launcher.reports(os.environ):
            print(f"rlhf_spmd: error: {text}", file=sys.stderr)
        return USER_STATUS


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit: under mpirun every rank would. Options cannot be abbreviated."""

    def __init__(self, **settings):
        super().__init__(**(settings | {"allow_abbrev": False}))

    def error(self, message: str):
        raise UserError(f"{message} ({self.prog} --help lists the options)")


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The verb's options; its other words with `=` are overrides. Raises UserError."""
    parsed, rest = _parser().parse_known_args(arguments)
    if parsed.verb in ("check", "draw", "forecast"):  # strategies may stand between options
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
    if rest and parsed.verb in ("algorithms", "convert", "report", "rollouts", "status", "postmortem"):
        raise UserError(f"{parsed.verb} takes no overrides such as {rest[0]!r}")
    parsed.overrides = rest
    return parsed


def _with_file(parsed: argparse.Namespace) -> argparse.Namespace:
    """The options, with those of the file of --config where the command line names none. Raises UserError."""
    if getattr(parsed, "config", None) is not None:
        from rlhf_spmd.command_line.words import read_words

        read_words(parsed)
    return parsed


def _hint(word: str) -> str:
    """A suggestion for an unknown word with dashes, for the end of a message."""
    from rlhf_spmd.config.presets import all_keys
    from rlhf_spmd.pages.option_suggestions import suggest_option

    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    if name in all_keys():
        return f" (did you mean {name}=VALUE, without dashes?)"
    return suggest_option(name, (), all_keys())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rlhf_spmd", description="RLHF as one SPMD program.", epilog=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    train = verbs.add_parser("train", help="train on the ranks of this MPI world (mpirun -n N ...)")
    text = "placement of the calls (default: flattening); auto: plan one"
    train.add_argument("--strategy", metavar="NAME|FILE.py", help=text)
    text = "continue the run in this folder from its newest checkpoint; auto: start the run --name, or continue it"
    train.add_argument("--resume", metavar="RUN|auto", type=_given, help=text)
    train.add_argument("--calibration", metavar="NAME|FILE.json", help=CALIBRATION_HELP)
    train.add_argument("--cluster", metavar="FILE.toml", help="device types of the nodes (default: all alike)")
    train.add_argument("--runs", metavar="FOLDER", help="parent of the run folder (default: runs)")
    train.add_argument("--name", help="name of the run folder (default: date, time and strategy)")
    train.add_argument("--dry-run", action="store_true", help="print the report of `check` for these ranks, and exit")
    _add_config(train)
    _add_generate(verbs)
    check = verbs.add_parser("check", help="print a placement and prove that its program cannot hang")
    check.add_argument("strategies", metavar="STRATEGY", nargs="*", help="name or FILE.py (default: that of --config)")
    _add_devices(check)
    check.add_argument("--rank", type=int, default=0, help="whose instruction list is printed (default: 0)")
    _add_config(check)
    _add_plan(verbs)
    forecast = verbs.add_parser("forecast", help="seconds, limits and memory of one strategy")
    forecast.add_argument("strategies", metavar="STRATEGY", nargs="*", help="name or FILE.py (default: of --config)")
    _add_devices(forecast, calibration=True)
    forecast.add_argument("--out", metavar="FILE.png", help="draw which ranks run which call, and the timeline")
    forecast.add_argument("--overwrite", action="store_true", help="replace FILE.png if it exists")
    _add_config(forecast)
    draw = verbs.add_parser("draw", help="draw which ranks run which call, and forecast timelines")
    draw.add_argument("strategies", metavar="STRATEGY", nargs="*", help="names or FILE.py (default: that of --config)")
    _add_devices(draw, calibration=True)
    draw.add_argument("--only", choices=("map", "timelines"), help="draw only the map or only the timelines")
    draw.add_argument("--out", required=True, metavar="FILE.png", help="the picture")
    draw.add_argument("--overwrite", action="store_true", help="replace FILE.png if it exists")
    _add_config(draw)
    _add_precompute(verbs)
    _add_evaluate(verbs)
    profile = verbs.add_parser("profile", help="measure this machine, for forecasts (mpirun -n N ...)")
    profile.add_argument("--out", required=True, metavar="FILE.json", help="the calibration")
    profile.add_argument("--overwrite", action="store_true", help="replace FILE.json if it exists")
    _add_config(profile)
    for name, text in (("status", "what the ranks do now"), ("postmortem", "which rank the others waited for")):
        verbs.add_parser(name, help=text).add_argument("run", metavar="RUN", help="run folder")
    rollouts = verbs.add_parser("rollouts", help="show and filter the samples that a run has written (rollouts.every)")
    rollouts.add_argument("run", metavar="RUN", help="run folder")
    which = rollouts.add_mutually_exclusive_group()
    which.add_argument("--iteration", type=int, metavar="N", help="as in metrics.jsonl (default: the last one written)")
    which.add_argument("--evaluation", type=int, metavar="N", help="the evaluation after N iterations")
    text = "a condition: NAME>=NUMBER (or > < <= = !=), NAME~REGULAR_EXPRESSION; all of several must hold"
    rollouts.add_argument("--where", action="append", default=[], metavar="CONDITION", help=text)
    rollouts.add_argument("--sort", metavar="NAME", help="by a number, ascending")
    rollouts.add_argument("--descending", action="store_true", help="with --sort: the largest first")
    rollouts.add_argument("--limit", type=_positive, metavar="N", help="print at most so many rows (default: all)")
    rollouts.add_argument("--json", action="store_true", help="print whole rows, with tokens, as lines of JSON")
    report = verbs.add_parser("report", help="curves and samples of some runs as one page of HTML")
    report.add_argument("runs", metavar="RUN", nargs="+", help="run folders, in the order of the page")
    report.add_argument("--out", required=True, metavar="FILE.html", help="the page")
    report.add_argument("--title", help="its heading (default: the names of the runs)")
    report.add_argument("--overwrite", action="store_true", help="replace FILE.html if it exists")
    verbs.add_parser("algorithms", help="the algorithms that come with the package, with their calls")
    convert = verbs.add_parser("convert", help="turn a GGUF file into a Hugging Face folder")
    convert.add_argument("gguf", type=Path, metavar="FILE.gguf")
    convert.add_argument("folder", type=Path, metavar="FOLDER")
    _add_coming_from(verbs)
    return parser


def _add_coming_from(verbs: argparse._SubParsersAction) -> None:
    text = "print a configuration of TRL, verl or OpenRLHF as a file of options"
    coming = verbs.add_parser("coming-from", help=text)
    text = "its YAML file, or a shell script that starts it; KEY=VALUE words replace its values"
    coming.add_argument("file_there", metavar="FILE", help=text)
    coming.add_argument(
        "--program", choices=("trl", "verl", "openrlhf"), help="default: told from the names of options"
    )
    coming.add_argument("--algorithm", metavar="NAME", help="the algorithm here (default: told from the options)")


def _given(text: str) -> str:
    """A word of the command line that must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty (a variable that is not set?)")
    return text


def _add_config(verb: argparse.ArgumentParser) -> None:
    """The options that name a configuration."""
    verb.add_argument(
        "--config", metavar="FILE.yaml", help="options and names of these; words of the command line replace its values"
    )
    verb.set_defaults(file=None)
    verb.add_argument(
        "--algorithm", metavar="NAME|FILE.py", type=_given, help="name or file of the algorithm (default: ppo)"
    )
    verb.add_argument("--preset", help="named configuration (default: tiny, or with --model one for real models)")
    verb.add_argument("--model", metavar="FOLDER", help="Hugging Face folder of the first role (PPO: the actor)")
    verb.epilog = "KEY=VALUE words override the preset, e.g. iterations=3 ppo.kl_coef=0.02 strategy.zero=1"


def _add_devices(verb: argparse.ArgumentParser, *, calibration: bool = False) -> None:
    """The options that describe a cluster; calibration: and its measured constants."""
    verb.add_argument("--layout", metavar="NxG", type=_given, help="N nodes of G devices (default: 1x4)")
    verb.add_argument("--cluster", metavar="FILE.toml", help="nodes of several device types, instead of --layout")
    default = "the calibration's, if it has one, or the preset's" if calibration else "the preset's"
    verb.add_argument("--device-type", help=f"device type (default: {default})")
    if calibration:
        verb.add_argument("--calibration", metavar="NAME|FILE.json", help=CALIBRATION_HELP)


def _add_plan(verbs: argparse._SubParsersAction) -> None:
    plan = verbs.add_parser("plan", help="search the fastest placement, and write it as a strategy")
    _add_devices(plan, calibration=True)
    plan.add_argument("--method", choices=("exact", "two_phase"), default="exact", help="default: exact")
    plan.add_argument("--top", type=_positive, default=5, metavar="N", help="how many plans to show (default: 5)")
    plan.add_argument("--out", metavar="FILE.py", help="file for the best plan (default: runs/plan-PRESET-LAYOUT.py)")
    plan.add_argument("--timeline", metavar="FILE.png", help="draw the forecast timeline of the best plan")
    plan.add_argument("--overwrite", action="store_true", help="replace these files if they exist")
    plan.add_argument("--measure-top", type=_positive, metavar="K", help="under mpirun: run K promising rows as well")
    _add_config(plan)


def _add_precompute(verbs: argparse._SubParsersAction) -> None:
    text = "compute once the logprobs that frozen models give a data set, e.g. DPO's reference (mpirun -n N ...)"
    precompute = verbs.add_parser("precompute", help=text)
    precompute.add_argument("--out", required=True, metavar="FILE", help="for data.precomputed_logprobs=FILE")
    precompute.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    precompute.add_argument("--strategy", metavar="NAME|FILE.py", help="placement of the calls (default: flattening)")
    precompute.add_argument("--cluster", metavar="FILE.toml", help="device types of the nodes (default: all alike)")
    _add_config(precompute)


def _add_evaluate(verbs: argparse._SubParsersAction) -> None:
    evaluate = verbs.add_parser("evaluate", help="evaluate a model once, as a run does (mpirun -n N ...)")
    text = "random numbers as in a run's evaluation after N iterations (default: 0)"
    evaluate.add_argument("--after", type=_whole, default=0, metavar="N", help=text)
    evaluate.add_argument("--strategy", metavar="NAME|FILE.py", help="placement of the calls (default: flattening)")
    evaluate.add_argument("--cluster", metavar="FILE.toml", help="device types of the nodes (default: all alike)")
    _add_config(evaluate)


def _whole(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else _positive(text)


def _positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _add_generate(verbs: argparse._SubParsersAction) -> None:
    generate = verbs.add_parser("generate", help="responses to a file of prompts, on one rank or many")
    text = "options of this verb, and `model`; those of training are ignored, words of the command line win"
    generate.add_argument("--config", metavar="FILE.yaml", help=text)
    generate.set_defaults(file=None)
    text = "Hugging Face checkpoint folder (default: that of --config)"
    generate.add_argument("--model", metavar="FOLDER", help=text)
    generate.add_argument("--prompts", required=True, type=Path, metavar="FILE", help=".jsonl, .parquet or .txt")
    generate.add_argument("--out", required=True, type=Path, metavar="FILE.jsonl", help="one line per response")
    generate.add_argument("--overwrite", action="store_true", help="replace FILE.jsonl if it exists")
    generate.add_argument("--tp", metavar="N", help="tensor-parallel ranks per copy of the model (default: 1)")
    generate.add_argument("--dtype", metavar="TYPE", help="float32 (default) or bfloat16")
    generate.add_argument("--seed", metavar="N", help="random seed (default: 0)")
    generate.epilog = (
        "KEY=VALUE words: samples_per_prompt=4, those of generation (generation.temperature=0 is greedy) and of data. "
        "A line of a .jsonl file may have fields of its own: max_new_tokens, min_new_tokens, temperature, top_k, "
        "top_p, min_p, stop."
    )


def _on_ranks(arguments: list[str]) -> int:
    """Runs a verb on every rank; one rank reports an error."""
    from rlhf_spmd.runtime.guard import streams, user_code
    from rlhf_spmd.runtime.guard.supervise import leave, supervised
    from rlhf_spmd.runtime.guard.surroundings import check_common_folder, check_folder, working_folder

    flight = supervised()  # before anything of MPI is loaded

    from rlhf_spmd.runtime.guard.signals import CHECKPOINT, Asked
    from rlhf_spmd.runtime.world.world import World

    on_interrupt = signal.getsignal(signal.SIGINT)  # ignored in the background of some shells
    if on_interrupt is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is lost yet, and no rank could tell the others
    asked = Asked()
    if arguments[0] == "train":
        asked.listen(CHECKPOINT)  # at once: without a handler the signal ends the process
    try:
        world = World.discover(flight=flight)
    except UserError as error:
        streams.say(f"rlhf_spmd: error: {error}")
        return USER_STATUS
    user_code.notes.say_if(world.board.first_to_say)
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        with world.together("reading the command line"):
            check_folder()
            if world.num_nodes > 1:
                check_common_folder(world.allgather(working_folder(), "the working folder"))
            parsed = _with_file(_parse(arguments))
        verb = importlib.import_module(f"rlhf_spmd.verbs.{parsed.verb}")
        if parsed.verb == "train":
            status = verb.run(world, parsed, asked)
        else:
            status = (verb.measure if parsed.verb == "plan" else verb.run)(world, parsed)
        world.shutdown()
        streams.flush()
        world.finalize(status or 0)
    except BaseException as error:  # whatever it is, no rank may be left waiting
        world.fail(error)
    leave(status or 0)


if __name__ == "__main__":
    sys.exit(main())

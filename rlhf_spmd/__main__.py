"""One program with a subcommand for each task (command_line/arguments.toml): train, evaluate, generate and profile run
on MPI ranks, all others in one process, most of them without MPI and torch."""

import argparse
import atexit
import importlib
import os
import signal
import stat
import sys
from typing import NoReturn

from rlhf_spmd.errors import UserError

USER_STATUS = 2
PIPE_STATUS = 141  # the status that a shell reports for a program that SIGPIPE ended
ON_RANKS = ("train", "evaluate", "generate", "profile")  # verbs that run on the ranks of MPI


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and returns its exit status. The module of a subcommand is imported when it is called.

    arguments: by default those of this process, whose standard streams are then prepared as well.
    """
    from rlhf_spmd.files import output
    from rlhf_spmd.pages.user_module import remember_interrupts
    from rlhf_spmd.runtime.failure import launcher

    is_process = arguments is None
    words = sys.argv[1:] if arguments is None else arguments
    os.umask(os.umask(0) | stat.S_IWOTH)  # no other user may change files that later runs execute, e.g. strategies
    verb = words[0] if words else ""
    measures = verb == "plan" and any(word.startswith("--measure-top") for word in words)
    rehearses = verb == "rehearse" and launcher.num_launched(os.environ) > 1  # one process starts the others
    on_ranks = (verb in ON_RANKS or measures or rehearses) and not {"-h", "--help"} & set(words)
    if is_process:
        launcher.forget_leftovers(os.environ)
        remember_interrupts()
        output.prepare(is_work=not on_ranks, speaks=launcher.launched(os.environ).rank == 0)
    if on_ranks:
        return _on_ranks(words)
    return _to_the_end(words) if is_process else _alone(words)


def _to_the_end(arguments: list[str]) -> NoReturn:
    """Runs a subcommand in one process, and ends the process, whatever threads own functions have left in it."""
    from rlhf_spmd.files import progress
    from rlhf_spmd.runtime.failure import records
    from rlhf_spmd.runtime.failure.supervise import leave

    records.keep_compiled()
    atexit.register(records.remove_node_files, records.COMPILED)
    progress.start(f"rlhf_spmd {' '.join(arguments[:1])}", is_alone=True, is_run=False)
    try:
        status = _alone(arguments)
    except SystemExit as end:  # of --help
        status = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    leave(status)


def _alone(arguments: list[str]) -> int:
    """Runs a subcommand in one process.

    The variables of an interactive step of Slurm (srun -n 4 --pty bash) are those of the first of several processes. So
    under srun the first process works, and copies do nothing. Under mpirun the subcommand is refused.
    """
    from rlhf_spmd.files import output
    from rlhf_spmd.runtime.failure import launcher, signals
    from rlhf_spmd.runtime.failure.failures import explain
    from rlhf_spmd.runtime.failure.surroundings import why_no_folder

    place = launcher.launched(os.environ)
    try:
        parsed = read(arguments)
        if place.num > 1 and not place.by_srun:
            raise UserError(
                f"{parsed.verb} runs in one process, but {place.num} were started ({place.variable}): start it without "
                f"mpirun; if it was, with `{launcher.alone(os.environ)}`"
            )
        if place.rank > 0:
            print(f"rlhf_spmd: note: {parsed.verb} runs in one process: copy 0 of {place.num} does it", file=sys.stderr)
            return 0
        module = importlib.import_module(f"rlhf_spmd.verbs.{parsed.verb.replace('-', '_')}")
        status = module.launch(parsed, arguments) if parsed.verb == "rehearse" else module.run(parsed)
        print(end="", flush=True)  # a broken pipe must be noticed here, inside the try
        return status
    except BrokenPipeError:  # the reader, e.g. `head`, has exited
        return PIPE_STATUS
    except KeyboardInterrupt:
        output.say(f"rlhf_spmd: error: {signals.INTERRUPTED}")
        return signals.INTERRUPTED_STATUS
    except (UserError, OSError, MemoryError) as error:
        text = why_no_folder() or (str(error) if isinstance(error, UserError) else explain(error))
        if text is None:
            raise
        if launcher.reports(os.environ):
            print(f"rlhf_spmd: error: {text}", file=sys.stderr)
        return USER_STATUS


def read(words: list[str]) -> argparse.Namespace:
    """Returns the options of a command line, with those of the file of --config where it names none. Raises
    UserError."""
    from rlhf_spmd.command_line.arguments import parse

    parsed = parse(words)
    if getattr(parsed, "config", None) is not None:
        from rlhf_spmd.command_line.words import read_words

        read_words(parsed)
    return parsed


def _on_ranks(arguments: list[str]) -> int:
    """Runs a subcommand on every rank; one rank reports an error."""
    from rlhf_spmd.files import output, progress
    from rlhf_spmd.runtime.failure import launcher
    from rlhf_spmd.runtime.failure.supervise import leave, supervised
    from rlhf_spmd.runtime.failure.surroundings import check_common_folder, check_folder

    record = supervised()  # before anything of MPI is loaded
    place = launcher.launched(os.environ)
    if place.rank == 0:
        text = f"rlhf_spmd: starting {arguments[0]} on {place.num} rank{'s' * (place.num > 1)}"
        progress.start(text, is_alone=not launcher.is_launched(os.environ), is_run=True)

    from rlhf_spmd.runtime.failure.signals import CHECKPOINT, Asked
    from rlhf_spmd.runtime.world.world import World

    on_interrupt = signal.getsignal(signal.SIGINT)  # ignored in the background of some shells
    if on_interrupt is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is lost yet, and no rank could tell the others
    asked = Asked()
    if arguments[0] == "train":
        asked.listen(CHECKPOINT)  # at once: without a handler the signal ends the process
    try:
        world = World.discover(record=record)
    except UserError as error:
        output.say(f"rlhf_spmd: error: {error}")
        return USER_STATUS
    progress.say(lambda: world.doing)
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        with world.together("reading the command line"):
            folder = check_folder()
            if world.num_nodes > 1:
                check_common_folder(world.allgather(folder, "the working folder"))
            parsed = read(arguments)
        with progress.during("importing the program"):
            verb = importlib.import_module(f"rlhf_spmd.verbs.{parsed.verb}")
        run = verb.measure if parsed.verb == "plan" else verb.run
        status = run(world, parsed, asked) if parsed.verb == "train" else run(world, parsed)
        world.shutdown()
        output.flush()
        world.finalize(status or 0)
    except BaseException as error:  # whatever it is, no rank may be left waiting
        world.fail(error)
    leave(status or 0)


if __name__ == "__main__":
    sys.exit(main())

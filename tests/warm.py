"""The program started many times without its seconds of imports: each start is a fork of one process that has them.

Such a start is a process of its own with the exit status and the output that a user gets, as one rank without a
launcher. It serves tests of what the program says about bad input; what happens among ranks needs real launches.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.run_mpi import REPOSITORY, environment_alone

LIMIT_S = 60.0  # for one start


class Warm:
    """A context manager; `run(arguments)` is `python -m rlhf_spmd *arguments`."""

    def __enter__(self) -> "Warm":
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests.warm import serve; sys.exit(serve())"],
            cwd=REPOSITORY,
            env=environment_alone(PYTHONPATH=f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"),
            stdin=pipe,
            stdout=pipe,
            encoding="utf-8",
        )
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        self.process.wait(LIMIT_S)

    def run(self, arguments: Sequence[object]) -> tuple[int | None, str, str]:
        """Runs a command. Returns status (None if it had to be stopped at the limit), standard output and standard
        error."""
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder) / name) for name in ("stdout", "stderr")]
            self.process.stdin.write(json.dumps([[str(word) for word in arguments], files]) + "\n")
            self.process.stdin.flush()
            status = json.loads(self.process.stdout.readline())
            return status, *(Path(file).read_text(encoding="utf-8") for file in files)


def serve() -> int:
    """Forks for each line of standard input; in a child it is the program, whose status it returns."""
    import transformers  # noqa: F401

    from rlhf_spmd.__main__ import main

    for line in sys.stdin:
        arguments, files = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, file in enumerate(files, start=1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            return main(arguments)
        print(json.dumps(_wait(child)), flush=True)
    return 0


def _wait(child: int) -> int | None:
    """Waits for a process. Returns its status; None if it did not end within the limit and was killed with all that it
    started."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None

"""A busy machine: processes that compute for nothing while a block runs, and end with it or with its process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100_000))"


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Runs the block beside so many processes that compute for nothing."""
    command = [sys.executable, "-S", "-c", SPIN, str(os.getpid())]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()

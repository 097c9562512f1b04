"""The program started many times without its seconds of imports: each start is a fork of one process that has them.

Such a start is a process of its own with the exit status and the output that a user gets, alone or as one of the ranks
that mpiexec starts: mpiexec starts tests/warm_rank.py, whose connection to mpiexec the fork gets. All forks of one
process have the same hash seed, and their command line is not the program's; tests of signals and kills, of starts that
fail and of what depends on the surroundings start the program itself. Under an MPI other than MPICH, starts of several
ranks do so, too. All unit and e2e tests of one `make test` share a Warm; tests/run_mpi.py starts its ranks in this way,
too, with pytest in place of the program: they are forks of two processes in turn, so that an order of a set that
differs between ranks is found. The workers of pytest-xdist are forks as well.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.run_mpi import REPOSITORY, environment_alone, mpi_command, mpi_environment, run_limited

LIMIT_S = 120.0  # for one start
PROGRAM = "rlhf_spmd.__main__"
ADDRESS = "TEST_WARM"  # the environment variable with the address of the process that several of tests share
IMPORTS = ("rlhf_spmd.verbs.train", "rlhf_spmd.runtime.run.train", "numpy.random")  # all but MPI's
IMPORTS += ("matplotlib.backends.backend_agg", "matplotlib.figure", "torch.utils.tensorboard")
IMPORTS += ("safetensors.torch", "transformers", "tokenizers.implementations")
OURS = ("rlhf_spmd", "kernels", "strategies", "bench", "tools", "tests")
RANK = REPOSITORY / "tests" / "warm_rank.py"


class Warm:
    """`run(words)` is `python -m rlhf_spmd *words`.

    address: of processes that another Warm has started; by default it starts them.
    main: the module whose `main()` the forks call, with those words in `sys.argv`.
    imports: modules that they have imported.
    processes: how many such processes there are; ranks are forks of them in turn, and each has its own hash seed.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        main: str = PROGRAM,
        imports: Sequence[str] = IMPORTS,
        processes: int = 1,
    ) -> None:
        self.main, self.processes = main, []
        self.address = address or self._start((*imports, main), processes)

    def _start(self, imports: Sequence[str], processes: int) -> str:
        self.folder = tempfile.TemporaryDirectory(prefix="warm_")
        sockets = [str(Path(self.folder.name) / str(number)) for number in range(processes)]
        program = "import sys; from tests.warm import serve; sys.exit(serve(*sys.argv[1:]))"
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, path, *imports],
                cwd=REPOSITORY,
                env=environment_alone(PYTHONPATH=f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for path in sockets
        ]
        assert all(process.stdout.readline() for process in self.processes), "it has not started"
        return ":".join(sockets)

    def close(self) -> None:
        """Ends the processes that this Warm has started."""
        for process in self.processes:
            process.stdin.close()
            process.wait(LIMIT_S)
        if self.processes:
            self.folder.cleanup()

    def command(self, ranks: int = 0) -> list[str]:
        """Returns the words that start the program, before its own.

        ranks: 0 starts it without mpiexec.
        """
        launcher = mpi_command(ranks) if ranks else []
        may_fork = not ranks or launcher[1] == "-n"  # MPICH
        program = ["-I", "-S", str(RANK), self.address, self.main] if may_fork else ["-m", self.main]
        return [*launcher, sys.executable, *program]

    def run(
        self, words: Sequence[object], ranks: int = 0, *, limit_s: float = LIMIT_S, **environment: str
    ) -> tuple[int | None, str, str]:
        """Runs the program -> status (None if it had to be stopped at the limit), standard output and standard error.

        ranks: 0 starts it without mpiexec.
        """
        surroundings = mpi_environment(**environment) if ranks else environment_alone(**environment)
        return run_limited([*self.command(ranks), *map(str, words)], limit_s=limit_s, environment=surroundings)


@functools.cache
def shared() -> Warm:
    """Returns the one Warm of this process, which ends with it."""
    warm = Warm(os.environ.get(ADDRESS))
    atexit.register(warm.close)
    return warm


def serve(address: str, *imports: str) -> int:
    """Forks for each connection to the socket `address` until standard input ends; a child calls `main()` of the module
    that it is asked for and returns its status. A child whose connection ends is killed, as mpiexec kills its ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends tests/warm_rank.py, and its child is killed
    connections: dict[int, socket.socket] = {}  # process -> that with whoever waits for its status
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen(64)
        print(flush=True)  # whoever connects from now on waits for the imports
        for name in imports:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    os._exit(0)  # Triton complains at the end of an interpreter of what it leaks itself
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    descriptors, (main, *request) = _receive(connection)
                    if (child := os.fork()) == 0:
                        for one in (listener, selector, connection, *connections.values()):
                            one.close()
                        _prepare(descriptors, *request)
                        module = importlib.import_module(main)
                        sys.argv[0] = str(module.__file__)
                        return module.main()
                    connections[child] = connection
                    for descriptor in descriptors:
                        os.close(descriptor)
                    selector.register(os.pidfd_open(child), selectors.EVENT_READ, child)
                    selector.register(connection, selectors.EVENT_READ, child)
                elif isinstance(key.fileobj, int):
                    _, status = os.waitpid(key.data, 0)
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)
                    with connections.pop(key.data) as connection, suppress(KeyError, OSError):
                        connection.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
                        selector.unregister(connection)
                else:
                    selector.unregister(key.fileobj)
                    with suppress(OSError):
                        os.killpg(key.data, signal.SIGKILL)


def main() -> None:
    """Runs a worker of pytest-xdist: the last word is the code that starts one. It drops this repository's modules, so
    that they are imported again after tests/conftest.py has set TRITON_INTERPRET."""
    for name in list(sys.modules):
        if name.partition(".")[0] in OURS:
            del sys.modules[name]
    exec(sys.argv[-1], {"__name__": "__main__"})


def _receive(connection: socket.socket) -> tuple[list[int], list]:
    """Receives open descriptors, and module, arguments, environment, folder and umask of a tests/warm_rank.py."""
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
    text, missing = b"", int.from_bytes(size, "little")
    while len(text) < missing:
        text += connection.recv(missing - len(text))
    return descriptors, json.loads(text)


def _prepare(descriptors: Sequence[int], words: list[str], environment: dict[str, str], folder: str, mask: int) -> None:
    """Makes this process that of tests/warm_rank.py."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if descriptors[3:]:
        environment["PMI_FD"] = str(descriptors[3])
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.umask(mask)
    sys.argv[1:] = words

"""How long the tests take: a pytest plugin that notes it, and the summary that `make test` ends with.

The plugin (`-p tests.durations`) appends a line for every test to the file that the environment variable
TEST_DURATIONS names, if it is set: node id, ranks of the launch, seconds of set-up, call and tear-down by the clock.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

FILE = "TEST_DURATIONS"
NUM_SLOWEST = 10
LONG_S = 20.0  # every test above is named


class Durations:
    """Sums the phases of each test; `num_ranks` is 1 outside MPI launches."""

    def __init__(self, path: Path, num_ranks: int = 1):
        self.path, self.num_ranks, self.seconds = path, num_ranks, {}

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self):
        lines = [json.dumps([test, self.num_ranks, round(seconds, 3)]) for test, seconds in self.seconds.items()]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)


def pytest_configure(config):
    """Registers the report in the process that collects: with pytest-xdist the workers don't write."""
    if FILE in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(Path(os.environ[FILE])), "durations of tests")


def summary(path: Path) -> Sequence[str]:
    """Returns the slowest tests, and the other ones that take longer than LONG_S."""
    tests = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    tests.sort(key=lambda entry: -entry[2])
    num_shown = max(NUM_SLOWEST, sum(seconds > LONG_S for _, _, seconds in tests))
    lines = [f"{seconds:6.1f} s  {_name(test, ranks)}" for test, ranks, seconds in tests[:num_shown]]
    num_long = sum(seconds > LONG_S for _, _, seconds in tests)
    return [f"the slowest of {len(tests)} tests ({num_long} take more than {LONG_S:g} s):", *lines]


def _name(test: str, num_ranks: int) -> str:
    return test if num_ranks == 1 else f"{test} ({num_ranks} ranks)"

"""Do the tests of `make test` find what would make a run wrong? Each fault of faults.toml is planted and must be found:
its tests, of which those that are marked slow are left out, pass without it and fail with it.

Faults are planted in copies of the sources, never in the checkout. Cost: five processor minutes.
Command: python -m tools planted [NAME ...]
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info")
OPTIONS = ("-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", "not slow")
LIMIT_S = 1800.0  # of one launch of tests
CAPTURED: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
ORIGIN = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]).origin)"


@dataclass(frozen=True, slots=True)
class Fault:
    """In a file `new` takes the place of `old`, which occurs once.

    tests: files of tests, or tests as FILE::FUNCTION.
    ranks: with which those of tests/mpi are launched.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    ranks: int = 0

    def problems(self) -> Iterator[str]:
        """Yields why the fault cannot be planted or found."""
        path = REPOSITORY / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (number := text.count(self.old)) != 1:
            yield f"{self.name}: its old text occurs {number} times in {self.file}, and must occur once"
        for test in self.tests:
            file, _, name = test.partition("::")
            if all(self.is_slow(marks) for own, marks in marks_in(file).items() if name in ("", own)):
                yield f"{self.name}: {test} does not exist, or `make test` leaves it out"

    def is_slow(self, marks: list[str]) -> bool:
        """Returns whether `make test` leaves out a test with these decorators, at the ranks of the fault."""
        numbers = {mark.partition("(")[0]: re.findall(r"\d+", mark) for mark in marks}
        elsewhere = str(self.ranks) not in numbers.get("pytest.mark.ranks", [str(self.ranks)])
        return "pytest.mark.slow" in marks or str(self.ranks) in numbers.get("pytest.mark.slow_at", []) or elsewhere

    def plant(self, tree: Path) -> None:
        """Puts the fault into a copy of the sources, and asserts that this is what tests import there."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        compile(path.read_bytes(), path, "exec")  # a fault of syntax would be found by whatever imports it
        module = self.file.removesuffix(".py").replace("/", ".")
        module = f"rlhf_spmd.{module}" if module.startswith(("kernels.", "strategies.")) else module
        found = subprocess.run([sys.executable, "-c", ORIGIN, module], env=environment(tree), cwd=tree, **CAPTURED)
        assert found.stdout.strip() == str(path), found


@cache
def marks_in(file: str) -> dict[str, list[str]]:
    """Returns the decorators of each test of a file, with what `pytestmark` gives all of them."""
    path = REPOSITORY / file
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    values = [one.value for one in body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark"]
    of_all = [ast.unparse(one) for value in values for one in getattr(value, "elts", [value])]
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {test.name: [*of_all, *map(ast.unparse, test.decorator_list)] for test in tests}


def read_faults() -> dict[str, Fault]:
    """Reads faults.toml: faults by name."""
    table = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))
    return {name: Fault(name, **one | {"tests": tuple(one["tests"])}) for name, one in table.items()}


def environment(tree: Path) -> dict[str, str]:
    """Returns the environment of a tree's tests: its modules come first, and they share no process with others."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(("TEST_", "PYTEST_"))}
    return own | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def copied(tree: Path) -> Path:
    """Copies the sources to `tree`, and returns it."""
    return shutil.copytree(REPOSITORY, tree, ignore=LEFT_OUT, symlinks=True)


def run(tests: tuple[str, ...], ranks: int, tree: Path) -> tuple[bool, list[str], str]:
    """Runs tests in a tree -> whether all passed, the names of those that failed, and what was written."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
    if ranks:  # of all tests/mpi, since which of the tests that take turns run depends on the others
        chosen = " or ".join(f"({test.rpartition('/')[2].replace('::', ' and ')})" for test in tests)
        launch = ["tests/run_mpi.py", "--limit", f"{LIMIT_S / 2:g}", str(ranks), "--"]
        command = [sys.executable, *launch, *OPTIONS, "tests/mpi", "-k", chosen]
    done = subprocess.run(command, cwd=tree, env=environment(tree), timeout=LIMIT_S, **CAPTURED)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) \S+/(.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return done.returncode == 0, failed, done.stdout


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools planted", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults of tools/planted/faults.toml (default: all)")
    faults = read_faults()
    names = parser.parse_args(arguments).names or list(faults)
    if unknown := set(names) - set(faults):
        parser.error(f"there is no fault {min(unknown)!r}; the faults are {', '.join(faults)}")
    chosen = [faults[name] for name in names]
    if problems := "\n".join(text for fault in chosen for text in fault.problems()):
        parser.error(problems)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        for ranks in sorted({fault.ranks for fault in chosen}):
            tests = tuple(sorted({test for fault in chosen if fault.ranks == ranks for test in fault.tests}))
            passed, failed, text = run(tests, ranks, copied(Path(folder) / f"none-{ranks}"))
            if not passed:
                parser.error(f"these tests fail without a fault: {', '.join(failed)}\n{text[-2000:]}")
        print(f"without a fault all tests pass ({time.monotonic() - began:.0f} s)", flush=True)

        def find(fault: Fault) -> bool:
            start, tree = time.monotonic(), copied(Path(folder) / fault.name)
            fault.plant(tree)
            passed, failed, _ = run(fault.tests, fault.ranks, tree)
            shutil.rmtree(tree)
            names = ", ".join(dict.fromkeys(test.partition("[")[0] for test in failed)) or "the launch ended"
            found = "NOT FOUND" if passed else f"found by {max(len(failed), 1)}: {names}"
            print(f"{fault.name} ({fault.file}, {time.monotonic() - start:.0f} s): {found}", flush=True)
            return not passed

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            num_found = sum(pool.map(find, chosen))
    print(f"{num_found} of {len(chosen)} faults found in {time.monotonic() - began:.0f} s")
    return 0 if num_found == len(chosen) else 1

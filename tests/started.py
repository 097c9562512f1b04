"""A run of the program under way, which may be killed and resumed, and all that it leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.rows import REPOSITORY, TIMED, read_rows

ORPHAN_S = 5.0  # processes of an ended job get so long to be gone
LIMIT_S = 300.0
# What depends on when answers come: the rows that are drawn together, and with them the last bits of the sampler's
# logprobs, which only the parity gate reads.
TIMED_WITH_TOOLS = ("parity_max_abs", "parity_mean_abs", "answers", "tool_s", "tool_p95_s")


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Started:
    """A run under way in the folder, new or (--resume) resumed."""

    def __init__(self, num_ranks: int, folder: Path, *options: str):
        self.folder = folder
        words = (
            ["--resume", folder, *options[1:]] if options[:1] == ("--resume",) else [*options, "--name", folder.name]
        )
        words += [] if options[:1] == ("--resume",) else ["--runs", folder.parent]
        mpirun = str(Path(sys.executable).with_name("mpirun"))
        self.process = subprocess.Popen(
            [mpirun, "-n", str(num_ranks), sys.executable, "-m", "rlhf_spmd", "train", *map(str, words)],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )

    def wait_for(self, iterations: int) -> None:
        """Returns when so many iterations are done (of a new run: the first one has begun) and there are ranks, or the
        run has ended."""
        end = time.monotonic() + LIMIT_S
        while self.process.poll() is None and time.monotonic() < end:
            begun = (self.folder / "samples.txt").exists() or iterations > 0
            if begun and num_iterations(self.folder) >= iterations and self.ranks():
                return
            time.sleep(0.005)

    def ranks(self) -> dict[int, int]:
        """Returns the rank of each process that is a rank; each is the child of its supervisor, and that of its front,
        which the launcher has started. A process that a rank has just forked has its command line, one level deeper."""
        found = self.processes()
        parents = {pid: _parent(pid) for pid in found}
        fronts = {pid for pid, parent in parents.items() if parent not in found}
        return {pid: rank for pid, rank in found.items() if parents.get(parents[pid]) in fronts}

    def processes(self) -> dict[int, int]:
        """Returns the rank of each process: of the ranks, their supervisors and the fronts of these."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words, environment = ((path / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            except OSError:
                continue
            mine = {str(self.folder).encode(), self.folder.name.encode()} & set(words)
            rank = next((line.partition(b"=")[2] for line in environment if line.startswith(b"PMI_RANK=")), None)
            if mine and rank is not None and b"python" in words[0]:
                found[int(path.name)] = int(rank)
        return found

    def num_left(self) -> int:
        """Counts how many of them outlive their job, and ends these."""
        end = time.monotonic() + ORPHAN_S
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)

    def end(self, *, limit_s: float = LIMIT_S) -> tuple[int | None, str]:
        """Waits for the end. Returns exit status (None: it hung, and has been killed) and standard error."""
        try:
            _, stderr = self.process.communicate(timeout=limit_s)
            return self.process.returncode, stderr
        except subprocess.TimeoutExpired:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            return None, self.process.communicate()[1]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


def num_iterations(folder: Path) -> int:
    """Returns the number of iterations that a run has done."""
    path = folder / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def slowest_s(folder: Path) -> float:
    """Returns the longest iteration of a run."""
    return max(row["iteration_s"] for row in read_rows(folder / "metrics.jsonl"))


def outcome(folder: Path) -> dict:
    """Returns all that a run leaves and that does not tell the time: metrics, the last checkpoint, the actor,
    responses, and what an evaluation and `rollouts.every` add."""
    tables = [name for name in ("metrics", "evaluations") if (folder / f"{name}.jsonl").exists()]
    last = max((folder / "checkpoints").glob("iteration-*"))
    names = [path.relative_to(folder) for path in last.glob("rank-*")] + [last.relative_to(folder) / "state.json"]
    names += [Path("actor/model.safetensors"), Path("actor/adapter_model.safetensors"), Path("samples.jsonl")]
    names += [path.relative_to(folder) for name in ("best", "rollouts") for path in (folder / name).rglob("*.*")]
    return {
        **{name: _timeless(read_rows(folder / f"{name}.jsonl")) for name in tables},
        **{str(name): (folder / name).read_bytes() for name in names if (folder / name).exists()},
    }


def _timeless(rows: list[dict]) -> list[dict]:
    timed = (*TIMED, *(TIMED_WITH_TOOLS if any("tool_calls" in row for row in rows) else ()))
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]

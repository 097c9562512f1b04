"""The first minutes on a GPU as one command: is everything correct on it, and as fast as promised?

Every step (bench/first_light/steps.py) runs in a process of its own under a time limit, those of correctness some at a
time, then those of speed one by one, each with the machine to itself. A step that fails, crashes or hangs leaves the
others alone; what the machine lacks is named, and only the steps that need it are skipped. Runs from a source tree,
installed or not, on one GPU or several, with Python 3.11 or newer, and needs no network. Packages and an MPI library
that the machine lacks may be in a prefix of their own whose site-packages are on PYTHONPATH (pip install --prefix;
--target would leave the MPI library out). The folder of --out is complete after each step: verdicts.json, rows.jsonl
(rows as in bench/results/), logs.txt, traces of decoding, a calibration.

Cost: nine minutes at most on one GPU of 80 GB (--budget-s); with two GPUs some steps more, which otherwise are skipped;
with --dry everything small on a CPU, three minutes at most, and no more of a processor. Status: 0; 1 where a step did
not pass; 3 where some were only skipped.
Command: python -m bench first-light --out FOLDER [--steps kernels,decode | correctness | speed] [--dry]
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.first_light.steps import FACTS, STEPS, Step, chosen, command, environment
from bench.rows import REPOSITORY, Arguments, provenance
from rlhf_spmd.errors import UserError
from tests.run_mpi import stop

BUDGET_S = 540.0
SKIPPED_STATUS = 3  # of a walk in which nothing failed
LEAST_S = 5.0  # with less than this left, no step is begun
GRACE_S = 3.0  # processes get so long to end before they are killed
TICK_S = 0.05
LOG_BYTES = 400_000  # of each step's log, half from its beginning and half from its end
TAIL_CHARACTERS = 160
FILES = ("verdicts.json", "rows.jsonl", "logs.txt", "calibration.json", "decode-*.json.gz")  # of an earlier walk


@dataclass(slots=True)
class Running:
    """A step under way.

    end_s: when it is stopped.
    """

    step: Step
    process: subprocess.Popen
    log: Path
    started_s: float
    end_s: float


class Walk:
    """Takes steps and keeps the folder of results up to date."""

    def __init__(self, steps: Sequence[Step], out: Path, work: Path, *, budget_s: float, together: int, dry: bool):
        """Prepares the steps.

        together: steps of correctness at the same time.
        """
        self.steps, self.out, self.work, self.dry, self.together = list(steps), out, work, dry, together
        self.began_s = time.monotonic()
        self.end_s = self.began_s + budget_s
        self.running: list[Running] = []
        self.verdicts: dict[str, dict] = {}
        self.environment = environment(dry)
        self.about = provenance()
        self.about["commit"] = self.about["commit"] or "source tree"

    def run(self) -> list[dict]:
        """Runs all steps. Returns their verdicts, in order."""
        waiting = list(self.steps)
        try:
            while waiting or self.running:
                while waiting and self._may_begin(waiting[0]):
                    self._begin(waiting.pop(0))
                self._look()
                time.sleep(TICK_S)
        finally:
            for one in self.running:
                stop(one.process, grace_s=GRACE_S)
        return self._table()

    def _may_begin(self, step: Step) -> bool:
        """Returns whether a step may begin. The first step is alone, since the others are told what it finds; so is one
        of speed, but in a dry run."""
        if not self.running:
            return True
        alone = step.group == "speed" and not self.dry
        others = [one.step for one in self.running]
        return not alone and self.steps[0] not in others and len(others) < self.together

    def _begin(self, step: Step) -> None:
        missing = [name for name in step.required if name in self.facts.get("missing", ())]
        left_s = self.end_s - time.monotonic()
        if missing:
            return self._end(step, f"skipped: {', '.join(missing)}")
        if left_s < LEAST_S:
            return self._end(step, "not reached: budget")
        log, now = self.out / f"{step.name}.log", time.monotonic()
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command(step, self.out, self.work, dry=self.dry),
                cwd=REPOSITORY,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # not a session: whoever ends ours must reach it
            )
        self.running.append(Running(step, process, log, now, now + min(step.limit_s, left_s)))

    def _look(self) -> None:
        """Ends what has ended, or must."""
        for one in list(self.running):
            now = time.monotonic()
            status = one.process.poll()
            if status is None and now < one.end_s:
                continue
            if status is None:
                stop(one.process, grace_s=GRACE_S)
            with suppress(ProcessLookupError):  # what it has left behind
                os.killpg(one.process.pid, signal.SIGKILL)
            self.running.remove(one)
            verdict, told = self._verdict(one, status)
            self._end(one.step, verdict, told, seconds=now - one.started_s)

    def _verdict(self, one: Running, status: int | None) -> tuple[str, str]:
        log = one.log.read_bytes()
        one.log.unlink()
        with open(self.out / "logs.txt", "ab") as file:
            file.write(f"==== {one.step.name}: status {status}\n".encode() + shortened(log) + b"\n")
        lines = log.decode(errors="replace").strip().splitlines()
        last = lines[-1][-TAIL_CHARACTERS:] if lines else ""
        if status is None:
            by = "its own limit" if one.end_s < self.end_s else "the budget"
            return "timed out", f"by {by}; last: {last}" if last else f"by {by}"
        result = self.work / f"{one.step.name}.json"
        if status or not result.exists():
            return "failed", f"status {status}: {last}"
        found = json.loads(result.read_text(encoding="utf-8"))
        return found["verdict"], found["told"]

    def _end(self, step: Step, verdict: str, told: str = "", *, seconds: float = 0.0) -> None:
        """Notes a verdict and writes all files anew, so that whoever ends this process finds everything so far."""
        self.verdicts[step.name] = {
            "step": step.name,
            "verdict": verdict,
            "told": told,
            "promise": step.promise,
            "seconds": round(seconds, 1),
        }
        replace(self.out / "verdicts.json", json.dumps(self._table(), indent=1) + "\n")
        rows = [json.dumps(row) for row in self._rows()]
        replace(self.out / "rows.jsonl", "".join(row + "\n" for row in rows))
        print(f"{time.monotonic() - self.began_s:6.1f} s  {step.name:<16} {verdict:<10} {told}", flush=True)

    def _table(self) -> list[dict]:
        return [self.verdicts[step.name] for step in self.steps if step.name in self.verdicts]

    def _rows(self) -> list[dict]:
        """Returns all rows so far, each with where and with what it was measured."""
        found, facts = [], self.facts
        about = self.about | {name: facts.get(name) for name in ("device", "driver")}
        about["versions"] = self.about["versions"] | facts.get("versions", {})
        if facts.get("device"):
            about["hardware"] = f"{facts['device']}; {self.about['hardware']}"
        for step in self.steps:
            path = self.work / f"{step.name}.jsonl"
            if not path.exists():
                continue
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # a line that its step was stopped in
                    found.append(
                        {"bench": "first-light", "step": step.name, "dry": self.dry} | json.loads(line) | about
                    )
        return found

    @property
    def facts(self) -> Mapping:
        """What the first step has found out about this machine; nothing if it came to no end."""
        path = self.work / FACTS
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def shortened(log: bytes) -> bytes:
    """Returns a log; if it is too long, without its middle."""
    if len(log) <= LOG_BYTES:
        return log
    half = LOG_BYTES // 2
    return log[:half] + f"\n[... {len(log) - LOG_BYTES} bytes left out ...]\n".encode() + log[-half:]


def replace(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def show(verdicts: Sequence[Mapping]) -> str:
    """Prints the table for people."""
    width = max(len(row["verdict"]) for row in verdicts)
    lines = [
        f"{row['step']:<16} {row['verdict']:<{width}} {row['seconds']:6.1f} s  {row['told'] or row['promise']}"
        for row in verdicts
    ]
    return "\n".join(lines)


def walk(
    steps: Sequence[Step], out: Path, *, budget_s: float = BUDGET_S, together: int | None = None, dry: bool = False
) -> list[dict]:
    """Takes the steps. Returns their verdicts.

    out: a folder, made if need be; files of an earlier walk in it are replaced.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for path in (path for pattern in FILES for path in out.glob(pattern)):
        path.unlink()
    work = Path(tempfile.mkdtemp(prefix="first_light_"))
    together = together or min(4, max(1, (os.cpu_count() or 1) // (1 if dry else 4)))
    try:
        return Walk(steps, out, work, budget_s=budget_s, together=together, dry=dry).run()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parser = Arguments("first-light", __doc__, writes=False)
    parser.epilog = "Steps, and what each must hold to pass:\n" + "\n".join(
        f"  {step.name:<16} {step.promise}" for step in STEPS
    )
    text = "for verdicts, rows and logs: new, empty, or of an earlier walk, which is replaced"
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help=text)
    parser.add_argument("--steps", default="", metavar="NAMES", help="only these, or: correctness, speed")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=f"seconds of all (default: {BUDGET_S:g})")
    parser.add_argument("--allow-skipped", action="store_true", help=f"end with 0, not {SKIPPED_STATUS}, after skips")
    parser.add_argument("--dry", action="store_true", help="everything small, on the CPU")
    parsed = parser.parse_args(arguments)
    if parsed.out.is_dir() and any(parsed.out.iterdir()) and not (parsed.out / FILES[0]).exists():
        raise UserError(f"--out {parsed.out} holds other files; name a new folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by which the steps are ended as well
    verdicts = walk(chosen(STEPS, parsed.steps), parsed.out, budget_s=parsed.budget_s, dry=parsed.dry)
    print(f"\n{show(verdicts)}\n{parsed.out}: verdicts.json, rows.jsonl, logs.txt")
    skipped = [row for row in verdicts if row["verdict"].startswith("skipped")]
    passed = sum(row["verdict"] == "passed" for row in verdicts)
    ok = passed + len(skipped) == len(verdicts)
    if skipped:
        names = "; ".join(f"{row['step']} ({row['verdict'].removeprefix('skipped: ')})" for row in skipped)
        print(f"{len(skipped)} of {len(verdicts)} steps skipped: {names}")
    processor_s = round(sum(os.times()[:4]), 1)  # of all processes, in user and in system mode
    told = {"steps": len(verdicts), "passed": passed, "skipped": len(skipped), "ok": ok, "processor_s": processor_s}
    print(json.dumps({"bench": "first-light"} | told))
    return 1 if not ok else SKIPPED_STATUS if skipped and not parsed.allow_skipped else 0

"""Prints a run: a heading, a line per iteration, samples, the paths of its files, and one JSON line last.

Plain lines on standard output, the same in a terminal (with a little colour) and in a batch job's log, without cursor
movement. Only rank 0's console is enabled.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TextIO

from rlhf_spmd.algorithms.page import Metric
from rlhf_spmd.files.json_text import finite
from rlhf_spmd.files.printing import formatted
from rlhf_spmd.runtime.guard import streams
from rlhf_spmd.runtime.records.run_folder import RunFolder, Sample, format_samples

BOLD, FAINT, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Result:
    """The last line of standard output, for machines. NaN, which becomes null, stands for a value not measured.

    iteration_s, forecast_s: measured and forecast seconds of an iteration; scaled_by: the scale of the calibration in
    the forecast (forecast_report.py).
    """

    strategy: str
    ranks: int
    iterations: int
    headlines: Mapping[str, tuple[float, float]]  # first and last value of the algorithm's headline metrics
    gen_tokens_per_s: float
    parity_max_abs: float
    iteration_s: float
    forecast_s: float
    scaled_by: float
    wall_s: float
    run_dir: str
    reward_timeouts: int = 0  # responses for which a reward function ran out of time; > 0: the run is not exact
    saved: tuple[str, ...] = ()  # roles whose trained models are in the run folder
    evaluation: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # first and last value of its metrics

    def to_json(self) -> str:
        values = asdict(self)
        for name, (first, last) in values.pop("evaluation").items():
            values |= {f"eval_{name}_first": first, f"eval_{name}_last": last}
        for name, (first, last) in values.pop("headlines").items():
            values |= {f"{name}_first": first, f"{name}_last": last}
        return json.dumps(finite(values))


class Console:
    """Prints for people. Prints nothing if `enabled` is false: on every rank but 0, and once the stream is closed."""

    def __init__(self, metrics: Mapping[str, Metric], *, enabled: bool = True, stream: TextIO | None = None) -> None:
        """metrics: of the run, in the order of their columns."""
        self.metrics, self.enabled, self.stream = metrics, enabled, stream or sys.stdout
        self._colour = streams.is_terminal(self.stream) and not os.environ.get("NO_COLOR")
        self._columns: list[tuple[str, str, str, int]] = []

    def heading(self, title: str, facts: Mapping[str, object]) -> None:
        """A title and one aligned line per fact, e.g. {"actor": "1.2 M parameters", "prompts": "512 from p.jsonl"}."""
        self._print(self._style(title, BOLD))
        self._print_facts(facts)

    def note(self, text: str) -> None:
        """A line between others, unless it is empty."""
        if text:
            self._print(text)

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """One line of the progress table; the first call also prints the headings."""
        places = len(str(total)) * 2 + 1
        if not self._columns:
            for name, metric in self.metrics.items():
                if metric.column and name in metrics:
                    width = max(len(metric.column), len(metric.form.format(0.0)))
                    self._columns.append((name, metric.column, metric.form, width))
            cells = [heading.rjust(width) for _, heading, _, width in self._columns]
            self._print(self._style("  ".join(["iteration".rjust(max(9, places)), *cells]), FAINT))
        cells = [
            (formatted(metrics[name], form) if name in metrics else "-").rjust(width)
            for name, _, form, width in self._columns
        ]
        self._print("  ".join([f"{number}/{total}".rjust(max(9, places)), *cells]))

    def samples(self, samples: Sequence[Sample]) -> None:
        """Responses before and after training, one below the other."""
        if not samples:
            return
        width = min(120, shutil.get_terminal_size((100, 24)).columns)
        self._print(self._style("\nResponses before and after training, with their scores", BOLD))
        for line in format_samples(samples, width).removesuffix("\n").split("\n"):
            self._print(self._style(line, FAINT) if line.startswith("sample ") else line)

    def closing(self, result: Result, folder: RunFolder, next_commands: Mapping[str, str] | None = None) -> None:
        """Prints the result, paths of files, next commands (by their purpose) and, last, the result as JSON."""
        path = folder.shown
        facts: dict[str, object] = {}
        for name, (first, last) in result.headlines.items():
            form, unit = self.metrics[name].form, self.metrics[name].headline
            facts[name] = f"{formatted(first, form).strip()} -> {formatted(last, form).strip()} {unit}".rstrip()
        if result.evaluation:
            parts = (
                f"{name} {formatted(first)} -> {formatted(last)}" for name, (first, last) in result.evaluation.items()
            )
            facts["evaluation"] = ", ".join(parts)
        generated = math.isfinite(result.gen_tokens_per_s)
        speed = f"{result.gen_tokens_per_s:,.0f} tokens/s generated, " if generated else ""
        facts["speed"] = f"{speed}{result.wall_s:.1f} s in all"
        if math.isfinite(result.parity_max_abs):
            facts["parity"] = f"{result.parity_max_abs:.2g} nats at most between generation and training"
        facts |= {
            "run folder": path,
            "timeline": f"{path / 'timeline.png'} (timeline.json opens in ui.perfetto.dev)",
        }
        if generated:
            facts["samples"] = path / "samples.txt"
        commands = {"watch the curves": shlex.join(["tensorboard", "--logdir", str(path)])} | dict(next_commands or {})
        for role in result.saved:
            facts[f"trained {role}"] = f"{path / role} (a Hugging Face folder)"
        ranks = "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"
        iterations = "1 iteration" if result.iterations == 1 else f"{result.iterations} iterations"
        self._print(self._style(f"\nDone: {iterations} of {result.strategy} on {ranks}", BOLD))
        self._print_facts(facts)
        for text in folder.notes:
            self._print(f"  note: {text}")
        self._print(self._style("Next", BOLD))
        self._print_facts(commands)
        self._print(result.to_json())

    def _print_facts(self, facts: Mapping[str, object]) -> None:
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self._print(streams.Styled.joined("  ", self._style(name.ljust(width), FAINT), f"  {value}"))

    def _print(self, text: str = "") -> None:
        if self.enabled:
            self.enabled = streams.put(text, self.stream)

    def _style(self, text: str, style: str) -> str:
        return streams.Styled.of(text, style, RESET) if self._colour else text

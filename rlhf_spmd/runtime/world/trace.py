"""Tracing: records each rank's actions as spans, cheap enough to be always on, and writes them as a Chrome trace.

Times come from the monotonic performance counter and are mapped onto the wall clock once, so that the spans of all
ranks can be compared (on several nodes, as exactly as their clocks agree). On a GPU a span covers the device's work,
not the time when Python submitted it: begin and end are events in the device's queue (DeviceClock), read at the end
of the iteration.
"""

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_spmd.files.json_text import json_object
from rlhf_spmd.files.printing import printable

Category = Literal["compute", "transfer", "wait", "control"]
MAX_SPANS = 100_000  # per rank; older ones are dropped


class Span(NamedTuple):
    """One action of a rank. Times are seconds: of perf_counter while recording, of the wall clock in a record."""

    name: str  # a call of the workflow, e.g. actor_generate, or the transfer
    category: Category
    start_s: float
    end_s: float
    iteration: int | None
    args: dict[str, object]


class DeviceClock:
    """Marks in the queue of a GPU, whose times are taken without waiting for it: CUDA events, mapped onto the host's
    clock.

    CUDA measures the time between two events, in float32 milliseconds, with a clock that drifts from the host's. The
    two clocks are therefore aligned again each time marks are read, while the device is idle.
    """

    def __init__(self, device: Any):
        import torch

        self._device, self._cuda = device, torch.cuda
        self._align()

    def _align(self) -> None:
        self._cuda.synchronize(self._device)
        self._first = self.mark()
        self._first.synchronize()
        self._first_s = time.perf_counter()

    def mark(self) -> Any:
        """Enqueues a mark after all work submitted to the current stream; takes a few microseconds."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Returns when the device reached these marks, in seconds of perf_counter. Synchronises the device, so call it
        while no message is pending."""
        self._cuda.synchronize(self._device)
        times_s = [self._first_s + self._first.elapsed_time(mark) / 1e3 for mark in marks]
        self._align()
        return times_s


def clock_of(device: Any) -> DeviceClock | None:
    """Returns the clock of a GPU; None for a CPU, whose work is complete when the call returns."""
    return DeviceClock(device) if device.type == "cuda" else None


class Tracer:
    """Records the spans of one rank. The training loop sets `iteration`, which is stored in every span that ends."""

    def __init__(
        self, rank: int = 0, host: str = "", *, clock: DeviceClock | None = None, max_spans: int = MAX_SPANS
    ) -> None:
        """clock: of the device; None for a CPU."""
        self.rank, self.host, self.clock = rank, host, clock
        self.iteration: int | None = None
        self.spans: deque[tuple] = deque(maxlen=max_spans)
        self.unread: list[tuple] = []  # spans whose begin and end may be marks
        self._offset_s = _wall_clock_offset()

    def now(self, category: Category) -> object:
        """Returns seconds of perf_counter, or a mark of the device; control messages always use the host's clock."""
        return time.perf_counter() if self.clock is None or category == "control" else self.clock.mark()

    def read_marks(self) -> None:
        """Converts marks to seconds, at the end of an iteration; waits until the device has reached the last one."""
        marks = [one for span in self.unread for one in span[2:4] if not isinstance(one, float)]
        seconds = iter(self.clock.seconds(marks) if self.clock is not None and marks else ())
        for name, category, *ends, iteration, args in self.unread:
            start_s, end_s = (one if isinstance(one, float) else next(seconds) for one in ends)
            self.spans.append((name, category, start_s, end_s, iteration, args))
        self.unread.clear()

    @contextmanager
    def span(self, name: str, category: Category = "compute", **args: object) -> Iterator[dict[str, object]]:
        """Records a span: `with tracer.span("actor_generate", tokens=128): ...`; costs a few microseconds. The block
        may add to the args; a span that ends with an exception is recorded too."""
        start = self.now(category)
        try:
            yield args
        finally:
            spans = self.spans if self.clock is None else self.unread
            spans.append((name, category, start, self.now(category), self.iteration, args))

    def forget(self, before: int) -> None:
        """Drops the spans of iterations earlier than `before`, and those outside iterations: a day has millions."""
        while self.spans and (self.spans[0][4] is None or self.spans[0][4] < before):
            self.spans.popleft()

    def to_records(self, iterations: Iterable[int] | None = None) -> dict[str, object]:
        """Returns JSON-able {"rank", "host", "spans": [[name, category, start_s, end_s, iteration, args], ...]}.

        Times are of the wall clock.

        iterations: only their spans, to gather less on rank 0.
        """
        self.read_marks()
        wanted = None if iterations is None else set(iterations)
        shift = self._offset_s
        spans = [
            [name, category, start_s + shift, end_s + shift, iteration, args]
            for name, category, start_s, end_s, iteration, args in list(self.spans)
            if wanted is None or iteration in wanted
        ]
        return {"rank": self.rank, "host": self.host, "spans": spans}


def _wall_clock_offset() -> float:
    """Returns seconds to add to perf_counter to get the wall clock: the most precise of a few measurements."""
    brackets = []
    for _ in range(5):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        brackets.append((after - before, wall - (before + after) / 2))
    return min(brackets)[1]


@dataclass(frozen=True, slots=True)
class Lane:
    """The spans of one rank, ordered by start (longer ones first)."""

    rank: int
    host: str
    spans: tuple[Span, ...]


def lanes(records: Sequence[Mapping[str, Any]]) -> tuple[Lane, ...]:
    """Returns lanes from the results of `Tracer.to_records` of all ranks, ordered by rank."""
    by_rank = []
    for record in sorted(records, key=lambda record: record["rank"]):
        spans = sorted((Span(*row) for row in record["spans"]), key=lambda span: (span.start_s, -span.end_s))
        by_rank.append(Lane(record["rank"], record["host"], tuple(spans)))
    return tuple(by_rank)


def write_chrome(
    path: str | Path, records: Sequence[Mapping[str, object]], *, about: Mapping[str, object] = {}
) -> None:
    """Writes the Chrome trace format (JSON object form), which Perfetto and chrome://tracing open.

    A rank is a process with one thread, its lane; spans that overlap without nesting (of the host and of its device) go
    to a second thread, because spans of one thread must nest in this format. `about` becomes the file's metadata.
    """
    all_lanes = lanes(records)
    start_s = min((lane.spans[0].start_s for lane in all_lanes if lane.spans), default=0.0)
    events: list[dict[str, object]] = []
    for lane in all_lanes:
        name = f"rank {lane.rank}" + (f" ({lane.host})" if lane.host else "")
        tracks = _tracks(lane.spans)
        events.append(_event("process_name", lane.rank, ph="M", args={"name": name}))
        events.append(_event("process_sort_index", lane.rank, ph="M", args={"sort_index": lane.rank}))
        for track in sorted({1, *tracks}):
            name = "calls" if track == 1 else "in the background"
            events.append(_event("thread_name", lane.rank, track, ph="M", args={"name": name}))
        for span, track in zip(lane.spans, tracks, strict=True):
            args = ({} if span.iteration is None else {"iteration": span.iteration}) | span.args
            begin_ns, end_ns = round((span.start_s - start_s) * 1e9), round((span.end_s - start_s) * 1e9)
            times = {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
            events.append(_event(span.name, lane.rank, track, cat=span.category, ph="X", **times, args=args))
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_unix_s": start_s, **about}}
    Path(path).write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def read_chrome(path: Path) -> list[dict[str, Any]]:
    """Reads the records that `write_chrome` wrote; times are seconds since the first span, to a nanosecond. Returns
    None for a file that is not there or not a trace; malformed events are left out. Raises OSError and UserError."""
    records: dict[int, dict[str, Any]] = {}
    events = json_object(path).get("traceEvents")
    for event in events if isinstance(events, list) else ():
        with suppress(KeyError, TypeError, AttributeError, OverflowError):
            name, rank, args = printable(str(event["name"])), event["pid"] + 0, dict(event.get("args", {}))
            record = records.setdefault(rank, {"rank": rank, "host": "", "spans": []})
            if name == "process_name":
                record["host"] = printable(args["name"].partition(" (")[2].removesuffix(")"))
            if event["ph"] == "X":
                start_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                if -math.inf < start_s <= end_s < math.inf:
                    number = args.pop("iteration", None)
                    record["spans"].append([name, str(event["cat"]), start_s, end_s, number, args])
    return [records[rank] for rank in sorted(records)]


def _event(name: str, rank: int, track: int = 0, **fields: object) -> dict[str, object]:
    return {"name": name, "pid": rank, "tid": track, **fields}


def _tracks(spans: Sequence[Span]) -> list[int]:
    """Returns, for spans ordered by start, the first track (from 1) on which each span nests in, or follows, earlier
    spans."""
    open_ends: list[list[float]] = []  # for every track, the ends of the spans still open
    chosen = []
    for span in spans:
        for ends in open_ends:
            while ends and ends[-1] <= span.start_s:
                ends.pop()
        track = next((i for i, ends in enumerate(open_ends) if not ends or span.end_s <= ends[-1]), len(open_ends))
        if track == len(open_ends):
            open_ends.append([])
        open_ends[track].append(span.end_s)
        chosen.append(track + 1)
    return chosen


def busy_fraction(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Returns the share of [start_s, end_s] during which at least one compute span and no wait span runs."""
    changes = []
    for span in spans:
        first, last = max(span.start_s, start_s), min(span.end_s, end_s)
        if span.category in ("compute", "wait") and first < last:
            changes += [(first, span.category, 1), (last, span.category, -1)]
    running = {"compute": 0, "wait": 0}
    busy_s, now_s = 0.0, start_s
    for moment, category, change in sorted(changes, key=lambda change: change[0]):
        if running["compute"] and not running["wait"]:
            busy_s += moment - now_s
        running[category] += change
        now_s = moment
    return busy_s / (end_s - start_s) if end_s > start_s else 0.0

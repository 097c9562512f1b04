"""Spans of ranks: what recording costs, and that the Chrome trace is valid."""

import json
import time

import pytest

from rlhf_spmd.runtime.world.trace import Span, Tracer, busy_fraction, read_chrome, write_chrome


def record(rank, *spans, host="n1"):
    """Returns a record with times relative to a date; spans are (name, category, start_s, end_s, iteration)."""
    rows = [
        [name, category, 1.7e9 + start, 1.7e9 + end, iteration, {}] for name, category, start, end, iteration in spans
    ]
    return {"rank": rank, "host": host, "spans": rows}


def two_ranks():
    return [
        record(
            1,
            ("actor_generate", "compute", 0.0, 1.0, 0),
            ("wait for ref_logprobs", "wait", 1.0, 2.0, 0),
            ("actor_train", "compute", 2.0, 3.0, 0),
            ("actor_generate", "compute", 3.0, 4.0, 1),
            host="n2",
        ),
        record(
            0,
            ("actor_generate", "compute", 0.1, 1.1, 0),
            ("responses", "transfer", 0.9, 1.4, 0),
            ("reference_infer", "compute", 1.1, 2.0, 0),
            ("estimate_advantages", "compute", 1.2, 1.3, 0),
            ("agree on metrics", "control", 2.9, 3.0, 0),
            ("actor_generate", "compute", 3.0, 4.0, 1),
        ),
    ]


# ---- recording


def test_spans_carry_names_iterations_and_wall_clock_times():
    recorder = Tracer(3, "n1")
    before = time.time()
    with recorder.span("start"):
        pass
    recorder.iteration = 7
    with pytest.raises(ValueError), recorder.span("actor_generate", tokens=5) as span:
        with recorder.span("responses", "wait"):
            time.sleep(0.01)
        span["bytes"] = 6
        raise ValueError
    now = time.perf_counter()
    recorder.spans.append(("weights", "transfer", now - 0.5, now, 7, {"bytes": 8}))
    after = time.time()
    result = json.loads(json.dumps(recorder.to_records()))
    assert (result["rank"], result["host"]) == (3, "n1")
    spans = [Span(*row) for row in result["spans"]]
    assert [(span.name, span.category, span.iteration, span.args) for span in spans] == [
        ("start", "compute", None, {}),
        ("responses", "wait", 7, {}),
        ("actor_generate", "compute", 7, {"tokens": 5, "bytes": 6}),
        ("weights", "transfer", 7, {"bytes": 8}),
    ]
    for span in spans[:3]:
        assert before - 0.005 <= span.start_s <= span.end_s <= after + 0.005
    assert spans[1].end_s - spans[1].start_s >= 0.009
    assert spans[3].end_s - spans[3].start_s == pytest.approx(0.5, abs=1e-6)
    assert [row[0] for row in recorder.to_records([0, 7])["spans"]] == ["responses", "actor_generate", "weights"]


class Queue:
    """A device that works off a queue behind the host's back; its marks know their time when it has come to them."""

    def __init__(self):
        self.work_s, self.free_s, self.waits = [], 0.0, 0

    def ask(self, seconds: float) -> None:
        self.work_s.append(seconds)

    def mark(self) -> list[float]:
        self.work_s.append([])
        return self.work_s[-1]

    def seconds(self, marks) -> list[float]:
        self.waits += 1
        for one in self.work_s:
            if isinstance(one, list):
                one.append(self.free_s)
            else:
                self.free_s += one
        self.work_s = []
        return [mark[0] for mark in marks]


def test_spans_of_a_device_are_when_it_worked_and_not_when_it_was_asked():
    """Without marks the first call would take no time and the last, which reads a result, all of it."""
    queue = Queue()
    recorder = Tracer(clock=queue)
    recorder.iteration = 0
    for name, seconds in (("ref_logprobs", 3.0), ("actor_train", 5.0)):
        with recorder.span(name):
            queue.ask(seconds)
    with recorder.span("agree", "control"):
        began = time.perf_counter()
    assert queue.waits == 0 and not recorder.spans
    recorder.read_marks()
    assert queue.waits == 1 and len(recorder.spans) == 3
    spans = {span[0]: span for span in recorder.spans}
    assert spans["ref_logprobs"][2:4] == (0.0, 3.0) and spans["actor_train"][2:4] == (3.0, 8.0)
    assert spans["agree"][2] <= began <= spans["agree"][3]  # the host's
    assert {span[4] for span in recorder.spans} == {0}
    with recorder.span("critic_train"):
        queue.ask(2.0)
    assert [row[0] for row in recorder.to_records()["spans"]][-1] == "critic_train"
    recorder.read_marks()
    assert queue.waits == 2  # nothing to read: no wait


# ---- Chrome trace


def check_chrome(document):
    """Checks the parts of the Trace Event Format that viewers rely on."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    threads = {}
    for event in document["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["args"]) is dict
        assert event["ph"] in ("M", "X") and type(event["name"]) is str
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            continue
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ts"] >= 0 and event["dur"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    named = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert set(threads) <= named
    for events in threads.values():  # spans of a thread nest or follow one another
        stack = []
        for event in events:
            start_ns, end_ns = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            while stack and stack[-1] <= start_ns:
                stack.pop()
            assert not stack or end_ns <= stack[-1]
            stack.append(end_ns)
    return threads


def test_chrome_trace(tmp_path):
    path = tmp_path / "timeline.json"
    write_chrome(path, two_ranks(), about={"strategy": "flattening"})
    document = json.loads(path.read_text(encoding="utf-8"))
    threads = check_chrome(document)
    assert {thread: len(events) for thread, events in threads.items()} == {(0, 1): 5, (0, 2): 1, (1, 1): 4}
    assert threads[0, 2][0]["name"] == "responses"  # overlaps two calls, so it has a lane of its own
    names = [event["args"].get("name") for event in document["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0 (n1)", "rank 1 (n2)"]
    first = threads[0, 1][0]
    assert first["ts"] == pytest.approx(100_000, abs=1) and first["dur"] == pytest.approx(1_000_000, abs=1)
    assert first["args"] == {"iteration": 0} and document["otherData"]["strategy"] == "flattening"


# ---- busy share


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 0.0),
        ([("compute", 0, 10)], 1.0),
        ([("compute", -5, 2), ("compute", 1, 3), ("transfer", 3, 9)], 0.3),
        ([("compute", 0, 6), ("wait", 2, 3), ("wait", 7, 9)], 0.5),
        ([("compute", 0, 8), ("compute", 1, 2), ("control", 0, 10)], 0.8),
        ([("compute", 0, 5), ("compute", 5, 10), ("wait", 5, 5)], 1.0),
    ],
)
def test_busy_fraction(spans, share):
    spans = [Span("x", category, start, end, None, {}) for category, start, end in spans]
    assert busy_fraction(spans, 0, 10) == pytest.approx(share)
    assert busy_fraction(spans, 0, 0) == 0.0


# ---- picture


def test_a_trace_of_any_content_is_read(tmp_path):
    path = tmp_path / "t.json"
    write_chrome(path, two_ranks())
    whole = json.loads(path.read_text(encoding="utf-8"))
    good = read_chrome(path)
    odd = [3, None, {}, {"name": "x", "pid": "a", "ph": "X"}, {"name": "process_name", "pid": 0, "args": {"name": 3}}]
    odd += [{"name": "x", "pid": 0, "ph": "X", "cat": "compute", "ts": ts, "dur": 1, "args": {}} for ts in ("1", 1e999)]
    path.write_text(json.dumps(whole | {"traceEvents": whole["traceEvents"] + odd}), encoding="utf-8")
    assert read_chrome(path) == good
    for text in ("", "[]", '{"traceEvents": 3}', '{"traceEvents": [{'):
        path.write_text(text, encoding="utf-8")
        assert read_chrome(path) == []
    assert read_chrome(tmp_path / "none.json") == []

"""Copies between host and device in streams of their own: what waits for what, with streams that only keep records."""

import itertools
from contextlib import contextmanager

import torch

from rlhf_spmd.runtime.engines import host_memory


class Stream:
    """Keeps what it was told to do, in order, and which work of others must have ended before."""

    current: "Stream"
    works: "list[Stream]"  # by number: who does it

    def __init__(self, device: object = None):
        self.before: set[int] = set()  # works that end before what comes next
        self.mine: set[int] = set()

    def wait_stream(self, other: "Stream") -> None:
        self.before |= other.before | other.mine


def test_no_room_is_written_before_its_part_has_gone(monkeypatch):
    """Five parts in two rooms: a copy to a room waits for the copy from it, a use for the copy to it, a copy from it
    for its use; and beside all that the next part comes while one is used."""
    main, after, number = Stream(), {}, itertools.count()
    Stream.current = main

    def does(what: tuple) -> None:
        stream, work = Stream.current, next(number)
        after[what] = {known for known, others in ids.items() if others in stream.before | stream.mine}
        ids[what] = work
        stream.mine.add(work)

    @contextmanager
    def entered(stream):
        Stream.current = stream
        yield
        Stream.current = main

    ids: dict[tuple, int] = {}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(host_memory, "copy_streams", lambda device: (Stream(), Stream()))
    copied = itertools.count()
    monkeypatch.setattr(host_memory, "_copy", lambda *of: _noted(of, does, entered, parts, copied))
    parts = [[torch.full((4,), float(place))] for place in range(5)]

    class CUDA:
        type = "cuda"

    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **more: real(*shape, **more))
    for place, _ in enumerate(host_memory.visits(parts, CUDA())):
        does(("use", place))
    does(("end",))
    for place in range(5):
        assert ("come", place) in after["use", place] and ("use", place) in after["go", place]
        if place > 1:
            assert ("go", place - 2) in after["come", place]
        if place:
            assert ("use", place - 1) not in after["come", place]  # they overlap
            assert ("go", place - 1) not in after["come", place]
        assert ("go", place) in after["end",]


def _noted(of, does, entered, parts, copied) -> None:
    sources, targets, stream = of
    place = next((i for i, part in enumerate(parts) if part is sources), None)
    with entered(stream):
        does(("come", place) if place is not None else ("go", next(copied)))

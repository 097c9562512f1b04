"""When a GPU begins and ends what it was asked for, without waiting for it in between: CUDA events on the current
stream, laid on the host's clock."""

import time
from collections.abc import Sequence

import torch


class DeviceClock:
    """Marks in the queue of one device (trace.Clock).

    An event's time is known relative to another event, in float32 milliseconds, by a clock that drifts from the host's.
    So the two are laid on each other anew each time marks are read, while nothing is under way.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._meet()

    def _meet(self) -> None:
        torch.cuda.synchronize(self._device)
        self._first = self.mark()
        self._first.synchronize()
        self._first_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """Puts a mark behind all work asked for so far on the current stream; a few microseconds."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """When the device came to these marks, in seconds of perf_counter; waits until it has. To call where no message
        is awaited, since it waits for all of the device's work."""
        torch.cuda.synchronize(self._device)
        found = [self._first_s + self._first.elapsed_time(mark) / 1e3 for mark in marks]
        self._meet()
        return found


def clock_of(device: torch.device) -> DeviceClock | None:
    """The clock of a GPU; None for a CPU, whose work is done when the call returns."""
    return DeviceClock(device) if device.type == "cuda" else None

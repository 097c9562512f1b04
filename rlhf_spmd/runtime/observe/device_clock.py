"""Start and end times of a GPU's work, taken without waiting for it: CUDA events, mapped onto the host's clock."""

import time
from collections.abc import Sequence

import torch


class DeviceClock:
    """Marks in the queue of one device.

    CUDA measures the time between two events, in float32 milliseconds, with a clock that drifts from the host's. The
    two clocks are therefore aligned again each time marks are read, while the device is idle.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._align()

    def _align(self) -> None:
        torch.cuda.synchronize(self._device)
        self._first = self.mark()
        self._first.synchronize()
        self._first_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """Enqueues a mark after all work submitted to the current stream; takes a few microseconds."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Returns when the device reached these marks, in seconds of perf_counter. Synchronises the device, so call it
        while no message is pending."""
        torch.cuda.synchronize(self._device)
        times_s = [self._first_s + self._first.elapsed_time(mark) / 1e3 for mark in marks]
        self._align()
        return times_s


def clock_of(device: torch.device) -> DeviceClock | None:
    """Returns the clock of a GPU; None for a CPU, whose work is complete when the call returns."""
    return DeviceClock(device) if device.type == "cuda" else None

"""Device memory that gradients and KV caches have one after the other, at one address.

A CUDA graph reads a cache where it was when the graph was captured, so graphs last over iterations only if the cache is
there again. Gradients have memory during an optimizer step only, so the cache can have it between the steps, and the
peak is the larger of the two. A cache that is larger than the gradients has memory of its own, and the buffer is then
freed before the next one is made.
"""

import functools
import weakref

import torch
from torch import Tensor


class Scratch:
    """One buffer of a device, for one user at a time. On a CPU there is none: fresh pages cost no more there."""

    def __init__(self, device: torch.device, *, lasts: bool):
        """lasts: whether there is a buffer."""
        self._device, self._lasts = device, lasts
        self._buffer: Tensor | None = None
        self._user: weakref.ref[Tensor] | None = None
        self._most_wanted = 0  # bytes of the largest cache since `release`

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffer, if nobody uses it."""
        is_idle = self._user is None or self._user() is None
        return self._buffer.nbytes if self._buffer is not None and is_idle else 0

    def take(self, num_bytes: int, *, grows: bool) -> Tensor:
        """Returns bytes, uint8 [num_bytes], as long as the tensor that is returned lives: views alone do not keep it.
        They are zeros on a CPU, else uninitialised.

        grows: whether the buffer may be made larger for them.
        """
        if not self._lasts:
            make = torch.zeros if self._device.type == "cpu" else torch.empty
            return make(num_bytes, dtype=torch.uint8, device=self._device)
        is_free = self._buffer is None or self.idle_bytes > 0
        if not grows:
            self._most_wanted = max(self._most_wanted, num_bytes)
        elif is_free and self.idle_bytes < num_bytes:
            self._buffer = None  # before the larger one is made
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if not is_free or self._buffer is None or self._buffer.nbytes < num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        taken = self._buffer[:num_bytes]
        self._user = weakref.ref(taken)
        return taken

    def release(self) -> None:
        """Frees the buffer if the caches since the last call did not fit into it."""
        if self.idle_bytes < self._most_wanted:
            self._buffer = None
        self._most_wanted = 0


@functools.cache
def scratch(device: torch.device) -> Scratch:
    """Returns the buffer of a device of this process."""
    return Scratch(device, lasts=device.type == "cuda")

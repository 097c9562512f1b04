"""Device memory that gradients and KV caches have one after the other, at one address.

A CUDA graph reads a cache where it was when the graph was captured, so graphs last over iterations only if the cache is
there again. Gradients are there during an optimizer step only, so a cache can have their memory between the steps, and
the peak is the larger of the two. A cache that is larger than the gradients has memory of its own, and the buffer is
then freed before the next one is made. Where a cache is alive while a model trains, each has its own.
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
        self._cache: weakref.ref[Tensor] | None = None  # the last one with memory of its own
        self._for_caches = True
        self._most_wanted = 0  # bytes of the largest cache since `release`

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffer, if nobody uses it."""
        return self._buffer.nbytes if self._buffer is not None and not _lives(self._user) else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the largest cache that the buffer has room for."""
        return self.idle_bytes if self._for_caches else 0

    def take(self, num_bytes: int, *, is_cache: bool) -> Tensor:
        """Returns bytes, uint8 [num_bytes], as long as the tensor that is returned lives: views alone do not keep it.
        They are zeros on a CPU, else uninitialised.

        is_cache: the buffer grows for gradients, not for caches; and is for gradients alone once a cache has been alive
            while they were made.
        """
        if not self._lasts:
            make = torch.zeros if self._device.type == "cpu" else torch.empty
            return make(num_bytes, dtype=torch.uint8, device=self._device)
        is_idle = not _lives(self._user)
        if is_cache:
            self._most_wanted = max(self._most_wanted, num_bytes)
            fits = num_bytes <= self.cache_bytes
        else:
            self._for_caches &= is_idle and not _lives(self._cache)
            fits = is_idle
            if is_idle and self.idle_bytes < num_bytes:
                self._buffer = None  # before the larger one is made
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if not fits or self._buffer is None:
            own = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._cache = weakref.ref(own) if is_cache else self._cache
            return own
        taken = self._buffer[:num_bytes]
        self._user = weakref.ref(taken)
        return taken

    def release(self) -> None:
        """Frees the buffer if the caches since the last call did not fit into it."""
        if self._buffer is not None and self._buffer.nbytes < self._most_wanted:
            self._buffer = None
        self._most_wanted = 0


def _lives(user: "weakref.ref[Tensor] | None") -> bool:
    return user is not None and user() is not None


@functools.cache
def scratch(device: torch.device) -> Scratch:
    """Returns the buffer of a device of this process."""
    return Scratch(device, lasts=device.type == "cuda")

"""The token ids that may be drawn, where embeddings have more rows than the tokenizer has tokens.

Rows are often padded to a round number, and a tokenizer may have holes between its tokens. Such ids have logit -inf, so
logprobs, entropy and KL of all models are over one support. Ids after the last token are cut from the output product,
up to a whole tile of it; the few that are left in the tile, and holes, are filled with -inf.

Legend: N rows, C columns (a chunk of the vocabulary), H holes.
"""

import math
from bisect import bisect_left

import torch
from torch import Tensor

TILE = 128  # columns of the output product are whole tiles, so that rows of logits stay aligned


class KnownTokens:
    """The ids below `stop` but the holes."""

    def __init__(self, stop: int, holes: tuple[int, ...] = ()):
        """holes: ascending ids below stop."""
        self.stop, self.holes = stop, holes
        self._of_device: dict[torch.device, Tensor] = {}

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.stop - len(self.holes)

    def within(self, ids: range) -> range:
        """Returns those of consecutive ids that lie below `stop`."""
        return range(min(ids.start, self.stop), min(ids.stop, self.stop))

    def width(self, ids: range) -> int:
        """Returns how many columns of a product over these ids are computed: whole tiles that hold all ids below
        `stop`."""
        return min(-(-len(self.within(ids)) // TILE) * TILE, len(ids))

    def columns_of_holes(self, ids: range, device: torch.device) -> Tensor | None:
        """Returns the places of the holes among these ids, int64 [H]; None if there is none."""
        first, last = bisect_left(self.holes, ids.start), bisect_left(self.holes, ids.stop)
        if first == last:
            return None
        if device not in self._of_device:
            self._of_device[device] = torch.tensor(self.holes, device=device)
        return self._of_device[device][first:last] - ids.start

    def fill_(self, x_NC: Tensor, ids: range, value: float = -math.inf) -> Tensor:
        """Writes a value into the columns of ids that are not known. x_NC: a column for each of these ids."""
        num = len(self.within(ids))
        if num < len(ids):
            x_NC[:, num:].fill_(value)
        columns_H = self.columns_of_holes(ids, x_NC.device) if self.holes else None
        return x_NC if columns_H is None else x_NC.index_fill_(1, columns_H, value)

    def missing(self, vocab_size: int) -> list[int]:
        """Returns the ids of a model with so many rows that are not known."""
        return [*self.holes, *range(self.stop, vocab_size)]

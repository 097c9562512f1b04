"""A contiguous KV cache in which a row's slot *is* its position, so that rows of unequal length share one batch.

Prompts are prefilled left-aligned; the padding on their right leaves unused slots, which the row's own new tokens
overwrite one by one before any query may look at them.
"""

# B sequences, T new tokens, S slots, L layers of this stage, K key-value heads of this tp slice, d head_dim

import torch
from torch import Tensor

from rlhf_spmd.model.parallel import layers_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import split


class KVCache:
    """Keys and values of a model's layers for B rows of at most `num_slots` tokens: 2 * L * B * K * S * d numbers."""

    def __init__(self, model: Transformer, num_rows: int, num_slots: int, device: torch.device):
        config, shard, dtype = model.config, model.parallel.shard, model.dtype
        layers, heads = layers_of(config, shard), split(config.num_kv_heads, shard.tp, shard.tp_index)
        shape = (len(layers), num_rows, len(heads), num_slots, config.head_dim)
        self.first_layer = layers.start
        # Zeros, not empty: a masked slot has weight 0, but 0 times an uninitialised NaN is NaN.
        self.keys_LBKSd = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LBKSd = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths_B = torch.zeros(num_rows, dtype=torch.int64, device=device)  # tokens before the current step
        self.num_seen = 0  # slots that any row has used
        self.mask_B11S: Tensor | None = None
        self.decoding = False

    def prefilled(self, lengths_B: Tensor) -> None:
        """Ends the prefill: row b holds lengths_B[b] real tokens; every later update is one token per row."""
        self.lengths_B, self.decoding = lengths_B.clone(), True
        self._prepare()

    def advance(self) -> None:
        """Ends a decode step: each row has one more token."""
        self.lengths_B += 1
        self._prepare()

    def _prepare(self) -> None:
        """The mask of the next step: slots up to and including the position of its token."""
        self.num_seen = int(self.lengths_B.max()) + 1
        slots_S = torch.arange(self.num_seen, device=self.lengths_B.device)
        self.mask_B11S = (slots_S <= self.lengths_B[:, None])[:, None, None, :]
        if bool(self.mask_B11S.all()):
            self.mask_B11S = None
        self.rows_B = torch.arange(len(self.lengths_B), device=self.lengths_B.device)

    def keep(self, rows_B: Tensor) -> None:
        """Drops all rows but these (finished sequences leave the batch)."""
        self.keys_LBKSd = self.keys_LBKSd[:, rows_B]
        self.values_LBKSd = self.values_LBKSd[:, rows_B]
        self.lengths_B = self.lengths_B[rows_B]
        self._prepare()

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores new tokens of a layer; returns all keys and values that they may attend to, and the mask."""
        keys_BKSd, values_BKSd = (x[layer - self.first_layer] for x in (self.keys_LBKSd, self.values_LBKSd))
        if not self.decoding:
            num_new = keys_BKTd.shape[2]
            keys_BKSd[:, :, :num_new], values_BKSd[:, :, :num_new] = keys_BKTd, values_BKTd
            return keys_BKTd, values_BKTd, None
        keys_BKSd[self.rows_B, :, self.lengths_B] = keys_BKTd[:, :, 0]
        values_BKSd[self.rows_B, :, self.lengths_B] = values_BKTd[:, :, 0]
        return keys_BKSd[:, :, : self.num_seen], values_BKSd[:, :, : self.num_seen], self.mask_B11S

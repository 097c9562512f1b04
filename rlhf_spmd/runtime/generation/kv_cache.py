"""The tensors of a paged KV cache, and how many blocks fit on a device. scheduler.py assigns blocks to requests."""

# L layers of this stage, n blocks, K key-value heads of this tp slice, s tokens of a block, d head_dim

from collections.abc import Sequence

import psutil
import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.parallel import layers_of
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.shard import split
from rlhf_spmd.runtime.generation.scheduler import Copies, Moves
from rlhf_spmd.runtime.world.scratch import scratch

GPU_BLOCK = 16  # tokens; smaller blocks waste less memory, larger ones need shorter tables


class KVCache:
    """Keys and values of a model's layers: 2 * L * n * K * s * d numbers in the model's precision."""

    def __init__(self, model: Transformer, num_blocks: int, block_size: int):
        config, shard = model.config, model.parallel.shard
        layers, heads = layers_of(config, shard), split(config.num_kv_heads, shard.tp, shard.tp_index)
        shape = (len(layers), num_blocks, len(heads), block_size, config.head_dim)
        device = next(model.parameters()).device
        self.first_layer, self.block_size = layers.start, block_size
        # On a CPU zeros: a masked slot has weight 0, but 0 x an uninitialised NaN is NaN. The kernels of a GPU load no
        # slot beyond a row's length, and clearing most of its memory would take 20 ms for each engine.
        self._memory = scratch(device).take(num_blocks * block_size * token_bytes(model), is_cache=True)
        self.keys_LnKsd, self.values_LnKsd = self._memory.view(model.dtype).view(2, *shape)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys_nKsd, values_nKsd of a layer, given its number in the whole model."""
        return self.keys_LnKsd[layer - self.first_layer], self.values_LnKsd[layer - self.first_layer]

    def copy(self, copies: Copies, num_tokens: int) -> None:
        """Copies the first tokens of blocks; all are read before one is written."""
        if not copies:
            return
        sources, targets = (torch.tensor(side, device=self.keys_LnKsd.device) for side in zip(*copies, strict=True))
        for stored in (self.keys_LnKsd, self.values_LnKsd):
            part = stored[:, :, :, :num_tokens]
            part[:, targets] = part[:, sources]

    def move(self, moves: Moves) -> None:
        """Copies the first tokens of blocks; all are read before one is written. One after another, because a row has
        one block on a CPU, whose tokens are in one piece."""
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        for place, (source, to, num_tokens) in enumerate(moves):
            for later, _, num in moves[place + 1 :]:
                if later == to:
                    kept[to] = (self.keys_LnKsd[:, to, :, :num].clone(), self.values_LnKsd[:, to, :, :num].clone())
            found = kept.get(source, (self.keys_LnKsd[:, source], self.values_LnKsd[:, source]))
            for stored_LnKsd, read_LKsd in zip((self.keys_LnKsd, self.values_LnKsd), found, strict=True):
                stored_LnKsd[:, to, :, :num_tokens] = read_LKsd[:, :, :num_tokens]


def free_bytes(device: torch.device, num_ranks: int) -> float:
    """Returns the free memory of a device, divided by the number of ranks that compute on it (RankDevice.num_ranks).

    On a GPU this excludes memory that torch has reserved: none of its pieces may be large enough for a cache, and
    releasing it now (empty_cache) would synchronise the device, including messages posted early that may never
    complete. `release_unused` keeps it small between iterations, when no message is pending.
    """
    if device.type == "cpu":
        return psutil.virtual_memory().available / num_ranks
    return torch.cuda.mem_get_info(device)[0] / num_ranks


def cache_bytes(device: torch.device, num_ranks: int, share: float) -> float:
    """Returns the bytes that a cache may take: a share of what is free, or the idle buffer of gradients."""
    return max(share * free_bytes(device, num_ranks), scratch(device).cache_bytes)


def release_unused(device: torch.device) -> None:
    """Returns a GPU's memory that torch has reserved but does not use to the device, so that the KV cache of the next
    iteration can be allocated in one piece. Synchronises the device."""
    scratch(device).release()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def token_bytes(model: Transformer) -> int:
    """Returns bytes per token in the cache on this rank."""
    config, shard = model.config, model.parallel.shard
    layers, heads = layers_of(config, shard), split(config.num_kv_heads, shard.tp, shard.tp_index)
    return 2 * len(layers) * len(heads) * config.head_dim * model.dtype.itemsize


def blocks_that_fit(model: Transformer, block_size: int, wanted: int, longest: int, free_bytes: float) -> int:
    """Returns how many of the `wanted` blocks fit into free_bytes. Raises UserError if one sequence of `longest` tokens
    does not fit."""
    fit = int(min(free_bytes / (block_size * token_bytes(model)), wanted))
    least = -(-longest // block_size)
    if free_bytes < least * block_size * token_bytes(model):
        raise UserError(
            f"the KV cache of one sequence of {longest} tokens takes {longest * token_bytes(model) / 2**20:,.0f} MiB, "
            f"but only {free_bytes / 2**20:,.0f} MiB are available; lower generation.max_new_tokens, raise "
            "generation.cache_fraction, or raise the tp of generation"
        )
    return max(fit, least)


def slots_of(blocks: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int) -> Tensor:
    """Returns the slot of each token of packed sequences: block * s + offset, int64 [N]. blocks: of each sequence."""
    widest = max(map(len, blocks))
    tables_AM = torch.tensor([[*row, *[0] * (widest - len(row))] for row in blocks])
    lengths_A = torch.tensor(lengths)
    rows_N = torch.arange(len(lengths)).repeat_interleave(lengths_A)
    offsets_N = torch.arange(len(rows_N)) - (lengths_A.cumsum(0) - lengths_A)[rows_N]
    return tables_AM[rows_N, offsets_N // block_size] * block_size + offsets_N % block_size

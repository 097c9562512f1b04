"""Collectives of torch.distributed whose names have changed. They work from one tensor into one; given a list of parts,
NCCL would make a copy."""

import torch.distributed as dist

# The names before the `or` exist since torch 2.13; both take (output, input, group=).
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

"""The experts of a mixture (arXiv 1701.06538), each a SwiGLU: a token's k results, weighted and summed.

    y_n = sum_j w_nj down_e(silu(gate_e(x_n)) * up_e(x_n)),  e = ids_nj, in the order of the ids

The rows are sorted by expert once. An expert that is hit multiplies its rows by one product of the library in use
(products.py), so a row has the bits beside others that the library gives it. Experts are taken in ascending order and
each adds to a token once, so sums have one order, whatever the batch. Bound by reading the experts that are hit, in a
decode step.

Legend: N rows, k experts of a row, A = N k assignments, n those of an expert, E experts, D hidden, I inner size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_spmd.kernels.products import Packed, in_use, multiplies_at_once, product, products


def router_logits(x_ND: Tensor, router_ED: Tensor) -> Tensor:
    """Returns the logits_NE of a router, float32 or wider, multiplied by the library in use for the dtype of x."""
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return product(x_ND.to(wide), router_ED.to(wide), library=in_use(x_ND.dtype))


def choose(p_NE: Tensor, k: int) -> Tensor:
    """Returns the k most probable experts of each row, int64 [N, k] in ascending order; of equal ones the first."""
    best_NE = p_NE.detach().sort(dim=-1, descending=True, stable=True).indices  # topk promises no order
    return best_NE[:, :k].sort(dim=-1).values


def mixture(
    x_ND: Tensor,
    ids_Nk: Tensor,
    weights_Nk: Tensor,
    gate_ups: Sequence[Tensor | Packed],
    downs: Sequence[Tensor | Packed],
    *,
    first: int = 0,
    gated: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Returns y_ND, differentiable once in x, weights and matrices; the gradient of an expert without rows is zero.

    ids_Nk: int64, different and ascending in a row.
    gate_ups, downs: matrices [2 I, D], gate first, and [D, I] of experts `first` and following; others add nothing.
    gated: silu(gate) * up.
    """
    num, ids_A = len(gate_ups), ids_Nk.flatten() - first
    order_A = ids_A.argsort(stable=True)
    counts = torch.bincount(ids_A.clamp(-1, num) + 1, minlength=num + 2).tolist()
    mine_A, counts = order_A[counts[0] : len(ids_A) - counts[-1]], counts[1:-1]
    rows_A, weights_A1 = mine_A // ids_Nk.shape[1], weights_Nk.reshape(-1, 1).index_select(0, mine_A)
    x_AD, y_ND = x_ND.index_select(0, rows_A), torch.zeros_like(x_ND)
    if multiplies_at_once(x_ND, gate_ups, counts):
        inner_AI = gated(*products(x_AD, gate_ups, counts).chunk(2, dim=-1))
        parts_ND = x_ND.new_zeros(len(ids_A), x_ND.shape[1])
        parts_ND[mine_A] = products(inner_AI, downs, counts) * weights_A1
        for part_ND in parts_ND.view(*ids_Nk.shape, -1).unbind(1):
            y_ND += part_ND
        return y_ND
    parts = (x_AD.split(counts), rows_A.split(counts), weights_A1.split(counts))
    for e, (x_nD, rows_n, weights_n1) in enumerate(zip(*parts, strict=True)):
        if len(rows_n) or e == 0:  # one takes part in any case, so that all have gradients
            inner_nI = gated(*product(x_nD, gate_ups[e]).chunk(2, dim=-1))
            y_ND.index_add_(0, rows_n, product(inner_nI, downs[e]) * weights_n1)
    return y_ND

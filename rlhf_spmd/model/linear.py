"""Linear layers, and which way round a CPU multiplies a few rows.

For the rows of a decode step torch's product of weight and transposed input is up to twice as fast as F.linear (bench
`generate`, bench/LOG.md): the libraries behind it then split the large dim among threads and vector registers instead
of the small one. The result is a transposed view, which the next such product takes as it is.
"""

# N rows, I inputs, O outputs

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST_ROWS, MOST_ROWS = 8, 64  # between them it pays, in float32 and bfloat16, with one thread and with two


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """x [..., I] -> [..., O]; fast: whichever way round is faster."""
    if fast and x.device.type == "cpu" and FEWEST_ROWS <= len(x) <= MOST_ROWS:
        y_NO = torch.mm(weight_OI, x.t()).t()
        return y_NO if bias_O is None else y_NO + bias_O
    return F.linear(x, weight_OI, bias_O)


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: Tensor, *, fast: bool = False) -> Tensor:
        return linear(x, self.weight, self.bias, fast=fast)

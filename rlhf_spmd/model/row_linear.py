"""Linear layers whose inputs tensor parallelism splits: their products are summed over the ranks."""

from torch import Tensor, nn

from rlhf_spmd.kernels.dropout import Dropout
from rlhf_spmd.kernels.products import product
from rlhf_spmd.model.linear import Adapted, Again, LowRank, Weight
from rlhf_spmd.model.parallel import Group, scatter_tokens, sum_over


class RowLinear(nn.Linear):
    """A linear layer whose input dim tp splits: the ranks' products are summed, then the bias is added once."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, group: Group):
        super().__init__(num_in, num_out, bias=bias)
        self.group = group

    def forward(
        self,
        x: Tensor,
        *,
        packed: bool,
        weight: Weight | None = None,
        again: Again | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Multiplies x [..., this rank's inputs] by the weight -> [..., D] (packed: this rank's share of the tokens).

        weight: see `Linear`.
        again, dropout: see `LowRank`.
        """
        weight = self.weight if weight is None else weight
        if self.group is None:
            return product(x, weight, self.bias)
        return self.summed(product(x, weight), packed=packed)

    def summed(self, part: Tensor, *, packed: bool) -> Tensor:
        """Sums the ranks' products, and adds the bias."""
        y = scatter_tokens(part, group=self.group) if packed else sum_over(part, group=self.group)
        return y if self.bias is None else y + self.bias


class AdaptedRowLinear(RowLinear, Adapted):
    """A `RowLinear` with an adapter, whose part of the product is summed with that of the weight."""

    low_rank: LowRank | None  # of it alone; None: `weight` has the adapter in it

    def forward(
        self,
        x: Tensor,
        *,
        packed: bool,
        weight: Weight | None = None,
        again: Again | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Multiplies as `RowLinear` does."""
        if self.low_rank is None:
            return super().forward(x, packed=packed, weight=weight)
        weight = self.weight if weight is None else weight
        part = product(x, weight, self.bias if self.group is None else None)
        y, *_ = self.low_rank(x, part, again=again, dropout=dropout)
        return y if self.group is None else self.summed(y, packed=packed)

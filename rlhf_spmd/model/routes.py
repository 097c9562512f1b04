"""The experts that the tokens of a pass take in each layer of a mixture: recorded, or given."""

# N tokens, L sparse layers of the whole model, k experts of a token

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(slots=True)
class RouterLosses:
    """The losses of the routers of a mini-batch, whose gradients are added to those of their logits.

    Load balancing (arXiv 2101.03961, equation 4; in transformers' form all layers count as one):
        E sum_e f_e P_e,  f_e: choices of expert e per token of a layer, P_e: mean probability;
    z (arXiv 2202.08906, equation 5): mean of logsumexp(logits)^2. Both are means over the tokens of all ranks, given f.

    shares_E: f, of the choices that were stored with the rows.
    number: tokens of the mini-batch times sparse layers.
    balance, z: coefficients.
    """

    shares_E: Tensor
    number: float
    balance: float
    z: float
    sums: dict[int, Tensor] = field(default_factory=dict)  # of this pass by layer: balance, z, entropy in nats, tokens

    def gradient(self, layer: int, logits_NE: Tensor, counts_N: Tensor) -> Tensor:
        """Returns the gradient in the logits of a layer, and keeps its sums for the log.

        counts_N: bool, the tokens that count.
        """
        log_p_NE, z_N1 = logits_NE.log_softmax(dim=-1), logits_NE.logsumexp(dim=-1, keepdim=True)
        p_NE = log_p_NE.exp()
        of_expert_E = len(self.shares_E) * self.shares_E.to(p_NE)
        balance_N1 = (p_NE * of_expert_E).sum(dim=-1, keepdim=True)
        found_4N = torch.cat(
            (balance_N1, z_N1**2, -(p_NE * log_p_NE).sum(dim=-1, keepdim=True), torch.ones_like(z_N1)), 1
        )
        self.sums[layer] = found_4N[counts_N].double().sum(0)
        gradient_NE = p_NE * (self.balance * (of_expert_E - balance_N1) + 2 * self.z * z_N1) / self.number
        return gradient_NE.masked_fill_(~counts_N[:, None], 0.0)


class _WithGradient(torch.autograd.Function):
    """Logits as they are, to whose gradient another one is added."""

    @staticmethod
    def forward(ctx, logits_NE, gradient_NE):
        ctx.save_for_backward(gradient_NE)
        return logits_NE.view_as(logits_NE)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_NE):
        return gradient_NE + ctx.saved_tensors[0], None


class Routes:
    """The routes of one pass, for its context (attention.py). Sparse layers are numbered from 0."""

    def __init__(self, given_NLk: Tensor | None = None, is_given_N: Tensor | None = None):
        """given_NLk: ids to take, uint8, ascending for each token; of the first tokens, if they are fewer than those of
        the pass. Their weights come from the current router.
        is_given_N: the tokens that take them; None: all. Others take what the router chooses.
        """
        self._given_NLk, self._is_given_N = given_NLk, is_given_N
        self.losses: RouterLosses | None = None
        self._taken: dict[int, Tensor] = {}
        self._disagreeing: dict[int, Tensor] = {}

    def at(self, layer: int, own_Nk: Tensor) -> Tensor:
        """Returns the ids that a layer takes, int64 [N, k], given those that its router has chosen, ascending; and
        records both. A layer that is computed again in a backward pass takes what it has taken."""
        if layer not in self._taken:
            ids_Nk = own_Nk
            if self._given_NLk is not None:
                num = len(self._given_NLk)
                ids_nk = self._given_NLk[:, layer].to(own_Nk.dtype)
                if self._is_given_N is not None:
                    ids_nk = torch.where(self._is_given_N[:, None], ids_nk, own_Nk[:num])
                ids_Nk = torch.cat((ids_nk, own_Nk[num:]))
            self._taken[layer] = ids_Nk.to(torch.uint8)
            self._disagreeing[layer] = (ids_Nk != own_Nk).any(dim=1).sum()
        return self._taken[layer].to(own_Nk.dtype)

    def with_losses(self, layer: int, logits_NE: Tensor) -> Tensor:
        """Returns the logits of a layer, whose gradient has that of the losses of the tokens with given ids, if there
        are losses."""
        if self.losses is None or not torch.is_grad_enabled():
            return logits_NE
        assert self._given_NLk is not None and self._is_given_N is not None, "losses are of given routes"
        counts_N = torch.cat((self._is_given_N, self._is_given_N.new_zeros(len(logits_NE) - len(self._is_given_N))))
        with torch.no_grad():
            gradient_NE = self.losses.gradient(layer, logits_NE, counts_N)
        return _WithGradient.apply(logits_NE, gradient_NE)

    @property
    def taken(self) -> Tensor:
        """The ids of every token, uint8 [N, L, k]; L counts the sparse layers that the pass went through."""
        return torch.stack([*self._taken.values()], dim=1)

    def choices(self, num_experts: int) -> Tensor:
        """Returns how often each expert of each layer is given, float64 [L E]."""
        assert self._given_NLk is not None and self._is_given_N is not None
        ids_NLk = self._given_NLk[self._is_given_N].long()
        firsts_L1 = num_experts * torch.arange(ids_NLk.shape[1], device=ids_NLk.device)[:, None]
        return torch.bincount((ids_NLk + firsts_L1).flatten(), minlength=ids_NLk.shape[1] * num_experts).double()

    @property
    def num_given(self) -> int:
        """How many ids sets were given: tokens times layers."""
        if self._given_NLk is None:
            return 0
        num = len(self._given_NLk) if self._is_given_N is None else int(self._is_given_N.sum())
        return num * len(self._taken)

    @property
    def num_disagreeing(self) -> int:
        """How many of these are not the set that the router chose."""
        return sum(map(int, self._disagreeing.values()))

"""The experts that the tokens of a pass take in each layer of a mixture: recorded, or given."""

# N tokens, L sparse layers of the whole model, k experts of a token

import torch
from torch import Tensor

MOST_EXPERTS = 256  # of a layer: ids are bytes


class Routes:
    """The routes of one pass, for its context (attention.py). Sparse layers are numbered from 0."""

    def __init__(self, given_NLk: Tensor | None = None, is_given_N: Tensor | None = None):
        """given_NLk: ids to take, uint8, ascending for each token; of the first tokens, if they are fewer than those of
        the pass. Their weights come from the current router.
        is_given_N: the tokens that take them; None: all. Others take what the router chooses.
        """
        self._given_NLk, self._is_given_N = given_NLk, is_given_N
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

    @property
    def taken(self) -> Tensor:
        """The ids of every token, uint8 [N, L, k]; L counts the sparse layers that the pass went through."""
        return torch.stack([*self._taken.values()], dim=1)

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

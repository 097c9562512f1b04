"""AdamW (arXiv 1711.05101) with torch's fused operation, for flat_engine.py.

torch.optim.AdamW runs the same operation, but constructing it imports torch's compiler: a second of every rank's start.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class AdamW:
    """Updates `masters` from their .grad; the moments have the dtype of the masters.

    The moments are allocated at once: if allocated later, they would occupy memory of the first iteration's KV cache,
    and torch could not return that memory to the GPU.
    """

    def __init__(self, masters: Sequence[Tensor], *, betas: tuple[float, float], eps: float, weight_decay: float):
        self.masters = list(masters)
        self._settings = dict(beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
        self.begin(0)

    @property
    def num_steps(self) -> int:
        return int(self._steps[0]) if self._steps else 0

    def begin(self, num_steps: int) -> None:
        """Sets the number of steps and zero moments, which a resumed run then overwrites."""
        self._steps = [torch.tensor(float(num_steps), device=master.device) for master in self.masters]
        self.moments: list[dict[str, Tensor]] = [
            {kind: torch.zeros_like(master, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
            for master in self.masters
        ]

    @torch.no_grad()
    def step(self, *, lr: float) -> None:
        torch._foreach_add_(self._steps, 1)
        torch._fused_adamw_(
            self.masters,
            [master.grad for master in self.masters],
            [moments["exp_avg"] for moments in self.moments],
            [moments["exp_avg_sq"] for moments in self.moments],
            [],
            self._steps,
            lr=lr,
            amsgrad=False,
            maximize=False,
            **self._settings,
        )

"""AdamW (arXiv 1711.05101) by torch's fused operation, for flat_engine.py.

torch.optim.AdamW runs the same operation, but making one imports torch's compiler: a second of every rank's start.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class AdamW:
    """Updates `masters` from their .grad; the moments are of the masters' type and come with the first step."""

    def __init__(self, masters: Sequence[Tensor], *, betas: tuple[float, float], eps: float, weight_decay: float):
        self.masters = list(masters)
        self._settings = dict(beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
        self._steps: list[Tensor] = []
        self.moments: list[dict[str, Tensor]] = []  # of each master: exp_avg, exp_avg_sq

    @property
    def num_steps(self) -> int:
        return int(self._steps[0]) if self._steps else 0

    def begin(self, num_steps: int) -> None:
        """Moments of zeros after so many steps; who resumes fills them."""
        self._steps = [torch.tensor(float(num_steps), device=master.device) for master in self.masters]
        self.moments = [
            {kind: torch.zeros_like(master, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
            for master in self.masters
        ]

    @torch.no_grad()
    def step(self, *, lr: float) -> None:
        if not self._steps:
            self.begin(0)
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

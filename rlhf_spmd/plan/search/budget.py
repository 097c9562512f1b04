"""The work that a search may do. It is counted, not timed, so a plan does not depend on how fast or busy a machine is.

A step is one look at the seconds or the bytes of a choice, whole or partial; other work counts as so many steps as take
about as long. A step took 13 us on the machine where the counts were chosen.
"""

from dataclasses import dataclass
from math import inf

PRODUCTS = 300  # combinations in arrays that take as long as a step


@dataclass(slots=True)
class Budget:
    """Steps, and how many of them have been taken; those who take them count them."""

    steps: float = inf
    taken: int = 0

    @property
    def is_spent(self) -> bool:
        return self.taken >= self.steps

"""How far apart reward curves lie whose tokens may differ, in units of what independent samples of responses do."""

import math
from collections.abc import Mapping, Sequence

LIMIT = 1.35  # standard errors: 95% of independent pairs of ten-iteration curves lie closer


def in_standard_errors(mine: Sequence[Mapping], expected: Sequence[Mapping], num_responses: int) -> float:
    """Returns the root mean square over the iterations of the difference of mean rewards, in standard errors of that
    difference."""
    squares = [
        (a["reward"] - b["reward"]) ** 2 / ((a["reward_std"] ** 2 + b["reward_std"] ** 2) / num_responses)
        for a, b in zip(mine, expected, strict=True)
    ]
    return math.sqrt(sum(squares) / len(squares))

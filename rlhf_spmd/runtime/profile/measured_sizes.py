"""The sizes that the profile subcommand measures: lengths and numbers of rows, tensor-parallel slices, bytes of
messages."""

from dataclasses import dataclass

from rlhf_spmd.plan.workload import Workload

GOLDEN, SILVER = (5**0.5 - 1) / 2, 2**0.5 - 1  # any number of their multiples modulo 1 are evenly spread
STEP = 4  # factor from one number of rows to the next
MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes to measure.

    max_prompt, max_response: tokens of the longest sequence.
    shares: mean lengths relative to that.
    most_rows: rows of full length in one forward.
    most_places: rows decoded at the same time.
    tps: numbers of tensor-parallel ranks.
    """

    max_prompt: int
    max_response: int
    shares: tuple[float, ...]
    most_rows: int
    most_places: int
    tps: tuple[int, ...]

    @classmethod
    def of(cls, workload: Workload, size: int, devices: int) -> "Grid":
        """Returns the sizes that the calls of a workload can have on `size` ranks with `devices` per node."""
        heads = min(shape.num_kv_heads for shape in workload.models.values() if shape)
        return cls(
            max_prompt=workload.max_prompt,
            max_response=workload.max_response,
            shares=(0.5, 1.0),
            most_rows=workload.micro_batch,
            most_places=min(workload.max_sequences, workload.num_sequences),
            tps=tuple(tp for tp in range(1, min(heads, devices) + 1) if size % tp == 0 and devices % tp == 0),
        )

    @property
    def longest(self) -> int:
        """Tokens of a sequence of full length."""
        return self.max_prompt + self.max_response

    def rows(self, share: float, num_rows: int) -> list[tuple[int, int]]:
        """Returns tokens of the prompt and the response of each row. They vary around the mean, as in an iteration,
        because rows of equal length are cheaper."""
        return [
            (spread(share, self.max_prompt, i * GOLDEN), spread(share, self.max_response, i * SILVER))
            for i in range(num_rows)
        ]


def spread(share: float, most: int, place: float) -> int:
    """Returns a length around share * most: from 1/3 to 5/3 of it, but at most `most`; `place` modulo 1 selects it."""
    width = min(share, 1 - share) * 2 / 3
    return max(1, round(most * (share + width * (2 * (place % 1) - 1))))


def rows_up_to(most: int) -> tuple[int, ...]:
    """Returns at least two numbers of rows, in growing steps, e.g. 1, 4, 16, 32."""
    numbers = [1]
    while numbers[-1] * STEP < most:
        numbers.append(numbers[-1] * STEP)
    return (*numbers, max(most, 2)) if numbers[-1] < max(most, 2) else tuple(numbers)

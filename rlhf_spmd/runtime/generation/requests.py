"""The requests of the generation engine: sampling parameters, random bits and results."""

# R requests, B running rows, G longest response, K largest sampling support

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import check_temperature
from rlhf_spmd.runtime.generation.scheduler import Row


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of a request are drawn. temperature 0: the most likely token.

    stop: texts that end a response, and are part of it. A response ends with an EOS id, a stop text, or after
        max_new_tokens.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        if not 0 <= self.min_new_tokens <= self.max_new_tokens or self.max_new_tokens < 1:
            raise UserError(
                f"min_new_tokens={self.min_new_tokens}, max_new_tokens={self.max_new_tokens}: "
                "need 0 <= min <= max and max >= 1"
            )
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise UserError(
                f"temperature={self.temperature:g}, top_k={self.top_k}, top_p={self.top_p:g}, min_p={self.min_p:g}: "
                "need temperature >= 0, top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1"
            )
        check_temperature("temperature", self.temperature)


@dataclass(frozen=True, slots=True)
class Begun:
    """What requests have when they are submitted: the first tokens of their responses, as `Requests.results` returns
    them, how many they may have when they end, and whether they are over."""

    responses_RG: Tensor
    logprobs_RG: Tensor
    support_RGK: Tensor | None
    most: Sequence[int]
    is_over: Sequence[bool]


SAMPLING_KEYS = tuple(field.name for field in fields(Sampling))


class Requests:
    """Requests by number; `forget` drops the oldest."""

    def __init__(self, device: torch.device, num_stored: int):
        self.device, self.num_stored = device, num_stored
        self.first = 0  # the number of the oldest stored request
        self.prompts: list[list[int]] = []
        self.sampling: list[Sampling] = []
        self.lengths: list[int | None] = []  # of the finished responses
        self.most: list[int] = []  # tokens of a response; of an episode, until its turn under way must end
        self.bits_RG = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.responses_RG = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.logprobs_RG = torch.zeros(0, 0, device=device)
        self.support_RGK = torch.zeros(0, 0, num_stored, dtype=torch.int32, device=device)
        self._keys: dict[tuple[int, ...], int] = {}
        self._prepare()

    def add(self, prompts: Sequence[Sequence[int]], bits_RG: Tensor, sampling: Sampling | Sequence[Sampling]) -> range:
        """Stores requests -> their numbers."""
        num, width = bits_RG.shape
        each = [sampling] * num if isinstance(sampling, Sampling) else list(sampling)
        assert all(one.max_new_tokens <= width for one in each), "random bits are missing for some tokens"
        start = self.first + len(self.prompts)
        self.prompts += [list(prompt) for prompt in prompts]
        self.sampling += each
        self.lengths += [None] * num
        self.most += [one.max_new_tokens for one in each]
        width = max(width + 1, self.bits_RG.shape[1])  # a token is drawn after the last one, before its row is removed
        self.bits_RG = _stack(self.bits_RG, bits_RG.to(self.device), width, 0)
        self.responses_RG = _stack(self.responses_RG, self.responses_RG.new_empty(num, 0), width, -1)
        self.logprobs_RG = _stack(self.logprobs_RG, self.logprobs_RG.new_empty(num, 0), width, 0)
        self.support_RGK = _stack(self.support_RGK, self.support_RGK.new_empty(num, 0, self.num_stored), width, -1)
        self._prepare()
        return range(start, start + num)

    def begin(self, numbers: range, begun: Begun) -> list[int]:
        """Gives requests what they have -> how many tokens."""
        rows, width = slice(numbers.start - self.first, numbers.stop - self.first), begun.responses_RG.shape[1]
        self.responses_RG[rows, :width], self.logprobs_RG[rows, :width] = begun.responses_RG, begun.logprobs_RG
        if begun.support_RGK is not None:
            self.support_RGK[rows, :width] = begun.support_RGK
        lengths = (begun.responses_RG >= 0).sum(1).tolist()
        self.lengths[rows] = [num if over else None for num, over in zip(lengths, begun.is_over, strict=True)]
        return lengths

    def _prepare(self) -> None:
        """Collects the sampling parameters: a number if all requests agree, else a tensor [R]."""
        self.has_minimum = any(one.min_new_tokens for one in self.sampling)
        self.has_stops = any(one.stop for one in self.sampling)
        self._limits: dict[str, float | Tensor] = {}
        for name in ("temperature", "top_k", "top_p", "min_p"):
            values = [getattr(one, name) for one in self.sampling]
            alike = len(set(values)) == 1
            self._limits[name] = values[0] if alike else torch.tensor(values, device=self.device)

    def limits(self, index_B: Tensor) -> dict[str, float | Tensor]:
        """Returns temperature, top-k, top-p and min-p of these requests, as numbers where possible: reading from a
        tensor whether a rule is off would wait for the GPU."""
        return {name: x[index_B] if isinstance(x, Tensor) else x for name, x in self._limits.items()}

    def keys(self, numbers: range) -> list[int]:
        """Returns a key for the prompt of each request, the same for equal prompts."""
        return [self._keys.setdefault(tuple(self.prompts[n - self.first]), n) for n in numbers]

    def tokens(self, number: int, count: int) -> list[int]:
        """Returns a prompt and the first `count` tokens of its response."""
        row = number - self.first
        return self.prompts[row] + (self.responses_RG[row, :count].tolist() if count else [])

    def open(self, number: int, prompt: Sequence[int], bits_G: Tensor) -> None:
        """Gives a request that has none its prompt and its random bits."""
        row = number - self.first
        self.prompts[row], self.bits_RG[row, : len(bits_G)] = list(prompt), bits_G.to(self.device)

    def extend(self, number: int, length: int, tokens: Sequence[int], most: int) -> None:
        """Appends tokens that were not drawn to a response of some length, which then has at most `most`."""
        row = number - self.first
        self.responses_RG[row, length : length + len(tokens)] = torch.tensor(tokens, device=self.device)
        self.most[row] = most
        if self.num_stored:  # of a token that nobody drew: itself, whose logprob is then 0
            self.support_RGK[row, length : length + len(tokens), 0] = torch.tensor(tokens, device=self.device).int()

    def is_ended(self, number: int) -> bool:
        return self.lengths[number - self.first] is not None

    def results(self, numbers: range) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns responses_RG, logprobs_RG, support_RGK of requests that have ended."""
        part = slice(numbers.start - self.first, numbers.stop - self.first)
        responses_RG, logprobs_RG = self.responses_RG[part, :-1], self.logprobs_RG[part, :-1]
        lengths_R1 = torch.tensor(self.lengths[part], device=self.device)[:, None]
        after_RG = torch.arange(responses_RG.shape[1], device=self.device) >= lengths_R1
        support_RGK = self.support_RGK[part, :-1].masked_fill(after_RG[..., None], -1) if self.num_stored else None
        return responses_RG.masked_fill(after_RG, -1), logprobs_RG.masked_fill(after_RG, 0.0), support_RGK

    def forget(self, before: int) -> None:
        """Drops the requests with smaller numbers."""
        num = before - self.first
        assert all(length is not None for length in self.lengths[:num]), "some of these requests have not ended"
        del self.prompts[:num], self.sampling[:num], self.lengths[:num], self.most[:num]
        self.bits_RG, self.responses_RG = self.bits_RG[num:], self.responses_RG[num:]
        self.logprobs_RG, self.support_RGK = self.logprobs_RG[num:], self.support_RGK[num:]
        self.first = before
        self._keys = {tuple(prompt): self._keys[tuple(prompt)] for prompt in self.prompts}
        self._prepare()


def _stack(above: Tensor, below: Tensor, width: int, fill: float) -> Tensor:
    """Stacks two tensors of requests, dim 1 padded to `width`."""
    out = above.new_full((len(above) + len(below), width, *above.shape[2:]), fill)
    out[: len(above), : above.shape[1]] = above
    out[len(above) :, : below.shape[1]] = below
    return out


class Batch:
    """The running rows: for each the request, tokens of the response, tokens in the cache, the current token, and the
    minimum and maximum of tokens of the response. One tensor holds all fields because rows are added and removed in all
    of them at once."""

    def __init__(self, rows_FB: Tensor):
        self.rows_FB = rows_FB
        self.request_B, self.drawn_B, self.cached_B, self.token_B, self.least_B, self.most_B = rows_FB

    def __len__(self) -> int:
        return self.rows_FB.shape[1]

    def with_rows(self, rows: Sequence[Row], requests: Requests) -> "Batch":
        """Appends rows of which all tokens are in the cache."""
        new = []
        for row in rows:
            index, drawn = row.request - requests.first, row.base - row.num_prompt
            new.append((row.request, drawn, row.base, 0, requests.sampling[index].min_new_tokens, requests.most[index]))
        return Batch(torch.cat((self.rows_FB, torch.tensor(new).T.to(self.rows_FB.device)), 1))

    def picked(self, order: Sequence[int]) -> "Batch":
        """Returns the rows `order`, in that order."""
        order_B = torch.tensor(order, dtype=torch.int64, pin_memory=self.rows_FB.is_cuda)  # else the host would wait
        return Batch(self.rows_FB[:, order_B.to(self.rows_FB.device, non_blocking=True)])

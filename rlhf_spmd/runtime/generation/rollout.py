"""Generation from tensors of prompts to tensors of responses."""

# M mini-batches, B sequences, P prompt tokens, G response tokens, K largest sampling support

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_spmd.model.parallel import broadcast_in_copy
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.episodes import Episodes, Turns
from rlhf_spmd.runtime.generation.requests import SAMPLING_KEYS, Begun, Sampling


class Rollout:
    """The responses that one copy of the actor generates in an iteration. Mini-batches are requested one by one; later
    ones start early if rows are free."""

    def __init__(
        self,
        model: Transformer,
        prompts_MBP: Tensor,
        bits_MBG: Tensor,
        *,
        episodes: Episodes | None = None,
        max_new_tokens: int = 0,
        begun: Begun | None = None,
        episode_rows: int = 1,
        bits_of: Callable[[int, int], Tensor] | None = None,
        **options,
    ):
        """Sets up the generation of rows.

        prompts_MBP: int64, padded with -1 on the right; without tokens where answers open the row.
        bits_MBG: random bits of each token, int64.
        episodes: what answers to turns, if responses have several.
        max_new_tokens: drawn tokens of a response; 0: all may be.
        begun: what responses have already, and how many tokens each may have; None: nothing.
        episode_rows: of an episode, which are neighbours; if several, answers open all rows.
        bits_of: see Turns.
        options: of Sampling, and of the engine.
        """
        self.prompts_MBP = prompts_MBP
        self.num_rows, max_response = bits_MBG.shape[1:]
        max_new_tokens = min(max_new_tokens or max_response, max_response)
        self.episode_rows, bits_of = episode_rows, bits_of if episode_rows > 1 else None
        self.turns = None if episodes is None else Turns(episodes, max_new_tokens, max_response, bits_of)
        own = {name: options[name] for name in SAMPLING_KEYS if name in options}
        sampling = Sampling(max_new_tokens, **own)
        least, limits = sampling.min_new_tokens, begun.most if begun is not None else ()
        each = [replace(sampling, max_new_tokens=most, min_new_tokens=min(least, most)) for most in limits] or sampling
        settings = {name: options[name] for name in options if name not in own} | {"turns": self.turns}
        longest, num_requests = prompts_MBP.shape[2] + max_response, len(bits_MBG.flatten(0, 1))
        num_steps = max_response * -(-num_requests // settings.get("max_sequences", num_requests))
        self.engine = Engine(model, longest=longest, num_stored=sampling.top_k, num_steps=num_steps, **settings)
        prompts = [[token for token in row if token >= 0] for row in prompts_MBP.flatten(0, 1).tolist()]
        self.num = len(self.engine.submit(prompts, bits_MBG.flatten(0, 1), each, begun))

    def of(self, mini_batches: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the responses of these mini-batches, as `generate_rows` returns them."""
        requests = self._requests(mini_batches)
        self.engine.run(requests)
        responses_BG, logprobs_BG, support_BGK = self.engine.results(requests)
        if self.episode_rows == 1:
            return responses_BG, logprobs_BG, support_BGK
        ordered, prompts_BP = self._ordered(mini_batches), self.prompts_MBP[mini_batches].flatten(0, 1)
        order_B = torch.tensor(ordered, device=responses_BG.device) - requests.start
        for row, prompt_P in zip(ordered, prompts_BP, strict=True):
            prompt = self.engine.requests.tokens(row, 0)
            prompt_P[: len(prompt)] = torch.tensor(prompt, dtype=prompt_P.dtype)
        ordered_BGK = None if support_BGK is None else support_BGK[order_B]
        return responses_BG[order_B], logprobs_BG[order_B], ordered_BGK

    def routes_of(self, mini_batches: slice, width: int) -> Tensor:
        """Returns the experts of each token but the last one of these mini-batches, which have ended: uint8
        [B, width, sparse layers, experts of a token]. Collective over the stages."""
        assert self.engine.routes is not None
        requests = self._requests(mini_batches)
        routes_BTLk = self.engine.routes.of(requests, width)
        ordered = [row - requests.start for row in self._ordered(mini_batches)]
        return routes_BTLk if self.episode_rows == 1 else routes_BTLk[ordered]

    def of_turns(self, mini_batches: slice) -> tuple[Tensor, Tensor]:
        """Returns, of the episodes of these mini-batches, which have ended: which tokens were drawn, and the rewards of
        turns on their last drawn tokens, both float32 [B, G]. A row that is dropped has none."""
        assert self.turns is not None
        requests, device = self._ordered(mini_batches), self.engine.device
        rewards_BG, actions_BG = self.turns.rewards(requests), self.turns.actions(requests)
        actions_BG[torch.tensor([self.turns.episodes.is_dropped(row) for row in requests], dtype=torch.bool)] = 0.0
        both_2BG = torch.stack((actions_BG, rewards_BG)).to(device)
        actions_BG, rewards_BG = broadcast_in_copy(both_2BG, self.engine.parallel)
        return actions_BG, rewards_BG

    def ends(self, mini_batches: slice) -> list[tuple[str, int]]:
        """Returns why each row of these mini-batches ended that is neither dropped nor blank, and its number of turns;
        empty where responses have one."""
        if (turns := self.turns) is None:
            return []
        kept = [row for row in self._requests(mini_batches) if turns.reason(row) and not turns.episodes.is_dropped(row)]
        return [(turns.reason(row), turns.num_turns(row)) for row in kept]

    def reasons(self, mini_batches: slice) -> list[str]:
        """Returns why each episode of these mini-batches ended, of all rows; empty for blank ones."""
        assert self.turns is not None
        return [self.turns.reason(row) for row in self._ordered(mini_batches)]

    def _requests(self, mini_batches: slice) -> range:
        """Returns the requests of some mini-batches."""
        return range(mini_batches.start * self.num_rows, mini_batches.stop * self.num_rows)

    def _ordered(self, mini_batches: slice) -> list[int]:
        """Returns the requests of some mini-batches, which have ended, in the order of the batch. The rows of an
        episode are ordered by the length of their prompts, then by their streams, which does not depend on when they
        were opened; blank rows are the last ones."""
        turns, requests = self.turns, self._requests(mini_batches)
        if turns is None or self.episode_rows == 1:
            return [*requests]
        lengths = [len(self.engine.requests.tokens(row, 0)) for row in requests]

        def place(row: int) -> tuple[int, bool, int, int]:
            """Returns what orders the rows."""
            length = lengths[row - requests.start]
            return row // self.episode_rows, not length, length, turns.streams.get(row, 0)

        return sorted(requests, key=place)

    @property
    def num_left(self) -> int:
        """How many responses have not ended."""
        scheduler = self.engine.scheduler
        return len(scheduler.rows) + len(scheduler.waiting) + len(scheduler.outside) + len(self.engine.unopened)

    @property
    def is_over(self) -> bool:
        """Whether all responses have been generated."""
        return self.engine.is_idle


def generate_rows(
    model: Transformer, prompts_BP: Tensor, bits_BG: Tensor, **options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples one response per row. Collective over the ranks of one copy of the model, which pass the same rows.

    prompts_BP, bits_BG, options: as in Rollout.

    Returns responses_BG int64 (-1 after the end; includes the EOS), logprobs_BG float32 under the distribution sampled
    from (0 after the end), and, if top_k is on, support_BGK int32, the sampling support of each token (padded with -1).
    """
    options = {"max_sequences": max(len(prompts_BP), 1)} | options
    return Rollout(model, prompts_BP[None], bits_BG[None], **options).of(slice(0, 1))

"""Packs stored prompts and responses into the tokens of a forward pass, and unpacks results into tensors [B, G].

    batch = Sequences.join(prompts_BP, responses_BG)
    output = forward(model, batch)                                  # on a later stage: forward(model, batch, hidden)
    logprobs_BG = response_logprobs(model, batch, output, ...)      # on the last stage

Under tensor parallelism these functions are collective over the tp ranks, which hold the same rows and get the same
results.
"""

# B sequences, P prompt tokens, G response tokens (padded with -1), N real tokens of all rows concatenated, n a tp
# rank's share of them (padded), R real response tokens, D hidden, K tokens of a sampling support

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_spmd.kernels.dropout import Dropout
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.kernels.token_logprobs import token_logprobs
from rlhf_spmd.model.attention import Packed
from rlhf_spmd.model.norm import sum_of
from rlhf_spmd.model.parallel import collect_tokens, gather_tokens, vocabulary_of
from rlhf_spmd.model.routes import Routes
from rlhf_spmd.model.transformer import Transformer

Gathered = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]  # modules -> inside, they have their weights


def lengths_of(prompts_BP: Tensor, responses_BG: Tensor) -> list[int]:
    """Returns the tokens of each row; both are padded with -1."""
    return ((prompts_BP >= 0).sum(1) + (responses_BG >= 0).sum(1)).tolist()


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences without padding: row by row, the prompt directly followed by the response."""

    tokens_N: Tensor  # int64
    lengths: tuple[int, ...]  # of each row, at least 1
    response_lengths_B: Tensor
    responses_BG: Tensor
    before_R: Tensor  # index into N of the token before each response token, rows one after the other
    slots_R: Tensor  # index of each response token in responses_BG.flatten()
    dropout: tuple[int, float, Tensor] | None = None  # of adapters: seed, rate and the number of each row
    routes: Routes | None = None  # of a mixture of experts, if they are given

    @classmethod
    def join(cls, prompts_BP: Tensor, responses_BG: Tensor) -> "Sequences":
        """Joins prompts_BP (at least one token each) and responses_BG: int32 or int64, padded with -1 on the right."""
        both_BW = torch.cat((prompts_BP, responses_BG), 1)
        real_BW = both_BW >= 0
        prompt_B, response_B = (
            real_BG.sum(1) for real_BG in real_BW.split((prompts_BP.shape[1], responses_BG.shape[1]), 1)
        )
        index_BW = (real_BW.flatten().cumsum(0) - 1).view_as(real_BW)
        is_response_BG = real_BW[:, prompts_BP.shape[1] :]
        return cls(
            tokens_N=both_BW[real_BW].long(),
            lengths=tuple((prompt_B + response_B).tolist()),
            response_lengths_B=response_B,
            responses_BG=responses_BG,
            before_R=index_BW[:, prompts_BP.shape[1] :][is_response_BG] - 1,
            slots_R=is_response_BG.flatten().nonzero()[:, 0],
        )

    @classmethod
    def of(cls, tokens_BT: Tensor) -> "Sequences":
        """Makes whole sequences to score, padded with -1 on the right: prompts without responses."""
        return cls.join(tokens_BT, tokens_BT.new_empty(len(tokens_BT), 0))

    def context(self, model: Transformer) -> Packed:
        """Makes the attention context of these sequences, padded as the model wants it."""
        context = Packed(self.lengths, device=self.tokens_N.device, num_tokens=model.padded(len(self.tokens_N)))
        context.routes = self.routes
        if self.dropout is not None:
            seed, rate, row_B = self.dropout
            lengths_B = torch.tensor(self.lengths, device=row_B.device)
            row_N = row_B.repeat_interleave(lengths_B, output_size=len(self.tokens_N))
            row_N = F.pad(row_N, (0, context.num_tokens - len(row_N)))  # padding, which nothing reads
            context.dropout = Dropout(seed, rate, row_N, context.positions)
        return context

    def last_B(self) -> Tensor:
        """Returns index into N of each row's last token."""
        return torch.tensor(self.lengths, device=self.tokens_N.device).cumsum(0) - 1

    def spread(self, x_R: Tensor) -> Tensor:
        """Spreads one number per response token to [B, G], 0 on padding."""
        flat = x_R.new_zeros(self.responses_BG.numel())
        return flat.index_copy(0, self.slots_R, x_R).view_as(self.responses_BG)


def forward(model: Transformer, batch: Sequences, hidden_nD: Tensor | None = None) -> Tensor:
    """Runs this rank's stage -> output_nD, for the next stage (see `model.output_shape`) or, on the last stage, for the
    heads below. hidden_nD: the output of the previous stage; None on the first.
    """
    return model(batch.tokens_N, context=batch.context(model), hidden=hidden_nD)


def forward_by_layer(model: Transformer, batches: Sequence[Sequences], gathered: Gathered) -> Iterator[Tensor]:
    """Yields the output of each batch on the only stage, the same bits as `forward`; each layer runs on all batches
    before the next one. `gathered(modules)` is a context in which these modules have their weights, so a rank holds
    those of one layer and of the modules besides the layers at a time, however many batches there are; inside, the
    heads below may be called. For inference."""
    with gathered(model.besides_layers()):
        contexts = [batch.context(model) for batch in batches]
        states = [model.embedded(batch.tokens_N, context) for batch, context in zip(batches, contexts, strict=True)]
        turned = [model.rotations(context, x.dtype) for context, x in zip(contexts, states, strict=True)]
        for layer in model.layers.values():
            with gathered([layer]):
                for index, (context, turns) in enumerate(zip(contexts, turned, strict=True)):
                    states[index] = sum_of(*layer(states[index], turns, context))
        for x in states:
            yield model.norm(x)


def response_logprobs(
    model: Transformer,
    batch: Sequences,
    output_nD: Tensor,
    support_BGK: Tensor | None = None,
    *,
    temperature: float,
    eos_ids: tuple[int, ...],
    min_new_tokens: int,
    known: KnownTokens | None = None,
    entropy: bool = False,
    top: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Returns teacher-forced logprobs_BG of the response tokens under the distribution they were sampled from and, on
    request, its entropy_BG, and whether no other token was more likely; 0 on padding.

    support_BGK: the sampling support of each token, if sampling was restricted.
    known: tokens that may be sampled; all others are banned everywhere, as are the EOS ids at the first min_new_tokens
        positions of a response.

    The full logits are never materialised.
    """
    tokens_R = batch.responses_BG.flatten()[batch.slots_R].long()
    early_R = batch.slots_R % batch.responses_BG.shape[1] < min_new_tokens
    head = partial(
        token_logprobs,
        tokens_N=tokens_R,
        temperature=temperature,
        banned=(eos_ids, early_R) if min_new_tokens else None,
        support_NK=None if support_BGK is None else support_BGK.flatten(0, 1)[batch.slots_R],
        known=known,
        entropy=entropy,
        top=top,
        cap=model.config.logits_cap,
        first=vocabulary_of(model.config, model.parallel.shard).start,
        group=model.parallel.group,
    )
    hidden_ND = gather_tokens(output_nD, group=model.parallel.group)
    per_token = model.logits(hidden_ND.index_select(0, batch.before_R), head=head)
    return tuple(map(batch.spread, per_token)) if isinstance(per_token, tuple) else batch.spread(per_token)


def response_values(model: Transformer, batch: Sequences, output_nD: Tensor) -> Tensor:
    """Returns values_BG1, at least float32: the value before each response token and, in column `length`, after the
    last one; 0 beyond."""
    values_N = collect_tokens(model.scalar(output_nD), group=model.parallel.group)
    values_N = values_N.to(torch.promote_types(values_N.dtype, torch.float32))
    columns = torch.arange(batch.responses_BG.shape[1] + 1, device=values_N.device)
    from_prompt_B = batch.last_B() - batch.response_lengths_B  # the prompt's last token
    index_BG1 = (from_prompt_B[:, None] + columns).clamp(max=len(values_N) - 1)
    return torch.where(columns <= batch.response_lengths_B[:, None], values_N[index_BG1], 0.0)


def sequence_scores(model: Transformer, batch: Sequences, output_nD: Tensor) -> Tensor:
    """Returns scores_B, at least float32: the scalar head at each row's last token (as
    AutoModelForSequenceClassification pools)."""
    scores_B = collect_tokens(model.scalar(output_nD), group=model.parallel.group)[batch.last_B()]
    return scores_B.to(torch.promote_types(scores_B.dtype, torch.float32))

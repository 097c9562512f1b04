"""A model's continuations of openings, in this process."""

# B sequences, P prompt tokens, G response tokens

from collections.abc import Sequence

import torch

from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.rollout import generate_rows
from tools.embedded.scoring import pad_rows


def continuations(
    model: Transformer, tokenizer, starts: Sequence[str], seed: int, *, max_new_tokens: int
) -> list[tuple[str, bool]]:
    """Returns the model's continuation of each opening at temperature 1, and whether it ended."""
    index_B = torch.arange(len(starts))
    bits_BG = random_bits(seed, random_streams.OFFLINE, 0, index_B, torch.zeros_like(index_B), max_new_tokens)
    prompts_BP = pad_rows([tokenizer.encode(start) for start in starts])
    with torch.no_grad():
        responses_BG, *_ = generate_rows(
            model, prompts_BP, torch.as_tensor(bits_BG), temperature=1.0, eos_ids=(tokenizer.eos_token_id,)
        )
    rows = [[token for token in row if token >= 0] for row in responses_BG.tolist()]
    ended = [row[-1] == tokenizer.eos_token_id for row in rows]
    return [(tokenizer.decode(row[:-1] if end else row), end) for row, end in zip(rows, ended, strict=True)]

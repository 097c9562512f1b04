"""Greedy decoding of the engine is, token for token, what transformers' `generate` says, for every model family."""

from collections import Counter

import pytest
import torch

from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.requests import Sampling
from tests.unit.model.test_transformer import CASES, ours, some_tokens, theirs
from tests.unit.runtime.generation.test_rollout import rows

LENGTHS = (1, 9, 4, 17, 2, 12, 7, 30)  # of the prompts
MAX_NEW = 24
SETTINGS = {
    "all at once": {"max_sequences": len(LENGTHS)},
    "three places, blocks of 4": {"max_sequences": 3, "block_size": 4},
    "preempting": {"max_sequences": 8, "block_size": 5, "num_blocks": 13},
}
# beyond the window of "mistral window" (5) and of the others; with "dynamic" rope, transformers turns all keys anew
# as soon as a sequence grows beyond the context, which the cases here don't reach
CACHELESS = ("mistral window 1",)  # transformers 5.23's cache keeps [-0:], everything, for a window of 1
FEW = (
    "llama mqa tied",
    "mistral window 1",
    "gemma3",
    "longrope beyond",
    "gpt2",
    "dynamic",
)  # of the others test_kv_attention.py sees what differs
FAMILIES = [
    pytest.param(case, marks=[] if case in FEW else pytest.mark.slow)
    for case in CASES
    if case not in ("dynamic beyond", "llama one layer")
]


def prompts_of(vocab_size: int) -> list[list[int]]:
    tokens_BT = some_tokens(len(LENGTHS), max(LENGTHS), vocab_size)
    return [row[:length] for row, length in zip(tokens_BT.tolist(), LENGTHS, strict=True)]


def by_transformers(model, prompts: list[list[int]], eos_ids: list[int], *, use_cache: bool) -> list[list[int]]:
    """Generates with transformers as one batch: padding on the left, and a mask that hides it."""
    width = max(map(len, prompts))
    tokens_BT = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    said_BG = model.generate(
        tokens_BT,
        attention_mask=mask_BT,
        do_sample=False,
        max_new_tokens=MAX_NEW,
        eos_token_id=eos_ids or None,
        pad_token_id=0,
        use_cache=use_cache,
    )[:, width:]
    ends = [[i for i, token in enumerate(row) if token in eos_ids] for row in said_BG.tolist()]
    return [row[: end[0] + 1] if end else row for row, end in zip(said_BG.tolist(), ends, strict=True)]


def by_engine(model: Transformer, prompts: list[list[int]], eos_ids: list[int], **settings) -> list[list[int]]:
    engine = Engine(model, longest=max(LENGTHS) + MAX_NEW, eos_ids=eos_ids, **settings)
    requests = engine.submit(prompts, torch.full((len(prompts), MAX_NEW), 0.7), Sampling(MAX_NEW, temperature=0.0))
    engine.run()
    assert eos_ids or (engine.num_preempted > 0) == ("num_blocks" in settings)
    return rows(engine.results(requests)[0])


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_decoding_equals_transformers(case):
    model = theirs(case)
    mine, prompts = ours(model), prompts_of(model.config.vocab_size)
    free = by_transformers(model, prompts, [], use_cache=case not in CACHELESS)
    assert len({tuple(row) for row in free}) > len(LENGTHS) // 2, "prompts that all say the same show little"
    # two tokens that come by in some responses, but not in all, end them
    counts = Counter(token for row in free for token in set(row[2:]))
    eos_ids = [token for token, count in counts.most_common() if count <= len(LENGTHS) // 2][:2]
    expected = by_transformers(model, prompts, eos_ids, use_cache=case not in CACHELESS)
    assert min(map(len, expected)) < MAX_NEW, "nobody ended early"
    for name, settings in SETTINGS.items():
        assert by_engine(mine, prompts, eos_ids, **settings) == expected, name
        assert by_engine(mine, prompts, [], **settings) == free, name

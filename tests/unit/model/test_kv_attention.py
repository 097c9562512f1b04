"""Prefill and decode over a paged KV cache against the full forward pass, in float64."""

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.decode_attention import Decode
from rlhf_spmd.model.kv_attention import Continued, DecodeStep, Prefill, Round
from rlhf_spmd.model.linear import Copies, join
from rlhf_spmd.runtime.generation.kv_cache import KVCache, slots_of
from tests.unit.model.test_transformer import ours, some_tokens, theirs

CASES = ["llama", "llama mha", "llama3", "mistral window", "mistral window 1", "qwen2 window", "qwen3 window"]
CASES += [
    "smollm3 window",
    "gemma",
    "gemma2",
    "gemma2 wide",
    "gemma3",
    "granite",
    "phi3 partial",
    "olmo3",
    "glm",
    "gpt_neox",
    "starcoder2",
]
CASES += ["gpt2", "opt"]
LENGTHS = (9, 4, 1, 9)  # of the prompts
NUM_NEW = 8
# block size -> blocks of each row; shuffled, since any table will do
TABLES = {
    3: [[7, 0, 11, 3, 14, 9], [1, 20, 2, 8], [6, 5, 4], [10, 12, 13, 15, 16, 17]],
    4: [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9, 10], [11, 12, 13, 14, 15]],
    17: [[0], [1], [2], [3]],
    32: [[2], [3], [0], [1]],
}


@pytest.mark.parametrize(("block_size", "joins"), [*((size, False) for size in TABLES), (17, True)])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_full_forward(case, block_size, joins):
    model = ours(theirs(case), dtype=torch.float64)
    joined = join(model.layers.values()) if joins else None
    tables = TABLES[block_size]
    cache = KVCache(model, 1 + max(map(max, tables)), block_size)
    tokens_BT = some_tokens(len(LENGTHS), max(LENGTHS) + NUM_NEW, model.config.vocab_size)
    prompts = [row[:length] for row, length in zip(tokens_BT, LENGTHS, strict=True)]
    with torch.no_grad():
        slots_N = slots_of(tables, LENGTHS, block_size)
        parts = model(torch.cat(prompts), context=Round(None, Prefill(LENGTHS, cache, slots_N), joined)).split(LENGTHS)
        found = [[part] for part in parts]
        for t in range(NUM_NEW):
            cached_B = torch.tensor(LENGTHS) + t
            hidden_BD = decode(model, cache, tables, tokens_BT[range(len(LENGTHS)), cached_B], cached_B, joined)
            for row, hidden_D in zip(found, hidden_BD, strict=True):
                row.append(hidden_D[None])
        for row, length, tokens_T in zip(found, LENGTHS, tokens_BT, strict=True):
            full = model(tokens_T[None, : length + NUM_NEW])[0]
            torch.testing.assert_close(torch.cat(row), full, atol=1e-12, rtol=0)


def decode(model, cache, tables, tokens_B, cached_B, joined):
    widest = max(map(len, tables))
    tables_BM = torch.tensor([[*row, *[0] * (widest - len(row))] for row in tables], dtype=torch.int32)
    size = cache.block_size
    slots_B = tables_BM.gather(1, (cached_B // size)[:, None])[:, 0] * size + cached_B % size
    attended = Decode.prepare(tables_BM, cached_B + 1, size, model.dtype)
    return model(tokens_B, context=Round(DecodeStep(cache, cached_B, slots_B.long(), attended), None, joined))


@pytest.mark.parametrize("case", ["gemma2", "qwen3 window"])
def test_further_tokens_of_rows(case):
    """As the answer of an environment: several, after tokens that are in the cache."""
    model = ours(theirs(case), dtype=torch.float64)
    cache, (begun, more) = KVCache(model, 2, 16), ((5, 2), (4, 7))
    rows = some_tokens(2, 9, model.config.vocab_size)
    slots = [slots_of([[row]], [9], 16) for row in (1, 0)]
    with torch.no_grad():
        prompts = torch.cat([row[:length] for row, length in zip(rows, begun, strict=True)])
        slots_N = torch.cat([one[:length] for one, length in zip(slots, begun, strict=True)])
        model(prompts, context=Round(None, Prefill(begun, cache, slots_N)))
        further = torch.cat([row[length:] for row, length in zip(rows, begun, strict=True)])
        found = model(further, context=Round(None, None, None, Continued(more, cache, slots))).split(more)
        for got, tokens_T in zip(found, rows, strict=True):
            torch.testing.assert_close(got, model(tokens_T[None])[0, -len(got) :], atol=1e-12, rtol=0)


@pytest.mark.parametrize("case", ["llama", "qwen2 window", "qwen3 window"])
def test_half_precision_joins(case):
    """What a CPU does in bfloat16 with the rows of a decode step is as close to float64 as the training pass is."""
    model = ours(theirs(case), dtype=torch.bfloat16)
    joined, prompts_BT = Copies(model).joined, some_tokens(3, 8, model.config.vocab_size)
    assert joined is not None and Copies(ours(theirs(case))).joined is None
    cache = KVCache(model, 3, 32)
    slots_N = slots_of([[0], [1], [2]], [8, 8, 8], 32)
    with torch.no_grad():
        found = model(prompts_BT.flatten(), context=Round(None, Prefill([8, 8, 8], cache, slots_N), joined))
        trained, exact = model(prompts_BT).flatten(0, 1), model.double()(prompts_BT).flatten(0, 1)
    assert 0 < (found - exact).std() < 1.2 * (trained - exact).std()


def test_dynamic_rope_refuses_to_decode_beyond_its_length():
    model = ours(theirs("dynamic beyond"))
    cache = KVCache(model, 1, 32)
    with torch.no_grad():
        model(some_tokens(1, 16, 61)[0], context=Round(None, Prefill([16], cache, torch.arange(16))))
        with pytest.raises(UserError, match="dynamic rope"):
            model(some_tokens(1, 17, 61)[0], context=Round(None, Prefill([17], cache, torch.arange(17))))

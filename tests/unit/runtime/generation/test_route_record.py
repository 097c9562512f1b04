"""Routes that the engine records, against a pass over whole sequences; what training computes with them."""

import pytest
import torch

from rlhf_spmd.model.routes import Routes
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.execute.iteration import with_routes
from rlhf_spmd.runtime.generation.rollout import Rollout
from tests.unit.runtime.generation.test_rollout import MAX_RESPONSE, SELDOM, draw, make_model, make_prompts

LAYERS, DENSE, K = 3, 1, 2
SIZES = {"model_type": "qwen3", "qk_norm": True, "num_layers": LAYERS, "num_dense_layers": DENSE, "norm_topk": True}
SIZES |= {"num_experts": 6, "experts_per_token": K, "expert_size": 12}
READ = {"temperature": 1.0, "eos_ids": (), "min_new_tokens": 0}
WIDTH = 9 + MAX_RESPONSE  # of prompts and responses


def rollout_of(prompts, **options) -> Rollout:
    rows = pad(prompts)[None], draw(len(prompts))[None]
    return Rollout(make_model(**SIZES), *rows, eos_ids=SELDOM, records_routes=True, **options)


@pytest.mark.parametrize(
    "options",
    [{"max_sequences": 16}, {"max_sequences": 3}, {"max_sequences": 5, "block_size": 2, "num_blocks": 14}],
    ids=["at once", "in turn", "preempted"],
)
def test_routes_are_those_of_a_pass_over_the_whole(options):
    """Also of prompts that another row has in the cache, and of rows whose tokens are computed twice."""
    prompts = [prompt for prompt in make_prompts(6) for _ in range(2)]
    rollout = rollout_of(prompts, **options)
    responses_BG, logprobs_BG, _ = rollout.of(slice(0, 1))
    assert bool(rollout.engine.num_preempted) == ("num_blocks" in options)
    routes_BTLk = rollout.routes_of(slice(0, 1), WIDTH)
    assert routes_BTLk.shape == (len(prompts), WIDTH, LAYERS - DENSE, K) and routes_BTLk.dtype == torch.uint8
    model, batch = rollout.engine.model, Sequences.join(pad(prompts), responses_BG)
    context = batch.context(model)
    context.routes = Routes()
    model(batch.tokens_N, context=context)
    for row, (own_NLk, length) in enumerate(zip(context.routes.taken.split(batch.lengths), batch.lengths, strict=True)):
        assert torch.equal(routes_BTLk[row, : length - 1], own_NLk[:-1])
        assert not routes_BTLk[row, length - 1 :].any()
    replayed = with_routes(batch, routes_BTLk)
    of_training = response_logprobs(model, replayed, forward(model, replayed), **READ)
    torch.testing.assert_close(of_training, logprobs_BG, atol=3e-5, rtol=0)
    assert replayed.routes.num_given == (LAYERS - DENSE) * (sum(batch.lengths) - len(prompts))
    assert replayed.routes.num_disagreeing == 0


def test_a_row_that_is_computed_again_takes_what_it_took():
    """Where the routes that were recorded are not those of the router, which other rows of the batch may cause."""
    rollout = rollout_of(make_prompts(8), max_sequences=5, block_size=2, num_blocks=14)
    record, again = rollout.engine.routes, 0
    assert record is not None
    note = record.note

    def forged(places, routes: Routes) -> None:
        """Records other routes than were taken, but for those that were recorded before."""
        nonlocal again
        known_N, ids_NLk = record._known_RT[places], record._ids_RTLk[places]
        again += int(known_N.sum())
        note(places, routes)
        assert torch.equal(record._ids_RTLk[places][known_N], ids_NLk[known_N])
        record._ids_RTLk[places] = torch.where(known_N[:, None, None], ids_NLk, others_than(routes.taken))

    record.note = forged
    rollout.of(slice(0, 1))
    assert again and rollout.engine.num_preempted


def others_than(ids: torch.Tensor) -> torch.Tensor:
    return ((ids + 1) % SIZES["num_experts"]).sort(dim=-1).values


def test_routes_that_are_given_change_the_output_and_reach_the_router():
    rollout = rollout_of(make_prompts(4), max_sequences=4)
    responses_BG, _, _ = rollout.of(slice(0, 1))
    batch, model = Sequences.join(pad(make_prompts(4)), responses_BG), rollout.engine.model.requires_grad_(True)
    routes_BTLk = rollout.routes_of(slice(0, 1), WIDTH)
    found = {}
    for name, routes in (("own", routes_BTLk), ("others", others_than(routes_BTLk))):
        replayed = with_routes(batch, routes)
        found[name] = response_logprobs(model, replayed, forward(model, replayed), **READ)
    assert replayed.routes.num_disagreeing > 0.9 * replayed.routes.num_given
    assert not torch.equal(found["own"], found["others"])
    found["others"].sum().backward()
    assert model.layers["1"].mlp.gate.weight.grad.abs().sum() > 0

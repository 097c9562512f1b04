"""Every function of a page that learns from generated responses sees nothing but actions: with observations between
them, which hold anything, its results are those of the same rows with the observations cut out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_spmd.pages.algorithm import algorithm_names, load_algorithm
from rlhf_spmd.pages.functions import bound, mask_words, readout_words
from rlhf_spmd.plan.calls import Compute, Train
from rlhf_spmd.plan.runtime_words import MASK, SUMS
from rlhf_spmd.runtime.execute.optimizer_step import divisor_of

ROWS, SAMPLES, FEW, WIDE = 6, 3, 7, 19  # rows, samples of a prompt, tokens without and with observations
OPTIONS: dict[str, list[dict[str, Any]]] = {  # of the pages that generate
    "ppo": [
        {},
        {"gamma": 0.9, "lam": 0.7, "truncation": "bootstrap", "entropy_coef": 0.1, "whiten": "batch"},
        {"old_logprobs": "recompute", "importance_weights": "sequence", "rejection": "geometric"},
    ],
    "grpo": [
        {},
        {"aggregation": "seq-mean-token-mean", "ratio_level": "sequence", "kl_coef": 0.1, "scale": "batch"},
        {"surrogate": "cispo", "overlong": "mask", "drop_equal_groups": True},
        {"scale": "none", "turn_rewards": True},
        {"aggregation": "seq-mean-token-sum-norm", "ratio_level": "product", "dual_clip": 3.0, "entropy_coef": 0.1},
    ],
    "rloo": [{"kl_coef": 0.1, "ratio_level": "token"}],
    "remax": [{"kl_coef": 0.1}],
    "reinforce_plus_plus": [{}, {"kl_in": "loss"}, {"baseline": "group"}],
    "distill": [{}, {"task_coef": 0.5}],
}


def test_the_pages_are_all():
    generating = []
    for name in algorithm_names():
        page = load_algorithm(name)
        generating += [name] if page.workflow(page.options()).generate_calls else []
    assert sorted(OPTIONS) == sorted(generating)


def masks(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Makes mask [B, FEW], mask [B, WIDE], and for each action of a row its place in the wide one (places_BG [B,
    FEW])."""
    generator = torch.Generator().manual_seed(seed)
    few_BG = torch.arange(FEW) < torch.randint(1, FEW + 1, (ROWS, 1), generator=generator)
    places_BG = torch.stack([torch.randperm(WIDE - 1, generator=generator)[:FEW].sort()[0] for _ in range(ROWS)])
    wide_BG = torch.zeros(ROWS, WIDE, dtype=torch.bool).scatter(1, places_BG, few_BG)
    return few_BG, wide_BG, places_BG


def spread(x: Tensor, few_BG: Tensor, wide_BG: Tensor, places_BG: Tensor, junk: float) -> Tensor:
    """Returns a tensor of tokens, or of tokens and one more, with observations between its actions."""
    more = x.shape[1] - FEW
    found = torch.full((ROWS, WIDE + more), junk, dtype=torch.float64).to(x.dtype)
    found[:, :WIDE][wide_BG] = x[:, :FEW][few_BG]
    for row, number in enumerate(few_BG.sum(1).tolist()):
        if more:  # what comes after the last action
            found[row, places_BG[row, number - 1] + 1] = x[row, number]
    return found


def assert_same(few: Any, wide: Any, few_BG: Tensor, wide_BG: Tensor, norm: float) -> None:
    """Compares the results of a function for both.

    norm: by which numbers without a token dim differ.
    """
    if isinstance(few, dict):
        assert few.keys() == wide.keys()
        for name in few:
            assert_same(few[name], wide[name], few_BG, wide_BG, norm)
    elif isinstance(few, tuple):
        for one, other in zip(few, wide, strict=True):
            assert_same(one, other, few_BG, wide_BG, norm)
    elif isinstance(few, Tensor) and few.dim() and few.shape[-1] == FEW and wide.shape[-1] == WIDE:
        one, other = few.reshape(ROWS, FEW), wide.reshape(ROWS, WIDE)
        torch.testing.assert_close(other[wide_BG].double(), one[few_BG].double(), rtol=1e-5, atol=1e-6)
        assert not other[~wide_BG].any()
    else:
        few, wide = (torch.as_tensor(one, dtype=torch.float64) for one in (few, wide))
        torch.testing.assert_close(wide * norm, few, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_functions_see_actions_only(name):
    page = load_algorithm(name)
    for number, chosen in enumerate(OPTIONS[name]):
        options = page.options(**chosen)
        workflow = page.workflow(options, episodes=True)
        numbers = page.numbers(options, page.initial_state(options))
        is_norm = chosen.get("aggregation") == "seq-mean-token-sum-norm"  # divided by the width of a row
        for call in workflow.calls:
            if isinstance(call, Compute | Train):
                compare(page, workflow, call, numbers, masks(number), WIDE / FEW if is_norm else 1.0)


def compare(page, workflow, call, numbers, of_masks, norm: float) -> None:
    """Calls the function of a call and its companions with and without observations."""
    few_BG, wide_BG, places_BG = of_masks
    generator = torch.Generator().manual_seed(7)
    shapes = {"token": (ROWS, FEW), "token+1": (ROWS, FEW + 1), "row": (ROWS,)}
    drawn: dict[str, Tensor] = {}

    def make(word: str, shape: str) -> Tensor:
        if word not in drawn:
            drawn[word] = torch.randn(shapes[shape], generator=generator) * 0.3
        return drawn[word]

    arguments = {
        word: make(key, workflow.shapes[key]) for word, key in call.arguments if workflow.shapes[key] in shapes
    }
    function = page.function(call.function, call.module)
    readouts: dict[str, tuple[str, str]] = {}
    if isinstance(call, Train):
        readouts = {w: of for w, of in readout_words(workflow, call).items() if w in function.words}
        for word, (_, what) in readouts.items():
            arguments[word] = make(f"new {word}", {"values": "token+1", "scores": "row"}.get(what, "token"))
    ended_B = torch.arange(ROWS) % 3 > 0
    of_kind = []
    for mask_BG in (few_BG, wide_BG):
        given: dict[str, Any] = {}
        for word, x in arguments.items():
            is_wide = mask_BG is wide_BG and x.dim() == 2
            x = spread(x, few_BG, wide_BG, places_BG, float("nan")) if is_wide else x.clone()
            given[word] = x.requires_grad_(word in readouts)
        for word, (_, what) in mask_words(workflow, call).items():
            given[word] = mask_BG if what == MASK else ended_B
        if isinstance(call, Compute) and call.scope == "group":
            given = {word: x.unflatten(0, (ROWS // SAMPLES, SAMPLES)) for word, x in given.items()}
        if isinstance(call, Compute) and call.scope == "mini_batch":
            given = {word: x[None] for word, x in given.items()}
        made = called(function, call, given, numbers, mask_BG)
        if isinstance(call, Train):
            made[0].backward()
            gradients = tuple(given[word].grad for word in readouts if given[word].grad is not None)
            assert gradients
            made = made[0].detach(), made[1], tuple(one * (norm if mask_BG is wide_BG else 1) for one in gradients)
        of_kind.append(made)
    few, wide = of_kind
    if isinstance(call, Train):
        assert_same(few[0], wide[0], few_BG, wide_BG, norm)
        if norm == 1.0:  # else the sum of the loss differs by it, too
            assert_same(few[1], wide[1], few_BG, wide_BG, 1.0)
        for one, other in zip(few[2], wide[2], strict=True):
            assert_same(one[:, :FEW], other[:, :WIDE], few_BG, wide_BG, 1.0)  # values have one more column
        return
    assert_same(few, wide, few_BG, wide_BG, 1.0)


def called(function, call, given, numbers, mask_BG) -> Any:
    """Returns the results, finished by the companions."""
    if isinstance(call, Train):
        sums = None
        divisor = torch.tensor(float(mask_BG.sum()), dtype=torch.float64)
        if function.sums is not None:
            sums = function.sums(**bound(function.sums, numbers | given))
        if function.prepare is not None:
            given = given | function.prepare(
                **bound(function.prepare, numbers | given | {SUMS: sums, "divisor": divisor})
            )
        made = function.function(**bound(function.function, numbers | given))
        return made if isinstance(made, tuple) else (made, {})
    made = function.function(**bound(function.function, numbers | given))
    if not call.sums:
        return made
    made = made if isinstance(made, tuple) else (made,)
    results = dict(zip(call.outputs, made, strict=False))
    sums = function.sums(**bound(function.sums, numbers | given | results))
    finished = function.finish(**bound(function.finish, numbers | given | results | {SUMS: sums}))
    return made, sums, finished


def test_divisors_count_actions():
    """Tokens and responses."""
    page = load_algorithm("grpo")
    for aggregation, counted in (("token-mean", 5), ("seq-mean-token-mean", 2)):
        workflow = page.workflow(page.options(aggregation=aggregation), episodes=True)
        (call,) = workflow.train_calls
        rows = {
            "responses": torch.tensor([[3, 4, 5, 6, -1], [7, 8, 9, 9, 9]]),
            "responses.actions": torch.tensor([[1.0, 0, 0, 2, 0], [1, 1, 0, 0, 1]]),
        }
        assert divisor_of(call, rows).tolist() == [counted]
        assert set(rows) <= set(call.inputs)

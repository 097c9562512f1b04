"""A run of an algorithm of a user's own, which has neither PPO's models nor its losses (tests/pages.py)."""

import pytest
import torch

from rlhf_spmd.errors import UserError
from tests.folders import write_all
from tests.pages import run_of, write_page


def test_a_run_of_a_page(tmp_path):
    """Two iterations; the loss is minus the score-weighted mean of the logprobs, as written."""
    overrides = write_all(tmp_path, eos_token_ids=(1, 2, 3))
    run = run_of(write_page(tmp_path), overrides, "mine.scale=2", "micro_batch=100")
    start = run.weights("policy")
    metrics, store = run.iteration(), run.data.store
    scores_MC, mask_MCG = store["scores"], store["responses"] >= 0
    assert metrics["return"] == pytest.approx(2 * float(scores_MC.double().mean()), rel=1e-5)
    assert torch.equal(store["weights"], torch.where(mask_MCG, 2 * scores_MC[..., None], 0.0))
    assert "kl" not in metrics and "critic_lr" not in metrics and metrics["policy_lr"] == 3e-4
    assert metrics["score_std"] > 0 and metrics["parity_max_abs"] < 1e-4
    assert all(not torch.equal(weight, start[name]) for name, weight in run.weights("policy").items())
    assert run.state.of_algorithm is None
    assert run.iteration()["tokens_sha256"] != metrics["tokens_sha256"]


RESULT = "    return mask_BG * weights_B[:, None], {"
LOSS = '    return loss, {"surrogate": (loss.detach().double(), mask_BG.sum())}'
MISTAKES = {
    "too short": (
        (RESULT, "    return mask_BG[:, :1] * weights_B[:, None], {"),
        r"token_weights\(\) returned a tensor .*; return tensors .*weights of shape",
    ),
    "no tensor": (
        (RESULT, "    return (mask_BG * weights_B[:, None]).tolist(), {"),
        r"returned a list, a dict; return tensors",
    ),
    "complex": ((RESULT, "    return mask_BG * weights_B[:, None] * 1j, {"), r"returned a tensor torch.complex"),
    "a function that raises": (
        ("    weights_B = scale", "    [][3]\n    weights_B = scale"),
        r"token_weights\(\) raised IndexError: .*mine.py, line \d+: \[\]\[3\]\); fix the algorithm file",
    ),
    "a loss of each token": (
        (LOSS, "    return -(logprobs_BG * weights_BG)"),
        r"surrogate\(\) returned a tensor torch.float",
    ),
    "a loss without gradient": (
        (LOSS, "    return loss.detach()"),
        r"returned a tensor torch.float32 \[\]",
    ),
    "a loss that is none": ((LOSS, "    return None"), r"surrogate\(\) returned a NoneType; return the sum"),
    "no weight": ((LOSS, '    return loss, {"surrogate": 1.0}'), r"'surrogate': 1.0 for the log; return"),
    "a list of sums": (
        (LOSS, '    return loss, ["surrogate"]'),
        r"returned a tensor .*, a list; return the sum",
    ),
    "a name that is taken": (
        (LOSS, '    return loss, {"iteration": (1.0, 1)}'),
        r"'iteration': .* for the log; .* under a name that is not taken",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_functions_return_is_checked(name, tmp_path):
    change, message = MISTAKES[name]
    run = run_of(write_page(tmp_path, change), write_all(tmp_path))
    with pytest.raises(UserError, match=message):
        run.iteration()

"""Shards of a model with adapters against the dense twin of the whole model, whose weights are W + s B A.

python tests/run_mpi.py 2 4 -- tests/mpi/test_adapted.py
"""

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from rlhf_spmd.model.parallel import slice_of
from rlhf_spmd.model.sequences import forward, response_logprobs
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.adapters import Adapters
from tests.mpi.test_parallel import (  # noqa: F401 (team is a fixture)
    CLOSE,
    PLAIN,
    back,
    check_gradients,
    fits,
    make_batch,
    make_config,
    team,
    through,
)
from tests.unit.model.test_adapted import dense

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 4)]

ALL, SOME = Adapters(1, 1.0).targets, ("k_proj", "o_proj")


@pytest.mark.parametrize("name", ["biases", "tied"])
@pytest.mark.parametrize(
    ("targets", "dropout"),
    [
        pytest.param(ALL, 0.0, id="all"),
        pytest.param(SOME, 0.3, id="some, dropout"),
        pytest.param(ALL, 0.3, id="all, dropout", marks=pytest.mark.slow),
        pytest.param(SOME, 0.0, id="some", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_the_dense_twin(team, name, targets, dropout):  # noqa: F811
    """With dropout those of the whole model, whose masks the shards make in parts."""
    fits(team, name)
    if not team.inside:
        return
    config, adapters = make_config(name), Adapters(3, 6.0, targets)
    whole = Transformer(config, head="lm", dtype=torch.float64, seed=1).with_adapters(adapters, seed=3)
    base = Transformer(config, head="lm", dtype=torch.float64, seed=1, parallel=team.parallel)
    mine = base.with_adapters(adapters, seed=3)
    shard, generator = team.parallel.shard, torch.Generator().manual_seed(2)
    own = dict(mine.named_parameters())
    for key, one in whole.named_parameters():
        if key in own:
            torch.testing.assert_close(own[key], one[slice_of(key, config, shard)], rtol=0, atol=0)
        if key in whole.trained_names():
            one.data = 0.3 * torch.randn(one.shape, generator=generator, dtype=torch.float64)
            one.requires_grad_(True)
            if key in own:
                own[key].data = one.data[slice_of(key, config, shard)].clone()
                own[key].requires_grad_(True)
    batch, _ = make_batch()
    if dropout:
        batch = replace(batch, dropout=(7, dropout, torch.arange(len(batch.lengths)) + 11))
    plain = Transformer(config, head="lm", dtype=torch.float64)
    weight_BG = torch.randn(batch.responses_BG.shape, generator=generator, dtype=torch.float64)
    read = _Read(plain, batch)
    wanted_BG = functional_call(read, {f"model.{key}": one for key, one in dense(whole).items()}, ())
    if dropout:
        without_BG, wanted_BG = wanted_BG, _Read(whole, batch)()
        assert (wanted_BG - without_BG).abs().max() > 1e-3
    (wanted_BG * weight_BG).sum().backward()

    hidden, output = through(team, mine, batch)
    loss = None
    if team.parallel.is_last:
        found_BG = response_logprobs(mine, batch, output, **PLAIN)
        torch.testing.assert_close(found_BG, wanted_BG, **CLOSE)
        loss = (found_BG * weight_BG).sum()
    back(team, hidden, output, loss)
    check_gradients(team, whole, mine)


class _Read(torch.nn.Module):
    """The logprobs of a batch, as a module whose weights can be replaced."""

    def __init__(self, model: Transformer, batch):
        super().__init__()
        self.model, self.batch = model, batch

    def forward(self):
        return response_logprobs(self.model, self.batch, forward(self.model, self.batch), **PLAIN)

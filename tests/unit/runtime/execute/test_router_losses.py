"""How often experts are chosen in rows, and the load that is logged."""

from types import SimpleNamespace

import torch

from rlhf_spmd.config.options import Experts
from rlhf_spmd.model.routes import Routes
from rlhf_spmd.plan.workload import ModelShape
from rlhf_spmd.runtime.execute import router_losses
from rlhf_spmd.runtime.world.metric_sums import Meter


def test_choices_are_counted_in_each_layer_but_for_the_last_token():
    """A model that is timed has fewer layers than the shape of the job says."""
    call = SimpleNamespace(prompts="prompts", responses=("responses",), inputs=("responses.routes",))
    rows = {"prompts": torch.tensor([[4, 5], [-1, 6]]), "responses": torch.tensor([[7, -1], [8, 9]])}
    routes_BTLk = torch.tensor([[[[0, 1], [1, 2]], [[0, 2], [1, 2]], [[2, 1], [0, 1]], [[0, 1], [0, 1]]]] * 2)
    rows["responses.routes"] = routes_BTLk.to(torch.uint8)
    shape = ModelShape(5, 8, 8, 2, 2, 4, 16, num_experts=3, experts_per_token=2, expert_size=4)
    found = router_losses.choices(call, rows, shape)  # two tokens of each row count
    assert found.view(2, 3).tolist() == [[4, 2, 2], [0, 4, 4]]
    assert not len(router_losses.choices(call, {"responses": rows["responses"]}, shape))

    meter, passes = Meter(), [Routes()]
    router_losses.begin(passes, found, shape, Experts(balance_coef=0.1), meter, counts=True)
    assert meter.sums["expert_load"] == [4 / (16 / 6), 1.0]
    assert passes[0].losses.number == 8 and passes[0].losses.shares_E.tolist() == [0.5, 0.75, 0.75]

"""The MLP of a mixture's sparse layers: a router, and experts of which each token takes a few."""

# N tokens, D hidden, E experts, k experts of a token

from torch import Tensor, nn

from rlhf_spmd.kernels.experts import choose, mixture, router_logits
from rlhf_spmd.kernels.silu_mul import silu_mul, swiglu
from rlhf_spmd.model.attention import AttentionContext
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.linear import Again, Stacked
from rlhf_spmd.model.parallel import Parallel, experts_of, gather_tokens, scatter_tokens, sum_over
from rlhf_spmd.model.routes import Routes


class Experts(nn.Module):
    """The experts of this rank."""

    def __init__(self, config: ModelConfig, parallel: Parallel):
        super().__init__()
        mine, inner = experts_of(config, parallel.shard), config.expert_size
        self.first = mine.start
        self.gate_up_proj = Stacked(len(mine), config.hidden_size, 2 * inner)
        self.down_proj = Stacked(len(mine), inner, config.hidden_size)


class SparseMLP(nn.Module):
    """Each token takes the k experts that the router finds most probable, weighted by these probabilities."""

    together, alone = (), ("experts.gate_up_proj", "experts.down_proj")  # as of MLP; the router is wide

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel):
        super().__init__()
        self.layer, self.group = layer - config.num_dense_layers, parallel.group
        self.k, self.norm_topk = config.experts_per_token, config.norm_topk
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config, parallel)

    def forward(self, x: Tensor, context: AttentionContext, *, again: Again | None = None) -> Tensor:
        """Computes the MLP: x [..., D] -> [..., D]."""
        if context.packed:
            x = gather_tokens(x, group=self.group)
        x_ND = x.flatten(0, -2)
        ids_Nk, weights_Nk = self.route(x_ND, context.routes)
        gated, experts = silu_mul if context.cached else swiglu, self._modules["experts"]  # not `fast_attributes`
        matrices = experts.gate_up_proj(), experts.down_proj()
        part = mixture(x_ND, ids_Nk, weights_Nk, *matrices, first=experts.first, gated=gated).view(x.shape)
        return scatter_tokens(part, group=self.group) if context.packed else sum_over(part, group=self.group)

    def route(self, x_ND: Tensor, routes: Routes | None) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token, in ascending order, and their weights [N, k]."""
        logits_NE = router_logits(x_ND, self._modules["gate"].weight)
        if routes is not None:
            logits_NE = routes.with_losses(self.layer, logits_NE)
        p_NE = logits_NE.softmax(dim=-1)
        ids_Nk = choose(p_NE, self.k)
        if routes is not None:
            ids_Nk = routes.at(self.layer, ids_Nk)
        weights_Nk = p_NE.gather(1, ids_Nk)
        if self.norm_topk:
            weights_Nk = weights_Nk / weights_Nk.sum(dim=-1, keepdim=True)
        return ids_Nk, weights_Nk.to(x_ND.dtype)

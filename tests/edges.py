"""When two runs draw different tokens: the distance of the random number from the edge of the token's interval.

A replay on one rank, which is deterministic, with a teacher-forced pass after each generation.
"""

import torch
from torch import Tensor

from rlhf_spmd.config.options import Config
from rlhf_spmd.kernels.cdf_tree import FANOUT, LEVELS_INSIDE, level_uniforms, levels_over
from rlhf_spmd.model.sequences import Sequences, forward
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.generation import random_streams
from tests.runs import RunOf


@torch.no_grad()
def edge_distances(logits_BV: Tensor, bits_B: Tensor, tokens_B: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns how close the random numbers came to drawing another token: float64 [B], negative if they do draw
    another.

    The smallest distance, over the levels, between a level's number and the edges of the chosen child's interval, both
    in [0, 1). Rounding errors in the logits move the edges by about 1e-7, so only a token with a smaller distance may
    flip.
    """
    num_rows, vocab_size = logits_BV.shape
    num_levels = levels_over(vocab_size) + LEVELS_INSIDE
    masses_BV = torch.nn.functional.pad(
        (logits_BV.double() / temperature).softmax(dim=1), (0, FANOUT**num_levels - vocab_size)
    )
    numbers_BL = level_uniforms(bits_B, num_levels)
    rows_B, nearest_B = torch.arange(num_rows), torch.full((num_rows,), torch.inf, dtype=torch.float64)
    for level in range(num_levels):
        leaves = FANOUT ** (num_levels - level - 1)  # below each child
        masses_BMF = masses_BV.view(num_rows, -1, FANOUT, leaves).sum(dim=3)
        path_B = tokens_B // leaves
        cdf_BF = masses_BMF[rows_B, path_B // FANOUT].cumsum(dim=1)
        cdf_BF = torch.nn.functional.pad(cdf_BF / cdf_BF[:, -1:], (1, 0))
        below_B, above_B = (cdf_BF[rows_B, path_B % FANOUT + i] for i in (0, 1))
        number_B = numbers_BL[:, level]
        # 0 and 1 do not border another token
        down_B = torch.where(below_B > 0, number_B - below_B, torch.inf)
        up_B = torch.where(above_B < 1 - 1e-15, above_B - number_B, torch.inf)
        nearest_B = torch.minimum(nearest_B, torch.minimum(down_B, up_B))
    return nearest_B


class Replay(RunOf):
    """A run on one rank; distances: per iteration, (prompt, sample) -> distance of each token's numbers."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.distances: list[dict[tuple[int, int], list[float]]] = []
        run = self.executor.run

        def noted(step, data):
            run(step, data)
            if step.call == self.program.workload.workflow.generate_calls[0].name:  # others may be greedy
                self.distances.append(self._distances(data, step.call))

        self.executor.run = noted

    def _distances(self, data: Iteration, call: str) -> dict[tuple[int, int], list[float]]:
        sampling, model = self.job.sampling, self.job.models.engines["actor"].model
        prompts_BP, responses_BG = (data.store[key].flatten(0, 1) for key in ("prompts", "responses"))
        batch = Sequences.join(prompts_BP, responses_BG)
        eos_ids, least = sampling["eos_ids"], sampling["min_new_tokens"]
        with torch.no_grad():
            logits_NV = model.logits(forward(model, batch)[batch.before_R])
        early_N = batch.slots_R % responses_BG.shape[1] < least
        for token in eos_ids:
            logits_NV[early_N, token] = -torch.inf
        real_BG = responses_BG >= 0
        if "kept_tokens" in data.store:
            support_NK = data.store["kept_tokens"].flatten(0, 1)[real_BG].long()
            support_NK = torch.where(support_NK >= 0, support_NK, support_NK[:, :1])  # the first is always there
            open_NV = torch.full_like(logits_NV, -torch.inf)
            logits_NV = open_NV.scatter_(1, support_NK, logits_NV.gather(1, support_NK))
        workflow = self.program.workload.workflow
        bits_N = data.random_bits(random_streams.of_call(workflow, workflow.call(call))).flatten(0, 1)[real_BG]
        distances_N = edge_distances(logits_NV, bits_N, responses_BG[real_BG], sampling["temperature"])
        parts = distances_N.split(real_BG.sum(1).tolist())
        names = zip(data.prompt_MC.flatten().tolist(), data.sample_MC.flatten().tolist(), strict=True)
        return {name: part.tolist() for name, part in zip(names, parts, strict=True)}

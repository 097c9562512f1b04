"""When two runs draw another token: how close a random number was to the edge of its interval.

A replay on one rank, which is deterministic, with a teacher-forced pass after each generation.
"""

import torch

from rlhf_spmd.config import Config
from rlhf_spmd.kernels.cdf_tree import edge_distances
from rlhf_spmd.model.sequences import Sequences, forward
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.generation import random_streams
from tests.runs import RunOf

Responses = dict[tuple[int, int], list[int]]  # (prompt, sample) -> tokens


class Replay(RunOf):
    """A run on one rank; distances: per iteration, (prompt, sample) -> distance of each token's numbers."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.distances: list[dict[tuple[int, int], list[float]]] = []
        run = self.job.calls.run

        def noted(step, data, state):
            run(step, data, state)
            if self.program.workload.workflow.call(step.call).kind == "generate":
                self.distances.append(self._distances(data, step.call))

        self.job.calls.run = noted

    def _distances(self, data: Iteration, call: str) -> dict[tuple[int, int], list[float]]:
        sampling, model = self.job.calls.context.sampling, self.job.models.engines["actor"].model
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


def closest(config: Config) -> list[float]:
    """The smallest distance of each iteration."""
    replay = Replay(config)
    replay.iterations()
    return [min(min(row) for row in distances.values()) for distances in replay.distances]


def explain_flips(config: Config, found: list[Responses]) -> str:
    """Where the responses of a run first differ from those on one rank, and how close its number was to an edge."""
    replay = Replay(config)
    for number, responses in enumerate(found):
        replay.iteration()
        lines = []
        for name, expected in replay.responses[number].items():
            position = next(
                (i for i, pair in enumerate(zip(expected, responses[name], strict=False)) if len(set(pair)) > 1), None
            )
            if position is not None:
                tokens = f"token {expected[position]} on one rank, {responses[name][position]} here"
                distance = replay.distances[number][name][position]
                lines.append(
                    f"iteration {number}, prompt {name[0]}, sample {name[1]}, position {position}: {tokens}; "
                    f"its random number was {distance:.1e} from the edge of its interval"
                )
        if lines:
            return "\n".join(lines)
    return "no token differs"

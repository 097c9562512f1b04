"""Responses to a few prompts before and after training."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.environments.episodes import Row
from rlhf_spmd.runtime.environments.of_run import RunEnvironments
from rlhf_spmd.runtime.execute.handlers import infer
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.episodes import last_turns
from rlhf_spmd.runtime.generation.kv_cache import free_bytes, release_unused
from rlhf_spmd.runtime.generation.rollout import Rollout, generate_rows
from rlhf_spmd.runtime.records.episode_text import episode_text
from rlhf_spmd.runtime.records.run_folder import Sample, Shown


def sample_responses(job: Job) -> list[Shown]:
    """Samples responses to the first prompts, always with the same random numbers, and scores them.

    Every rank that generates or scores takes part, because ZeRO 3 gathers weights collectively. Collective; returns the
    same on every rank.
    """
    workflow, layouts = job.program.workload.workflow, job.program.placement.layouts
    num = min(job.config.num_samples, len(job.prompts))
    if num == 0 or not workflow.generate_calls:
        return []
    generating = workflow.generate_calls[0]
    scoring = next((call for call in workflow.placed_calls if infer.judges(job, call)), None)
    rank, device = job.world.rank, job.world.device
    first = layouts[generating.name].model_ranks(layouts[generating.name].ranks[0])[-1]
    found = _Drawn()
    if rank in layouts[generating.name].ranks:
        release_unused(device)  # what loading and training have left
        with job.models.weights(generating) as model:
            free = job.config.generation.cache_fraction * free_bytes(device, job.world.computes.num_ranks)
            if job.environments is None:
                found = _responses(job, model, num, free)
            elif rank == first:  # tools are called once
                found = _episodes(job, model, num, free)
    everyone = job.world.allgather(asdict(found) if rank == first else {}, "the samples")
    found = _Drawn(**next(one for one in everyone if one))
    scored: list[float] = []
    if scoring is not None and rank in layouts[scoring.name].ranks:
        prompts_BP = pad(found.prompts).to(device)
        responses_BG = torch.tensor(found.tokens, dtype=torch.int64, device=device)
        # one copy of the model scores; the other ranks only take part in gathering weights
        mine = num if rank in layouts[scoring.name].model_ranks(layouts[scoring.name].ranks[0]) else 0
        judged = infer.scores(job, scoring, prompts_BP[:mine], responses_BG[:mine], range(mine))
        scored = [] if judged is None else judged.scores_B.tolist()
    every = job.world.allgather(scored, "the samples' scores")
    scores = next(filter(None, every), [math.nan] * num)
    if found.rewards:
        scores = [score + reward for score, reward in zip(scores, found.rewards, strict=True)]
    return list(zip(found.texts, scores, strict=True))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The responses to the first prompts.

    prompts: as an environment opens them.
    tokens: that are scored, padded with -1.
    rewards: of episodes, by their environments; NaN for those that are dropped.
    """

    prompts: list[list[int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def _bits(job: Job, num: int) -> Tensor:
    rows, width = (np.arange(num), np.zeros(num, int)), job.config.row_tokens
    return torch.from_numpy(random_bits(job.config.seed, random_streams.SAMPLES, 0, *rows, width))


def _responses(job: Job, model: Transformer, num: int, free: float) -> _Drawn:
    device, prompts = job.world.device, job.prompts.prompts[:num]
    bits_BG = _bits(job, num).to(device)
    responses_BG, *_ = generate_rows(model, pad(prompts).to(device), bits_BG, free_bytes=free, **job.drawing)
    tokens = responses_BG.tolist()
    texts = [job.tokenizer.decode_pair(prompt, row)[1] for prompt, row in zip(prompts, tokens, strict=True)]
    return _Drawn([*prompts], tokens, texts)


def _episodes(job: Job, model: Transformer, num: int, free: float) -> _Drawn:
    assert job.environments is not None
    device, everything = job.world.device, slice(0, 1)
    rows = job.environments.rows(job, range(num), [0] * num, range(num))
    episodes = job.environments.episodes(rows, 0, "samples")
    opened = episodes.openings()
    rollout = Rollout(
        model,
        pad(opened).to(device)[None],
        _bits(job, num).to(device)[None],
        episodes=episodes,
        max_new_tokens=job.config.generation.max_new_tokens,
        max_sequences=num,
        free_bytes=free,
        **job.drawing,
    )
    responses_BG, *_ = rollout.of(everything)
    actions_BG, rewards_BG = rollout.of_turns(everything)
    texts = _episode_texts(job.environments, rows, responses_BG, actions_BG, rollout.reasons(everything))
    rewards = [
        math.nan if episodes.is_dropped(row) else reward for row, reward in enumerate(rewards_BG.sum(1).tolist())
    ]
    return _Drawn(opened, last_turns(responses_BG, actions_BG).tolist(), texts, rewards)


def _episode_texts(
    environments: RunEnvironments,
    rows: Sequence[Row],
    responses_BG: Tensor,
    actions_BG: Tensor,
    reasons: Sequence[str],
) -> list[str]:
    """Returns episodes by turns."""
    texts = []
    for row, tokens_G, drawn_G, reason in zip(rows, responses_BG, actions_BG > 0, reasons, strict=True):
        ids = [token for token in tokens_G.tolist() if token >= 0]
        turns = environments.transcript(row.columns, ids, drawn_G[: len(ids)].tolist())
        texts.append(episode_text(turns, reason))
    return texts


def join_samples(job: Job, before: Sequence[Shown], after: Sequence[Shown] | None = None) -> list[Sample]:
    """Returns the responses before and, if there are any, after training, by prompt."""
    later: Sequence[tuple[str | None, float | None]] = after or [(None, None)] * len(before)
    return [
        Sample(index, job.prompts.texts[index], *old, *new, job.environments is not None)
        for index, (old, new) in enumerate(zip(before, later, strict=True))
    ]

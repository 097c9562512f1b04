"""Responses to a few prompts before and after training."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.environments.of_run import RunEnvironments, row_of
from rlhf_spmd.runtime.execute.handlers import infer
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.episodes import last_turns
from rlhf_spmd.runtime.generation.kv_cache import free_bytes, release_unused
from rlhf_spmd.runtime.generation.rollout import Rollout, generate_rows
from rlhf_spmd.runtime.records.run_folder import Sample, Shown


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Responses of one rank. prompts: as an environment opens them. judged: what reward functions get of a response, of
    an episode the last turn. rewards: of environments."""

    prompts: list[list[int]]
    responses: list[list[int]]
    judged: list[list[int]]
    rewards: list[float]


def sample_responses(job: Job, when: str) -> list[Shown]:
    """Responses to the first prompts, always with the same random numbers, and their scores. when: a word for this time
    in the run, which tells the answers of environments apart from those at another.

    Every rank that generates or scores takes part, because ZeRO 3 gathers weights collectively. Collective; returns the
    same on every rank.
    """
    workflow, layouts = job.program.workload.workflow, job.program.placement.layouts
    num = min(job.config.num_samples, len(job.prompts))
    if num == 0 or not workflow.generate_calls or (job.episodes is not None and job.environments is None):
        return []
    generating = workflow.generate_calls[0]
    scoring = next((call for call in workflow.placed_calls if infer.judges(job, call)), None)
    rank, device, drawn = job.world.rank, job.world.device, None
    first = layouts[generating.name].model_ranks(layouts[generating.name].ranks[0])[-1]
    if rank in layouts[generating.name].ranks:
        release_unused(device)  # what loading and training have left
        with job.models.weights(generating) as model:
            if job.environments is None:
                drawn = _drawn(job, model, num)
            elif rank == first:  # the other copies would make the same calls
                drawn = _episodes(job, job.environments, model, num, when)
    everyone = job.world.allgather(asdict(drawn) if drawn is not None and rank == first else None, "the samples")
    drawn = next(_Drawn(**found) for found in everyone if found is not None)
    scored: tuple[list[float], list[int]] = [], []  # and rows that ran out of time
    if scoring is not None and rank in layouts[scoring.name].ranks:
        prompts_BP, judged_BG = pad(drawn.prompts).to(device), pad(drawn.judged).to(device)
        # one copy of the model scores; the other ranks only take part in gathering weights
        mine = num if rank in layouts[scoring.name].model_ranks(layouts[scoring.name].ranks[0]) else 0
        judged = infer.scores(job, scoring, prompts_BP[:mine], judged_BG[:mine], range(mine))
        scored = scored if judged is None else (judged.scores_B.tolist(), sorted(judged.late))
    everyone = job.world.allgather(scored, "the samples' scores")
    scores = next((found for found, _ in everyone if found), [math.nan] * num)
    late = {row for _, rows in everyone for row in rows}
    texts = [_text(job, *row) for row in zip(job.prompts.prompts[:num], drawn.responses, strict=True)]
    shown = zip(texts, map(float.__add__, scores, drawn.rewards), strict=True)
    return [(text, score, row in late) for row, (text, score) in enumerate(shown)]


def _drawn(job: Job, model: Transformer, num: int) -> _Drawn:
    """Responses of one turn to the first prompts."""
    prompts = job.prompts.prompts[:num]
    made_BG, *_ = generate_rows(model, pad(prompts).to(job.world.device), _bits(job, num), **_how(job))
    return _Drawn([*prompts], made_BG.tolist(), made_BG.tolist(), [0.0] * num)


def _episodes(job: Job, environments: RunEnvironments, model: Transformer, num: int, when: str) -> _Drawn:
    """Episodes of the first prompts, which begin with the same seeds at any time."""
    records, texts = job.prompts.whole_records(range(num)), job.prompts.texts
    rows = [row_of(index, 0, index, record, texts[index], environments.key) for index, record in enumerate(records)]
    episodes = environments.episodes(rows, 0, f"samples-{when}")
    opened, every = episodes.openings(), slice(0, 1)
    rollout = Rollout(
        model,
        pad(opened)[None].to(job.world.device),
        _bits(job, num)[None],
        episodes=episodes,
        max_new_tokens=job.config.generation.max_new_tokens,
        max_sequences=num,
        **_how(job),
    )
    (made_BG, *_), (actions_BG, rewards_BG) = rollout.of(every), rollout.of_turns(every)
    rewards = [
        math.nan if episodes.is_dropped(row) else reward for row, reward in enumerate(rewards_BG.sum(1).tolist())
    ]
    episodes.close()
    return _Drawn(opened, made_BG.tolist(), last_turns(made_BG, actions_BG).tolist(), rewards)


def _bits(job: Job, num: int) -> Tensor:
    rows, width = (np.arange(num), np.zeros(num, int)), job.config.row_tokens
    return torch.from_numpy(random_bits(job.config.seed, random_streams.SAMPLES, 0, *rows, width)).to(job.world.device)


def _how(job: Job) -> dict[str, Any]:
    """Options of generation."""
    free = job.config.generation.cache_fraction * free_bytes(job.world.device, job.world.computes.num_ranks)
    return {"free_bytes": free, **job.drawing}


def _text(job: Job, prompt: list[int], response: list[int]) -> str:
    """A response as text; an episode with the marks of its turns."""
    if job.environments is None:
        return job.tokenizer.decode_pair(prompt, response)[1]
    return job.tokenizer.decode([token for token in response if token >= 0], special=True)


def join_samples(job: Job, before: Sequence[Shown], after: Sequence[Shown] | None = None) -> list[Sample]:
    """The responses before and, if there are any, after training, by prompt."""
    later: Sequence[tuple[str | None, float | None, bool]] = after or [(None, None, False)] * len(before)
    return [
        Sample(index, job.prompts.texts[index], *old[:2], *new[:2], old[2], new[2])
        for index, (old, new) in enumerate(zip(before, later, strict=True))
    ]

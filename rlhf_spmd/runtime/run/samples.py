"""Responses to a few prompts before and after training."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np
import torch

from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.data.messages import conversation_of
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.execute.handlers import infer
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, Store
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.episodes import last_turns
from rlhf_spmd.runtime.generation.kv_cache import cache_bytes, release_unused
from rlhf_spmd.runtime.generation.rollout import Rollout
from rlhf_spmd.runtime.generation.shared_episodes import shared
from rlhf_spmd.runtime.records.episode_text import episode_text
from rlhf_spmd.runtime.records.run_folder import Sample, Shown

PER_SHOWN = 4  # prompts that responses are sampled to


def sample_responses(job: Job) -> list[Shown]:
    """Samples responses to the first prompts, PER_SHOWN for each that is shown at the end, always with the same random
    numbers, and scores them.

    Every rank that generates or scores takes part, because ZeRO 3 gathers weights collectively. Collective; returns the
    same on every rank.
    """
    workflow = job.workload.workflow
    num = min(PER_SHOWN * job.config.num_samples, len(job.prompts))
    if num == 0 or not workflow.generate_calls:
        return []
    generating = workflow.generate_calls[0]
    scoring = next((call for call in workflow.placed_calls if infer.judges(job, call)), None)
    rank, device = job.world.rank, job.world.device
    layout = job.layout(generating)
    copy = layout.model_ranks(layout.ranks[0])
    first = next(filter(layout.reports, copy))
    drawn = _Drawn()
    if rank in layout.ranks:
        release_unused(device)  # what loading and training have left
        with job.models.weights(generating) as model:
            free = cache_bytes(device, job.world.computes.num_ranks, job.config.generation.cache_fraction)
            if job.environments is None or rank in copy:  # tools are called once
                drawn = _drawn(job, model, num, free)
    drawn = _Drawn(**job.world.bcast(asdict(drawn), first, "the samples"))
    scored: list[float] = []
    if scoring is not None and rank in (scores_on := job.layout(scoring)).ranks:
        prompts_BP = pad(drawn.prompts).to(device)
        responses_BG = torch.tensor(drawn.tokens, dtype=torch.int64, device=device)
        # one copy of the model scores; the other ranks only take part in gathering weights
        mine = num if rank in scores_on.model_ranks(scores_on.ranks[0]) else 0
        judged = infer.scores(job, scoring, prompts_BP[:mine], responses_BG[:mine], range(mine))
        scored = [] if judged is None else judged.scores_B.tolist()
    every = job.world.allgather(scored, "the samples' scores")
    scores = next(filter(None, every), [math.nan] * num)
    if drawn.rewards:
        scores = [score + reward for score, reward in zip(scores, drawn.rewards, strict=True)]
    return list(zip(drawn.texts, scores, strict=True))


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


def _drawn(job: Job, model: Transformer, num: int, free: float) -> _Drawn:
    """Draws the responses to the first prompts with one copy of the model."""
    device, everything, environments = job.world.device, slice(0, 1), job.environments
    prompts, rows, episodes, num_rows = job.prompts.prompts[:num], [], None, job.workload.episode_rows
    prompt_B = np.arange(num).repeat(num_rows)
    if environments is not None:
        numbers = prompt_B.tolist()
        rows = environments.rows(job, numbers, [0] * len(numbers), numbers)
        episodes = shared(partial(environments.episodes, rows, 0, "samples"), len(rows), model.parallel, device)
        prompts = episodes.openings()
    prompts_BP = torch.full((len(prompt_B), job.config.data.max_prompt), -1) if num_rows > 1 else pad(prompts)
    data = Iteration.of_rows(job.config.seed, 0, prompt_B[None], Store(job.workload, {}, device))
    rollout = Rollout(
        model,
        prompts_BP.to(device)[None],
        data.random_bits(random_streams.SAMPLES),
        episodes=episodes,
        episode_rows=num_rows,
        bits_of=partial(data.bits_of, random_streams.SAMPLES, ALL),
        max_new_tokens=job.config.generation.max_new_tokens,
        max_sequences=len(prompt_B),
        free_bytes=free,
        **job.drawing,
    )
    responses_BG, *_ = rollout.of(everything)
    responses = [[token for token in row if token >= 0] for row in responses_BG.tolist()]
    if environments is None or episodes is None:
        pairs = zip(prompts, responses, strict=True)
        return _Drawn([*prompts], responses_BG.tolist(), [job.tokenizer.decode_pair(*pair)[1] for pair in pairs])
    actions_BG, rewards_BG = rollout.of_turns(everything)
    texts = [""] * num
    for row, tokens, drawn_G, reason in zip(rows, responses, actions_BG > 0, rollout.reasons(everything), strict=True):
        if reason:  # else the row is blank
            turns = environments.transcript(row.columns, tokens, drawn_G[: len(tokens)].tolist())
            texts[row.prompt] += "\n" * bool(texts[row.prompt]) + episode_text(turns, reason)
    rewards = [
        math.nan if episodes.is_dropped(row) else reward for row, reward in enumerate(rewards_BG.sum(1).tolist())
    ]
    first = slice(None, None, num_rows)
    prompts = [[token for token in row if token >= 0] for row in rollout.prompts_MBP[0, first].tolist()]
    return _Drawn(prompts, last_turns(responses_BG, actions_BG)[first].tolist(), texts, rewards[first])


def asked(job: Job, index: int) -> str:
    """Returns what is shown of a prompt: of a conversation what its user says last."""
    (record,) = job.prompts.records([index])
    messages = conversation_of(record, job.config.data.key or job.config.algorithm.prompts)
    said = [message["content"] for message in messages or () if message["role"] == "user"]
    return said[-1] if said else job.prompts.texts[index]


def join_samples(job: Job, before: Sequence[Shown], after: Sequence[Shown] | None = None) -> list[Sample]:
    """Returns the responses before and, if there are any, after training, by prompt."""
    later: Sequence[tuple[str | None, float | None]] = after or [(None, None)] * len(before)
    return [
        Sample(
            index,
            asked(job, index),
            *old,
            *new,
            job.environments is not None,
        )
        for index, (old, new) in enumerate(zip(before, later, strict=True))
    ]

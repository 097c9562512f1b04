"""Responses to a few prompts before and after training."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.runtime.data.prompts import pad
from rlhf_spmd.runtime.execute.handlers import infer
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.kv_cache import free_bytes, release_unused
from rlhf_spmd.runtime.generation.rollout import generate_rows
from rlhf_spmd.runtime.records.run_folder import Sample, Shown


def sample_responses(job: Job) -> list[Shown]:
    """Responses to the first prompts, always with the same random numbers, and their scores.

    Every rank that generates or scores takes part, because ZeRO 3 gathers weights collectively. Collective; returns the
    same on every rank.
    """
    workflow, layouts = job.program.workload.workflow, job.program.placement.layouts
    num = min(job.config.num_samples, len(job.prompts))
    if num == 0 or not workflow.generate_calls or job.episodes is not None:  # episodes are in the rollouts
        return []
    generating = workflow.generate_calls[0]
    scoring = next((call for call in workflow.placed_calls if infer.judges(job, call)), None)
    rank, device = job.world.rank, job.world.device
    prompts_BP = pad(job.prompts.prompts[:num]).to(device)
    tokens: list[list[int]] = []
    if rank in layouts[generating.name].ranks:
        rows, width = (np.arange(num), np.zeros(num, int)), job.config.generation.max_new_tokens
        bits_BG = torch.from_numpy(random_bits(job.config.seed, random_streams.SAMPLES, 0, *rows, width)).to(device)
        release_unused(device)  # what loading and training have left
        with job.models.weights(generating) as model:
            free = job.config.generation.cache_fraction * free_bytes(device, job.world.computes.num_ranks)
            responses_BG, *_ = generate_rows(model, prompts_BP, bits_BG, free_bytes=free, **job.drawing)
        tokens = responses_BG.tolist()
    first = layouts[generating.name].model_ranks(layouts[generating.name].ranks[0])[-1]
    everyone = job.world.allgather(tokens if rank == first else [], "the samples")
    tokens = next(found for found in everyone if found)
    scored: tuple[list[float], list[int]] = [], []  # and rows that ran out of time
    if scoring is not None and rank in layouts[scoring.name].ranks:
        responses_BG = torch.tensor(tokens, dtype=torch.int64, device=device)
        # one copy of the model scores; the other ranks only take part in gathering weights
        mine = num if rank in layouts[scoring.name].model_ranks(layouts[scoring.name].ranks[0]) else 0
        judged = infer.scores(job, scoring, prompts_BP[:mine], responses_BG[:mine], range(mine))
        scored = scored if judged is None else (judged.scores_B.tolist(), sorted(judged.late))
    everyone = job.world.allgather(scored, "the samples' scores")
    scores = next((found for found, _ in everyone if found), [math.nan] * num)
    late = {row for _, rows in everyone for row in rows}
    texts = [
        job.tokenizer.decode_pair(prompt, row)[1] for prompt, row in zip(job.prompts.prompts, tokens, strict=False)
    ]
    return [(text, score, row in late) for row, (text, score) in enumerate(zip(texts, scores, strict=True))]


def join_samples(job: Job, before: Sequence[Shown], after: Sequence[Shown] | None = None) -> list[Sample]:
    """The responses before and, if there are any, after training, by prompt."""
    later: Sequence[tuple[str | None, float | None, bool]] = after or [(None, None, False)] * len(before)
    return [
        Sample(index, job.prompts.texts[index], *old[:2], *new[:2], old[2], new[2])
        for index, (old, new) in enumerate(zip(before, later, strict=True))
    ]

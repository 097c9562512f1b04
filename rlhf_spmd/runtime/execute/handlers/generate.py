"""Calls that sample responses."""

# M mini-batches, C columns, B sequences, P prompt tokens, G response tokens

import math
import time
from collections import Counter
from functools import partial

import torch
from torch import Tensor

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.calls import Generate
from rlhf_spmd.plan.cost.memory import caches_alive, trains_beside_cache, working_bytes
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.runtime_words import END, RESPONSES, actions_of, opened_of, rewards_of, routes_of
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, mask_of
from rlhf_spmd.runtime.execute.job import Job, shape_of
from rlhf_spmd.runtime.execute.partial_rollouts import begun, carry
from rlhf_spmd.runtime.execute.rounds import only_again
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.generation.episodes import REASONS, Episodes
from rlhf_spmd.runtime.generation.kv_cache import free_bytes
from rlhf_spmd.runtime.generation.rollout import Rollout
from rlhf_spmd.runtime.generation.shared_episodes import shared
from rlhf_spmd.runtime.world.scratch import scratch


def generate(job: Job, call: Generate, run: Run, data: Iteration) -> None:
    """Samples the responses of a Run."""
    whole = place = job.place(run)
    again_MC, drawn = data.again(place, run.round), data
    if run.round:
        drawn, place = only_again(job, data, place[1], call.prompts)
    started = time.perf_counter()
    with job.models.weights(call) as model:
        if call.name not in data.generations:
            data.generations[call.name] = _all_of_iteration(job, call, model, run, drawn, place[1])
        rollout = data.generations[call.name]
        made = _made(job, call, rollout, place[0])
        ends = rollout.ends(place[0])  # of episodes that are not dropped
        if whole[0].stop == job.workload.num_mini_batches:  # rows of later mini-batches may have ended, too
            del data.generations[call.name]  # frees its memory for training
    meter, counted = job.meter(call, data), made
    if data.carried is not None:
        is_over_B = carry(job, call, data, whole, made, meter)
        counted = {name: rows[is_over_B] for name, rows in made.items()}
    for key in job.program.makes(run, job.world.rank):  # stages before the last one keep none of it
        stored = data.store.at(key, whole)
        if run.round:
            stored[again_MC] = made[key].to(stored.dtype)
        else:
            stored[:] = made[key].unflatten(0, shape_of(place))
    key = call.outputs[0]
    prefix, num = key.removesuffix(RESPONSES), len(counted[key]) if rollout.turns is None else len(ends)
    meter.add(f"{prefix}response_length", mask_of(counted, key).sum(), num)
    meter.add(f"{prefix}ended_fraction", job.ended_of(counted, key).sum(), num)
    if rollout.turns is not None:
        counted = Counter(reason for reason, _ in ends)
        of_answers = (made[key] >= 0) & ~mask_of(made, key)
        meter.add(f"{prefix}answer_tokens", of_answers.sum(), num)
        meter.add(f"{prefix}prompt_length", (made[opened_of(key)] >= 0).sum(), num)
        meter.add(f"{prefix}turns", sum(num_turns for _, num_turns in ends), num)
        ended = [REASONS.index(one) if one else None for one in rollout.reasons(place[0])]
        data.note(f"{prefix}{END}", whole, ended, again_MC)
        for reason in REASONS:
            meter.add(f"{prefix}end_{reason}", counted[reason], num)
    if rollout.turns is not None and call.name not in data.generations:
        for name, (total, num_episodes) in rollout.turns.episodes.counts().items():
            meter.add(f"{prefix}{name}", total, num_episodes)
        seconds = sorted(rollout.turns.episodes.seconds())
        meter.add(f"{prefix}answers", len(seconds), rollout.num)
        meter.add(f"{prefix}tool_s", sum(seconds), len(seconds))
        meter.maximum(f"{prefix}tool_p95_s", seconds[math.ceil(0.95 * len(seconds)) - 1] if seconds else 0.0)
    data.generate_s += time.perf_counter() - started
    meter.maximum("generate_s", data.generate_s)


def _made(job: Job, call: Generate, rollout: Rollout, mini_batches: slice) -> dict[str, Tensor]:
    """Returns the results of a call for some mini-batches, by data key: [B, ...]."""
    responses, logprobs, *others = call.outputs
    responses_BG, logprobs_BG, support_BGK = rollout.of(mini_batches)
    made = {responses: responses_BG, logprobs: logprobs_BG}
    if rollout.turns is not None:
        made[actions_of(responses)], made[rewards_of(responses)] = rollout.of_turns(mini_batches)
        made[opened_of(responses)] = rollout.prompts_MBP[mini_batches].flatten(0, 1)
    if (routes := routes_of(responses)) in others:
        made[routes] = rollout.routes_of(mini_batches, job.workload.row_shape(routes)[0])
    if support_BGK is not None:
        made |= {key: support_BGK for key in others if job.workload.workflow.shapes[key] == "kept"}
    return made


def cache_share(program: Program, rank: int, call: str, num_alive: int, fraction: float) -> float:
    """Returns the share of the memory now free that the KV cache of a call may take on a rank.

    Engines that live at the same time get equal parts of `fraction` of what is free before the first of them takes its
    part.

    num_alive: those that have taken it.
    """
    return fraction / (len(caches_alive(program, rank)[call]) - num_alive * fraction)


def _episodes(job: Job, call: Generate, model: Transformer, data: Iteration, columns: slice) -> Episodes | None:
    """Returns the object that answers to the turns of a call's responses; None if they have one turn."""
    if not call.has_turns:
        return None
    assert job.environments is not None, "an environment answers"
    ask = partial(job.environments.of_call, job, call, data, columns)
    return shared(ask, data.prompt_MC[:, columns].size, model.parallel, job.world.device)


def _opened(episodes: Episodes, data: Iteration, columns: slice, prompts_MCP: Tensor) -> Tensor:
    """Returns the prompts of rows as their environments open them: like prompts_MCP, those of the data set."""
    opened_MCP, opened = torch.full_like(prompts_MCP, -1), episodes.openings()
    if data.store.workload.episode_rows > 1:  # answers open rows
        return opened_MCP
    for index, tokens_P, tokens in zip(
        data.prompt_MC[:, columns].flatten().tolist(), opened_MCP.flatten(0, 1), opened, strict=True
    ):
        if not 0 < len(tokens) <= len(tokens_P):
            raise UserError(
                f"the environment opens prompt {index} of the data set with {len(tokens)} tokens; give 1 to "
                f"data.max_prompt={len(tokens_P)}, or raise that"
            )
        tokens_P[: len(tokens)] = torch.tensor(tokens)
    return opened_MCP


def _all_of_iteration(
    job: Job, call: Generate, model: Transformer, run: Run, data: Iteration, columns: slice
) -> Rollout:
    """Returns the engine with all rows that this rank generates for a call in an iteration, in the order of its
    Runs."""
    generation, num_rows = job.config.generation, columns.stop - columns.start
    places = generation.max_sequences
    if run.mini_batch is not None:
        # streaming: the first mini-batch must not wait for all others
        places = min(places, job.program.placement.decode_mini_batches * num_rows)
    own = {} if call.temperature is None else {"temperature": call.temperature}
    stream = random_streams.of_call(job.workload.workflow, call) if job.stream is None else job.stream
    share = cache_share(job.program, job.world.rank, call.name, len(data.generations), generation.cache_fraction)
    free = free_bytes(job.world.device, job.world.computes.num_ranks)
    if trains_beside_cache(job.program, job.world.rank):
        working = working_bytes(job.program, job.world.rank)
        free -= working["activations"] + max(0, working["gradients"] - scratch(job.world.device).idle_bytes)
    prompts_MCP, episodes = data.store.at(call.prompts, (ALL, columns)), _episodes(job, call, model, data, columns)
    if episodes is not None:
        prompts_MCP = _opened(episodes, data, columns, prompts_MCP)
    return Rollout(
        model,
        prompts_MCP,
        data.random_bits(stream, columns),
        max_sequences=max(min(places, num_rows * job.workload.num_mini_batches), 1),
        block_size=generation.block_size,
        free_bytes=max(share * free, scratch(job.world.device).cache_bytes),
        episodes=episodes,
        episode_rows=job.workload.episode_rows,
        bits_of=partial(data.bits_of, stream, columns),
        max_new_tokens=generation.max_new_tokens,
        begun=begun(job, call, data, (ALL, columns)),
        records_routes=routes_of(call.outputs[0]) in call.outputs,
        **(job.drawing | own),
    )

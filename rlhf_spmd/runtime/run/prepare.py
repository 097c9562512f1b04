"""Makes the job of a rank (options, program, prompts, models), and the data of an iteration."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from rlhf_spmd.algorithms.training_order import epoch_order
from rlhf_spmd.config.epochs import in_iterations
from rlhf_spmd.config.options import NO_PROMPTS, Config, evaluated, prompt_files
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import load_tokenizer, read_config
from rlhf_spmd.model.texts.template_time import time_of_start
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.pages.algorithm import check_functions
from rlhf_spmd.plan.cost.memory import packed_bytes, working_bytes
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.validate import split_groups
from rlhf_spmd.runtime.data.prompts import PromptSet
from rlhf_spmd.runtime.data.shared_prompts import once_per_node
from rlhf_spmd.runtime.data.step_order import StepOrder, order_of
from rlhf_spmd.runtime.environments.of_run import RunEnvironments
from rlhf_spmd.runtime.execute.iteration import Iteration, Rounds, given_rows, occurrences
from rlhf_spmd.runtime.execute.job import Job, RunState
from rlhf_spmd.runtime.execute.partial_rollouts import next_rows
from rlhf_spmd.runtime.generation import random_streams
from rlhf_spmd.runtime.profile.products import Recorded, choose, limit_packing
from rlhf_spmd.runtime.rewards.response_scores import Scorer
from rlhf_spmd.runtime.run.inputs import (
    check_best,
    check_context,
    check_responses_end,
    functions_fingerprints,
    read_prompts,
)
from rlhf_spmd.runtime.weights.rank_models import RankModels, shared_vocabulary
from rlhf_spmd.runtime.world.world import World


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the start of a run makes on a rank.

    evaluation: the job of its evaluations, if there are any.
    products: facts of the library of products, if it was chosen.
    notes: for the user, on rank 0 and the first rank of every other node.
    """

    job: Job
    evaluation: Job | None
    products: Mapping[str, Any]
    notes: Sequence[str]


def prepare(
    config: Config,
    program: Program,
    world: World,
    evaluation: Program | None = None,
    *,
    products: Recorded | None = None,
) -> Prepared:
    """Loads prompts, tokenizer and models. Collective; an error on one rank ends all ranks together.

    evaluation: the program of the run's evaluations, if there are any.
    products: the library of the run that is resumed; None: it is chosen.
    """
    config = replace(config, started=world.bcast(config.started or time_of_start(), what="the time of the start"))
    of_evaluation = evaluated(config)
    with world.together("reading tokenizer and prompts"):
        check_functions(config.algorithm, program.workload.workflow, config.options)
        if not prompt_files(config):
            raise UserError(NO_PROMPTS)
        tokenizer = load_tokenizer(config.files().tokenizer)
        known = shared_vocabulary(config, tokenizer)
        notes = [*filter(None, [config.files().warning])]
        model = read_config(config.main_folder, config.files().texts)
        eos_ids = tokenizer.eos_ids(model)
        prompts = once_per_node(world, lambda: read_prompts(config, tokenizer, known, eos_ids))
        budget = config.mini_batch_tokens
        steps = order_of(prompts, budget, config.mini_batch) if budget else None
        config = in_iterations(config, len(prompts), steps.num_steps if steps else None)
        if program.workload.workflow.generate_calls:
            check_responses_end(config, eos_ids)
        check_context(config, model)
        held_out = None
        if evaluation is not None:
            held_out = once_per_node(world, lambda: read_prompts(of_evaluation, tokenizer, known, eos_ids))
            check_context(of_evaluation, model, "eval.max_new_tokens")
            _check_held_out(config, held_out, evaluation.workload.rollout_batch)
    shapes = program.workload.models.values()
    library, note = choose(world, config, shapes, products)
    with world.together("loading models"):
        models = RankModels(program, config, world)
        scorer = _scorer(config, program, world, tokenizer, prompts)
        if held_out is not None and evaluation is not None:
            try:
                scorer_of_evaluation = _scorer(of_evaluation, evaluation, world, tokenizer, held_out)
            except UserError as error:  # about columns of its prompts, or a function of its own
                raise UserError(f"evaluation on {config.eval.prompts}: {error}") from None
    read = prompts.fingerprints("data.prompts") | (held_out.fingerprints("eval.prompts") if held_out else {})
    world.agree("the start", read | functions_fingerprints(config))
    models.start()
    copied = working_bytes(program, world.rank)["copies with adapters"] + packed_bytes(program, world.rank)
    notes += filter(None, (note, limit_packing(world, config, library, copied)))
    with world.together("reading the environment"):
        environments = None
        if config.environment:
            _check_groups(program, drops=config.episode.on_failure == "drop_group")
            columns = prompts.column_names
            environments = RunEnvironments(config, columns, tokenizer, eos_ids, beat=lambda: world.watch.beat())
        if evaluation is not None:
            _check_groups(evaluation, "episode.rows, of eval.num_prompts as a mini-batch")
        notes += _ends_of_answers(environments, config, prompts)
    job = Job(
        config,
        program,
        tokenizer,
        prompts,
        eos_ids,
        known,
        config.algorithm.functions(program.workload.workflow),
        world,
        models,
        scorer,
        columns=program.held(world.rank),
        state=RunState(config.algorithm.initial_state(config.options)),
        steps=steps,
        environments=environments,
    )
    job_of_evaluation = None
    if evaluation is not None and held_out is not None:
        job_of_evaluation = replace(
            job,
            config=of_evaluation,
            program=evaluation,
            prompts=held_out,
            functions=config.algorithm.functions(evaluation.workload.workflow),
            scorer=scorer_of_evaluation,
            columns=evaluation.held(world.rank),
            state=RunState(None),
            stream=random_streams.EVALUATION,
        )
    return Prepared(job, job_of_evaluation, asdict(library) if library else {}, notes)


def _check_held_out(config: Config, prompts: PromptSet, num: int) -> None:
    """Raises UserError for prompts of evaluations of which some have nothing to evaluate, or that lack the source which
    checkpoint.best names.

    num: rows of the files.
    """
    if num > len(prompts):
        raise UserError(
            f"eval.prompts={config.eval.prompts}: {num - len(prompts)} of its rows have nothing to evaluate "
            "(conversations without an answer, pairs that are equal once they are cut); remove them"
        )
    check_best(config, prompts, num)


def _ends_of_answers(environments: RunEnvironments | None, config: Config, prompts: PromptSet) -> list[str]:
    """Returns notes about ends of turns that do not end a response, which the prompts have not had."""
    renderers = environments.renderers.values() if environments else ()
    joins = [renderer.joins for renderer in renderers if renderer.environment.speaks != "text"]
    ends = {join.unended(config.generation.stop) for join in joins}
    return sorted(ends - {"", *prompts.remarks})


def _check_groups(program: Program, option: str = "episode.rows", *, drops: bool = False) -> None:
    """Raises UserError unless each rank draws whole episodes and, if groups are dropped, whole groups, so that it knows
    of each what is dropped. option: that needs whole episodes."""
    workload = program.workload
    for call in workload.workflow.generate_calls:
        layout = program.placement.layouts[call.name]
        problems = [*split_groups(layout, workload, call.name, option, workload.episode_rows)]
        if drops:
            problems += split_groups(layout, workload, call.name, "episode.on_failure=drop_group")
        for problem in problems:
            raise UserError(problem)


def _scorer(config: Config, program: Program, world: World, tokenizer: Tokenizer, prompts: PromptSet) -> Scorer | None:
    """Returns the scorer of the judge that is on this rank, if one is."""
    layouts = program.placement.layouts
    judging = [
        call
        for call in program.workload.workflow.placed_calls
        if config.algorithm.roles[call.model].judge and world.rank in layouts[call.name].ranks
    ]
    if not judging:
        return None
    calls = any(layouts[call.name].reports(world.rank) for call in judging)
    role, beat = judging[0].model, lambda: world.watch.beat()
    return Scorer(config, role, tokenizer, prompts, calls=calls, beat=beat)


def make_iteration(job: Job, number: int, before: Iteration | None = None) -> Iteration:
    """Returns the order of the mini-batches and the prompts of this rank's rows in one iteration: functions of (seed,
    iteration), with rounds of the prompts that were used before, too.

    before: the batch before it, some of whose responses may go on in this one; None: there is none.
    """
    config, workload = job.config, job.workload
    if job.steps is not None:
        return _within_budget(job, job.steps, number)
    prompts, rounds, carried = job.prompts.batch(number, config.rollout_batch), None, None
    if workload.rounds > 1:
        rounds = Rounds(job.state.prompts_used + config.rollout_batch)
        prompts = job.prompts.following(job.state.prompts_used, config.rollout_batch)
    prompt_N = np.array(prompts).repeat(workload.samples_per_prompt)
    sample_N = occurrences(prompt_N)
    orders = [
        epoch_order(config.seed, number, epoch, workload.num_sequences, workload.mini_batch, group=workload.group_size)
        for epoch in range(workload.epochs)
    ]
    first = orders[0]
    home_N = np.empty(workload.num_sequences, dtype=np.int64)  # the mini-batch of a row in epoch 0
    home_N[first] = np.arange(len(first))[:, None]
    prompt_MC, sample_MC = prompt_N[first], sample_N[first]
    if workload.partial_steps:
        prompt_MC, sample_MC, rounds, carried = next_rows(job, first, number, before)
    store = given_rows(workload, job.prompts, job.columns, prompt_MC, job.world.device)
    source_EMC = torch.from_numpy(np.stack([home_N[order] for order in orders])).to(job.world.device)
    matrices = {"prompt_MC": prompt_MC, "sample_MC": sample_MC, "source_EMC": source_EMC}
    return Iteration(number, config.seed, **matrices, store=store, rounds=rounds, carried=carried)


def _within_budget(job: Job, steps: StepOrder, number: int) -> Iteration:
    """Returns an iteration whose optimizer steps have a budget of tokens."""
    workload = job.workload
    num, device = workload.num_mini_batches, job.world.device
    prompt_MC = steps.matrix(number * num, num)
    source_EMC = torch.arange(num, device=device)[None, :, None].expand(1, *prompt_MC.shape)
    store = given_rows(workload, job.prompts, job.columns, prompt_MC, device)
    sample_MC = np.zeros_like(prompt_MC)
    return Iteration(
        number, job.config.seed, prompt_MC=prompt_MC, sample_MC=sample_MC, source_EMC=source_EMC, store=store
    )

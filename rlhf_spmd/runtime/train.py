"""The main job: PPO on the ranks of this MPI world, placed by a strategy. Wraps the iterations with logs and files."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlhf_spmd.algorithms import ppo_math
from rlhf_spmd.algorithms.order import epoch_order
from rlhf_spmd.config import Config, resolved
from rlhf_spmd.errors import UserError
from rlhf_spmd.kernels.philox import uniforms
from rlhf_spmd.model.hf import load_tokenizer, read_config, save_state
from rlhf_spmd.plan.calibration import Calibration
from rlhf_spmd.plan.program import Program
from rlhf_spmd.runtime import forecast_line, report
from rlhf_spmd.runtime.calls import Calls, Iteration, State
from rlhf_spmd.runtime.console import Console, Result
from rlhf_spmd.runtime.data import PromptSet, load_prompts, pad
from rlhf_spmd.runtime.execute import Executor
from rlhf_spmd.runtime.metrics import combine
from rlhf_spmd.runtime.models import Models, model_folders, shared_vocabulary
from rlhf_spmd.runtime.run_folder import RunFolder
from rlhf_spmd.runtime.scorer import Scorer
from rlhf_spmd.runtime.shadows import whole_state
from rlhf_spmd.runtime.trace import Recorder
from rlhf_spmd.runtime.world import World

TIMELINE_ITERATIONS = 3  # the last ones are kept


@dataclass(slots=True)
class Job:
    """What one rank has in hand during a run."""

    config: Config
    program: Program
    world: World
    tokenizer: object
    prompts: PromptSet
    models: Models
    calls: Calls
    eos_ids: tuple[int, ...]


def prepare(config: Config, program: Program, world: World) -> Job:
    """Loads prompts, tokenizer and models, each step on all ranks or on none (UserErrors leave together)."""
    with world.together("reading tokenizer and prompts"):
        tokenizer = load_tokenizer(config.models.actor)
        num_known = shared_vocabulary(config, tokenizer)
        if not config.data.prompts:
            raise UserError("there are no prompts: give data.prompts=FILE (.jsonl, .parquet or .txt)")
        prompts = load_prompts(
            config.data.prompts,
            tokenizer,
            max_prompt_tokens=config.data.max_prompt,
            key=config.data.key,
            long_prompts=config.data.long_prompts,
            seed=config.seed,
        )
        for text, tokens in zip(prompts.texts, prompts.prompts, strict=True):
            if max(tokens) >= num_known:
                raise UserError(
                    f"the prompt {text[:60]!r} has token {max(tokens)}, but the models know {num_known} tokens "
                    f"(vocab_size in config.json); use the tokenizer that belongs to {config.models.actor}"
                )
        actor = read_config(config.models.actor)
        eos_ids = actor.eos_token_ids or ((tokenizer.eos_token_id,) if tokenizer.eos_token_id is not None else ())
        longest = config.data.max_prompt + config.generation.max_new_tokens
        if longest > actor.max_position_embeddings:
            raise UserError(
                f"data.max_prompt + generation.max_new_tokens = {longest} tokens, but {config.models.actor} "
                f"was made for {actor.max_position_embeddings}; lower one of them"
            )
    with world.together("loading models"):
        models = Models(program, config, world)
        needs_scorer = any(
            call.function == "scores" and world.rank in program.placement.layouts[call.name].ranks
            for call in program.workload.workflow.placed_calls
        )
        reward = model_folders(config)["reward"]
        scorer = Scorer(config, read_config(reward) if reward else None, tokenizer) if needs_scorer else None
    world.agree("the start", {"prompts": prompts.fingerprint()})
    models.start()
    calls = Calls(program, config, world, models, scorer, eos_ids, num_known, tokenizer.decode)
    return Job(config, program, world, tokenizer, prompts, models, calls, tuple(eos_ids))


def make_iteration(job: Job, number: int) -> Iteration:
    """Prompts, uniforms and mini-batch order of one iteration: functions of (seed, iteration), equal on all ranks."""
    config, workload = job.config, job.program.workload
    prompt_N = np.array(job.prompts.batch(number, config.rollout_batch)).repeat(config.samples_per_prompt)
    sample_N = occurrences(prompt_N)
    orders = [
        epoch_order(config.seed, number, epoch, workload.num_sequences, workload.mini_batch)
        for epoch in range(workload.epochs)
    ]
    first = orders[0]
    home_N = np.empty(workload.num_sequences, dtype=np.int64)  # mini-batch of epoch 0 that a row belongs to
    home_N[first] = np.arange(len(first))[:, None]
    prompt_MC, sample_MC = prompt_N[first], sample_N[first]
    prompts_BP = pad([job.prompts.prompts[prompt] for prompt in prompt_MC.flatten()], config.data.max_prompt)
    uniforms_BG = uniforms(config.seed, number, prompt_MC.flatten(), sample_MC.flatten(), workload.max_response)
    device, shape = job.world.device, first.shape
    return Iteration(
        number,
        prompt_MC=prompt_MC,
        sample_MC=sample_MC,
        source_EMC=torch.from_numpy(np.stack([home_N[order] for order in orders])).to(device),
        uniforms_MCG=torch.from_numpy(uniforms_BG).unflatten(0, shape).to(device),
        store={"prompts": prompts_BP.unflatten(0, shape).to(device)},
    )


def occurrences(prompt_N: np.ndarray) -> np.ndarray:
    """How often each entry's prompt stood before it: the sample index, which tells repeats of one prompt apart."""
    seen: Counter[int] = Counter()
    sample_N = np.empty_like(prompt_N)
    for row, prompt in enumerate(prompt_N.tolist()):
        sample_N[row] = seen[prompt]
        seen[prompt] += 1
    return sample_N


def train(
    config: Config,
    program: Program,
    world: World,
    *,
    strategy: str,
    source: str,
    summary: str,
    root: str,
    name: str | None,
    command: report.Command,
    calibration: Calibration | None = None,
) -> Result:
    """Runs all iterations and leaves the run folder `root`/`name`; rank 0 prints.

    strategy, source: name and text of the strategy module; summary: what `check` prints of the program; command: how
    the user started it; calibration: of these devices, for a forecast that the run is compared with.
    """
    started = time.perf_counter()
    recorder = Recorder(world.rank, world.hosts[world.rank])
    job = prepare(config, program, world)
    with world.together("making the run folder"):
        path = str(RunFolder.create(root, strategy=strategy, name=name).path) if world.rank == 0 else ""
    folder = RunFolder(world.bcast(path, what="the run folder"), writes=world.rank == 0)
    console = Console(enabled=world.rank == 0)
    folder.write_config(resolved(config))
    folder.write_strategy(source)
    folder.write_program(program.fingerprint, summary)
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    console.heading(f"rlhf_spmd: PPO by {strategy} on {ranks}", report.facts(job, folder))

    executor = Executor(program, world, job.models, job.calls, recorder)
    state = State(kl_coef=config.ppo.kl_coef)
    before = report.sample_responses(job)
    folder.write_samples(report.join_samples(job, before))
    history: list[dict] = []
    for number in range(config.iterations):
        began = time.perf_counter()
        answers = executor.iteration(make_iteration(job, number), state)
        metrics = report.summarize(job, answers, state.kl_coef)
        metrics["iteration_s"] = time.perf_counter() - began
        report.check_finite(metrics, number)
        update(state, config, metrics, answers)
        history.append(metrics)
        folder.write_metrics(number, metrics)
        console.iteration(number + 1, config.iterations, metrics)
    samples = report.join_samples(job, before, report.sample_responses(job))
    folder.write_samples(samples)
    console.samples(samples)
    save_actor(job, folder)
    recent = range(config.iterations - TIMELINE_ITERATIONS, config.iterations)
    records = world.allgather(recorder.to_records(recent), "gathering the timeline")
    folder.write_timeline(records, title=f"{strategy} on {ranks}")
    if calibration is not None and world.rank == 0:
        lengths = forecast_line.lengths_of(answers, job.prompts.prompts)
        rows = forecast_line.compare(program, calibration, records, lengths)
        forecast_line.write(rows, calibration, folder.path / "forecast.json")
        console.note(forecast_line.show(rows, calibration))
    folder.close()
    result = report.result(strategy, world.size, history, time.perf_counter() - started, folder)
    if command.strategy == "auto":  # what was planned can be checked and run again
        command = replace(command, strategy=str(folder.path / "strategy.py"))
    console.closing(result, folder, report.next_commands(command, world.size))
    return result


def update(state: State, config: Config, metrics: Mapping, answers: Sequence[Mapping]) -> None:
    """What changes between iterations, from global numbers only, so that it changes alike on every rank."""
    sequences = config.rollout_batch * config.samples_per_prompt
    if config.ppo.kl_controller == "adaptive":
        state.kl_coef = ppo_math.next_kl_coef(
            state.kl_coef, metrics["kl"], sequences, target=config.ppo.kl_target, horizon=config.ppo.kl_horizon
        )
    means, weights = combine(answers)
    if "used_score" in means:  # a truncated response has no score to normalise
        moments = torch.tensor([1.0, means["used_score"], means["used_score_sq"]], dtype=torch.float64)
        state.scores = state.scores.updated(moments * weights["used_score"])


def save_actor(job: Job, folder: RunFolder) -> None:
    """The trained actor as a Hugging Face folder, written by the first rank that trains it."""
    train = job.program.workload.workflow.train_call("actor")
    layout = job.program.placement.layouts[train.name]
    with job.world.together("saving the actor"):
        if job.world.rank in layout.ranks:
            state = whole_state(job.models, train)
            if state is not None:
                config = job.models.engines["actor"].model.config
                save_state(state, config, "lm", folder.actor, source=job.config.models.actor)

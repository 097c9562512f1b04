"""The train subcommand on the ranks of this MPI world: runs the iterations of a program, and writes logs and files."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil

from rlhf_spmd.config.metric_aliases import aliased, aliases_of
from rlhf_spmd.config.options import Config, function_labels, function_names
from rlhf_spmd.files import output, progress
from rlhf_spmd.plan.cost.calibration import Calibration
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.checkpoint.resume import refuse_fewer
from rlhf_spmd.runtime.checkpoint.saving import Saver
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.failure.last_checkpoint import resume_command
from rlhf_spmd.runtime.failure.records import NOWHERE
from rlhf_spmd.runtime.failure.signals import END, Asked
from rlhf_spmd.runtime.records.console import Console, Result
from rlhf_spmd.runtime.records.run_folder import RunFolder, Sample
from rlhf_spmd.runtime.run import forecast_report, recorded, run_text
from rlhf_spmd.runtime.run.chain import Chain
from rlhf_spmd.runtime.run.evaluation import Evaluator
from rlhf_spmd.runtime.run.forecast_report import Compared
from rlhf_spmd.runtime.run.loop import Done, Loop
from rlhf_spmd.runtime.run.metrics import Alarm, columns_of, metrics_of, num_timeouts, timeouts_note
from rlhf_spmd.runtime.run.precompute import phases_left, precompute_at_start, time_of
from rlhf_spmd.runtime.run.prepare import Prepared, prepare
from rlhf_spmd.runtime.run.recorded import Origin
from rlhf_spmd.runtime.run.rollouts import Rollouts
from rlhf_spmd.runtime.run.samples import join_samples, sample_responses
from rlhf_spmd.runtime.world.trace import Tracer, clock_of
from rlhf_spmd.runtime.world.world import World

TIMELINE_ITERATIONS = 3  # the last ones are kept


def train(
    config: Config,
    program: Program,
    world: World,
    *,
    origin: Origin,
    summary: str,
    evaluation: Program | None = None,
    phases: Sequence[tuple[Config, Program]] = (),
    calibration: Calibration | None = None,
    asked: Asked | None = None,
    as_json: bool | None = None,
) -> Result | None:
    """Runs all iterations and writes the run folder; rank 0 prints. Returns None if SIGTERM ended the run.

    summary: the program as `check` prints it.
    evaluation: the program of its evaluations, if there are any.
    phases: of data.precompute: options and programs of the start, one for each data set.
    calibration: of these devices, to compare the run with a forecast.
    asked: receives signals.
    as_json: --json or --no-json.
    """
    resumed = origin.resumed
    config = replace(config, started=resumed.started if resumed else time_of(config.data.precomputed_logprobs))
    folder = None
    if resumed and resumed.checkpoint:
        config = replace(config, run_folder=str(resumed.folder))
        phases = phases_left(config, world, phases, resumed)
    if phases:
        folder, config = precompute_at_start(config, program, world, phases, origin, summary)
    prepared = prepare(config, program, world, evaluation, products=resumed.products if resumed else None)
    job, config = prepared.job, prepared.job.config  # with the iterations that data.epochs are
    if resumed:
        with world.together("counting the iterations"):
            refuse_fewer(config, resumed.iteration, resumed.folder)
    folder = folder or recorded.open_folder(job, origin)
    known = metrics_of(config.algorithm, program.workload.workflow, function_labels(config))
    console = Console(known, columns_of(known, config, job.workload.workflow), enabled=world.rank == 0, as_json=as_json)
    title = f"{origin.strategy} on " + ("1 rank" if world.size == 1 else f"{world.size} ranks")
    facts = run_text.facts(prepared, folder)
    if resumed:
        facts["resumed"] = f"after {resumed.iteration} of {config.iterations} iterations"
    console.heading(f"rlhf_spmd: {config.algorithm.title} by {title}", facts)
    for note in prepared.notes:
        console.note(f"warning: {note}")
    console.note(origin.note)
    for note in run_text.notes(prepared, resumed):
        console.note(f"note: {note}")
    inputs, surroundings = recorded.inputs(prepared), recorded.surroundings(job)
    history, before = recorded.start_or_resume(prepared, inputs, folder, origin, summary)
    about = {"inputs": inputs, "surroundings": surroundings, "ahead": program.placement.ahead}
    if resumed and (text := recorded.changed(surroundings, resumed.state.get("surroundings", {}))):
        console.note(f"note: {text}")
    running = Running(prepared, folder, console, history, about, asked, calibration)
    if resumed and resumed.checkpoint:
        console.note(running.loop.resume(resumed.checkpoint))
    world.keep_records(folder.path)
    if asked is not None:
        asked.listen(END)
    progress.say(running.doing)
    running.begin()
    for done in () if running.evaluator.why_over else running.loop.iterations():
        running.take(done)
        if END.name in done.signals and len(history) < config.iterations:
            _ended(running)
            return None
        if running.evaluator.why_over:
            break
    console.note(running.evaluator.why_over)
    running.evaluate()
    running.saver.finish()  # now, so that the run can be resumed whatever fails below
    samples: list[Sample] = []
    if before:
        samples = join_samples(job, before, sample_responses(job))
        folder.write_samples(samples)
        console.samples(samples, config.num_samples)
    job.close()
    recorded.save_models(job, folder)
    compared = _compared(running, folder, title, calibration)
    folder.close()
    rows = [*history, *running.evaluator.rows]
    folder.notes += filter(None, [timeouts_note(rows)])
    wall_s = time.time() - psutil.Process().create_time()
    result = run_text.result(job, origin.strategy, history, wall_s, folder, compared, num_timeouts(rows))
    result = replace(result, evaluation=running.evaluator.ends())
    progress.stop()
    console.closing(result, folder)
    return result


class Running:
    """The loop of a run on this rank, and what each iteration is given to: folder, console, alarms, evaluations and
    checkpoints."""

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        console: Console,
        history: list[dict[str, Any]],
        about: dict[str, Any],
        asked: Asked | None,
        calibration: Calibration | None,
    ):
        """Prepares the loop.

        history: the metrics of the iterations so far.
        about: facts for checkpoints.
        asked, calibration: as in `train`.
        """
        job = prepared.job
        world, config = job.world, job.config
        self.job, self.folder, self.console, self.history, self.about = job, folder, console, history, about
        parts = config.logging.aliases, config.algorithm.name, config.options, function_names(config)
        self.aliases = aliases_of(*parts, parts=bool(function_labels(config)))
        self.recorder = Tracer(world.rank, world.hosts[world.rank], clock=clock_of(world.device))
        executor = Executor(job, self.recorder, asked)
        self.evaluator = Evaluator(prepared, executor, folder, len(history))
        self.rollouts = Rollouts(job, folder.path)
        self.saver = Saver(job, folder.path, folder.texts())
        self.alarm = Alarm(console.metrics, history)
        flops = _device_flops(job, calibration)
        self.loop = Loop(job, executor, history, flops)
        if job.program.chains:
            self.loop = Chain(job, executor, history, flops, is_due=self.meets)

    def begin(self) -> None:
        """Evaluates before training, or makes up the evaluation that an interrupted run missed."""
        self.evaluate()
        if self.history and self.evaluator.best_iteration == len(self.history):  # of this evaluation
            recorded.save_models(self.job, self.folder, "best")

    def meets(self, num: int) -> bool:
        """Returns whether something that needs all ranks comes after so many iterations."""
        due = self.evaluator.is_due(num) or self.saver.is_due(num) or self.rollouts.is_due(num - 1)
        return due or num == self.job.config.iterations

    def take(self, done: Done) -> None:
        """Writes, evaluates and saves an iteration. Collective where all ranks have met."""
        self.write(done)
        if not done.is_drained:
            return
        if END.name not in done.signals:  # else there is no time, and the resumed run evaluates
            self.evaluate()
        self.save(done)
        self.recorder.forget(done.number + 1 - TIMELINE_ITERATIONS)

    def doing(self) -> str:
        """Returns what this rank does now: its progress within an iteration, and the remaining time of the run.
        Called by another thread."""
        world, current, total = self.job.world, self.loop.executor.current, self.job.config.iterations
        record = world.record
        now = record.now
        if current is None or not now.text.startswith(f"{current.title}: ") or now.position == NOWHERE:
            return world.doing
        draws = self.loop.draws
        seconds = time.perf_counter() - self.loop.began_s
        left = ""
        if self.history:
            left_s = self.console.left_s(current.number, total, self.history[-1]) - seconds
            left = f", about {progress.duration(max(left_s, 0.0))} left"
        generations = draws.generations.values() if draws else ()
        parts = [f"{rollout.num - rollout.num_left} of {rollout.num} responses" for rollout in [*generations]]
        parts.append(f"instruction {now.position} of {record.num_instructions}")
        text = now.text.partition(": ")[2]
        return f"{current.title} of {total}, {progress.duration(seconds)}{left}: {', '.join(parts)}: {text}"

    def evaluate(self) -> None:
        """Evaluates after the iterations so far, if that is due and not done yet."""
        self.console.note(self.evaluator.evaluate(len(self.history)))

    def write(self, done: Done) -> None:
        """Writes samples and metrics, and shows the metrics."""
        if done.is_drained:
            self.rollouts.write(done.data)
        groups = {name: metric.group for name, metric in self.console.metrics.items()}
        self.folder.write_metrics(done.number, done.metrics, groups, aliased(self.aliases, done.metrics))
        self.console.iteration(done.number + 1, self.job.config.iterations, done.metrics)
        for text in self.alarm.notes(done.metrics):
            self.console.note(text)

    def save(self, done: Done) -> None:
        """Writes a checkpoint and the best model, if they are due."""
        num = done.number + 1
        is_best = self.evaluator.best_iteration == num
        is_over = num == self.job.config.iterations or bool(self.evaluator.why_over)
        is_last = is_over and not self.job.models.are_random
        if done.signals or self.saver.is_due(num) or is_best or is_last:
            with self.recorder.span("checkpoint", "control"):
                state = self.about | recorded.run_state(self.job.state)
                self.saver.save(num, state, self.evaluator.best_iteration, self.loop.share_in_flight())
        if is_best:
            recorded.save_models(self.job, self.folder, "best")
        self.saver.check()


def _device_flops(job: Job, calibration: Calibration | None) -> float | None:
    """Returns the FLOP/s of large products on each GPU; None on CPUs, and where they are unknown or differ."""
    types = {node.device for node in job.program.cluster.nodes}
    if calibration is None or job.world.computes.index is None or len(types) > 1:
        return None
    return calibration.devices[types.pop()].matrix_flops


def _ended(running: Running) -> None:
    """Finishes the checkpoint after SIGTERM; rank 0 prints the command that resumes the run."""
    job, folder = running.job, running.folder
    running.saver.finish()
    job.close()
    folder.close()
    if job.world.rank == 0:
        done = f"{len(running.history)} of {job.config.iterations} iterations"
        resume = resume_command(folder.shown, job.world.size)
        output.say(f"rlhf_spmd: ended by SIGTERM after {done}; resume with: {resume}")


def _compared(running: Running, folder: RunFolder, title: str, calibration: Calibration | None) -> Compared | None:
    """Writes the timeline of the last iterations, if any, and compares them with their forecast. Collective."""
    last, history, job = running.loop.last, running.history, running.job
    if last is None:
        return None
    recent = range(len(history) - TIMELINE_ITERATIONS, len(history))
    records = job.world.allgather(running.recorder.to_records(recent), "gathering the timeline")
    folder.write_timeline(records, title=title, workflow=job.workload.workflow)
    return forecast_report.compared_run(job, folder, calibration, history, records, last.answers)

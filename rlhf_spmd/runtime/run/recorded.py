"""What a run's folder and its checkpoints record of it, and how a resume compares and restores that."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.config.options import Config, resolved
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import fingerprint
from rlhf_spmd.model.adapters.merge import bit_sum
from rlhf_spmd.model.adapters.unmerged import save_adapter
from rlhf_spmd.model.hf import save_state
from rlhf_spmd.model.parallel import is_split
from rlhf_spmd.runtime.checkpoint.checkpoint_files import DIRECTORY_MODE, remove_drafts
from rlhf_spmd.runtime.checkpoint.resume import (
    PRODUCTS,
    PROGRAM,
    PROMPTS_USED,
    STARTED,
    Resumed,
    refuse_older,
    refuse_other_inputs,
)
from rlhf_spmd.runtime.checkpoint.train_state import restore
from rlhf_spmd.runtime.execute.job import Job, RunState
from rlhf_spmd.runtime.profile.machine import processor
from rlhf_spmd.runtime.records.run_files import headlines_of
from rlhf_spmd.runtime.records.run_folder import CONFIG, RunFolder, Shown, writing
from rlhf_spmd.runtime.records.software import software
from rlhf_spmd.runtime.run.inputs import functions_fingerprints
from rlhf_spmd.runtime.run.prepare import Prepared
from rlhf_spmd.runtime.run.rollouts import forget
from rlhf_spmd.runtime.run.samples import join_samples, sample_responses
from rlhf_spmd.runtime.weights.weight_sync import whole_state

READ = (".safetensors", ".json", ".jinja", ".model", ".txt")  # ends of the names of a model's and a tokenizer's files


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a run. A new run makes the folder `root`/`name`, a resumed one continues in its own.

    strategy, source: name and text of the strategy module.
    cluster: text of the cluster file, if there is one.
    comes_with_package: the name alone finds the strategy.
    note: about code that the user did not name.
    """

    strategy: str
    source: str
    cluster: str = ""
    root: str = "runs"
    name: str | None = None
    resumed: Resumed | None = None
    comes_with_package: bool = True
    note: str = ""


def run_state(state: RunState) -> dict:
    """Returns the state of a run besides weights, options and inputs, for a checkpoint."""
    used = {PROMPTS_USED: state.prompts_used} if state.prompts_used else {}
    return {"state": asdict(state.of_algorithm) if state.of_algorithm is not None else {}} | used


def restore_state(job: Job, num_iterations: int, values: Mapping) -> None:
    """Restores the state after so many iterations.

    values: of `run_state`.
    """
    workload = job.workload
    num_steps = num_iterations * workload.epochs * workload.num_mini_batches  # those skipped by early stops included
    steps = dict.fromkeys(job.models.engines, num_steps)
    job.state.of_algorithm, job.state.steps = job.config.algorithm.read_state(values["state"]), steps
    job.state.prompts_used = values.get(PROMPTS_USED, 0)


def inputs(prepared: Prepared) -> dict[str, str]:
    """Returns fingerprints of what a run reads, by name. Collective; raises UserError."""
    job, sums = prepared.job, base_sums(prepared.job)
    config = job.config
    with job.world.together("reading the inputs"):
        fingerprints = job.prompts.fingerprints(config.data.prompts)
        if prepared.evaluation is not None:
            fingerprints |= prepared.evaluation.prompts.fingerprints(config.eval.prompts)
        fingerprints |= functions_fingerprints(config)
        if config.algorithm.from_file:
            fingerprints["algorithm"] = hashlib.sha256(config.algorithm.source.encode()).hexdigest()
        return {**fingerprints, **model_inputs(config), **sums}


def model_inputs(config: Config) -> dict[str, str]:
    """Returns fingerprints of the folders of models and tokenizer that a run reads, by name."""
    fingerprints, folders = dict[str, str](), [config.files().tokenizer]
    for files in (config.files(role) for role in config.algorithm.roles):
        folders += [files.folder, files.adapter]
    for folder in filter(None, dict.fromkeys(folders)):
        paths = [*Path(folder).glob("*"), *Path(folder).glob("additional_chat_templates/*")]
        fingerprints[f"model in {folder}"] = fingerprint(sorted(path for path in paths if path.suffix in READ))
    return fingerprints


def base_sums(job: Job) -> dict[str, str]:
    """Returns the sum of all bits of the base of each model that trains adapters, the same in any layout, by the name
    of an input. Collective."""
    rank, own_sums = job.world.rank, dict[str, int]()
    for call in job.workload.workflow.train_calls:
        layout = job.layout(call)
        if job.workload.shape(call.model).adapters is None or rank not in layout.ranks or layout.dp_index(rank):
            continue
        model = job.models.engines[call.model].model
        shard, trained = model.parallel.shard, model.trained_names()
        weights = []
        for name, weight in model.named_parameters():
            is_copy = (shard.tp_index and not is_split(name)) or (shard.stage and name == "embed_tokens.weight")
            if name not in trained and not is_copy:
                weights.append(weight)
        own_sums[f"base below the adapters of the {call.model}"] = bit_sum(weights)
    sums: dict[str, int] = {}
    for of_rank in job.world.allgather(own_sums, "the sums of the bases"):
        for name, value in of_rank.items():
            sums[name] = (sums.get(name, 0) + value) % 2**64
    return {name: str(value) for name, value in sums.items()}


def surroundings(job: Job) -> dict[str, str]:
    """Returns what the last bits of a run's numbers depend on, by name: the program and, of this rank, the rest."""
    device = job.world.computes.index
    return {
        "placement (program)": job.program.fingerprint,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": "CPU" if device is None else torch.cuda.get_device_name(device),
    }


def changed(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Returns a note for a run that is resumed in other surroundings than its checkpoint was made in; else empty."""
    names = [name for name in now if now[name] != before.get(name, now[name])]
    parts = [f"{name} {now[name]} instead of {before[name]}" for name in names]
    return f"resumed with {', '.join(parts)}: from here on, results may differ by rounding" if parts else ""


def open_folder(job: Job, origin: Origin) -> RunFolder:
    """Makes or reopens the run folder, and locks it. Collective; raises UserError."""
    world, path = job.world, str(origin.resumed.folder) if origin.resumed else ""
    if not path:
        with world.together("making the run folder"):
            if world.rank == 0:
                path = str(RunFolder.create(origin.root, strategy=origin.strategy, name=origin.name).shown)
        path = world.bcast(path, what="the run folder")
    folder = RunFolder(path, writes=world.rank == 0)
    with world.together("opening the run folder"):
        folder.find()
        folder.lock()
        if job.environments is not None:
            job.environments.run = folder.path.name
        if origin.resumed is not None and folder.writes:
            refuse_older(origin.resumed)
    return folder


def start_or_resume(
    prepared: Prepared, read: Mapping[str, str], folder: RunFolder, origin: Origin, summary: str
) -> tuple[list[dict[str, Any]], list[Shown]]:
    """Writes the description of a run, and restores its state -> the metrics of earlier iterations, and samples of the
    untrained model. Collective; if it raises UserError, the folder of a resumed run is unchanged.

    read: of `inputs`.
    """
    job, resumed = prepared.job, origin.resumed
    world = job.world
    history: list[dict[str, Any]] = []
    if resumed is not None:
        with world.together("reading the metrics so far"):
            generates = bool(job.workload.workflow.generate_calls)
            needed = ["iteration_s", *(["gen_tokens", "generate_s"] if generates else [])]
            history = folder.metrics(resumed.iteration, needed) if world.rank == 0 else []
        history = world.bcast(history, what="the metrics so far")
    if resumed is None or resumed.checkpoint is None:
        describe(prepared, folder, origin, summary, history)
        before = sample_responses(job)
        folder.write_samples(join_samples(job, before))
        return history, before
    with world.together("comparing with the checkpoint"):
        refuse_other_inputs(read, resumed)
        ahead, before = job.program.placement.ahead, resumed.state["ahead"]
        if ahead != before:
            raise UserError(
                f"{resumed.folder} samples its batches {before} iterations ahead, and this strategy {ahead}, which "
                f"would change the results on the way: choose a strategy and options with ahead={before}"
            )
        if len(history) != resumed.iteration:
            raise UserError(
                f"{resumed.folder / 'metrics.jsonl'} has {len(history)} of the {resumed.iteration} iterations before "
                f"{resumed.checkpoint.folder.name}; restore the file"
            )
    restore(job.models, resumed.checkpoint)
    restore_state(job, resumed.iteration, resumed.state)
    with world.together("reading the samples"):
        rows = folder.rows("samples.jsonl") if world.rank == 0 else []
        before = [(str(row.get("before")), row.get("reward_before")) for row in rows]
    describe(prepared, folder, origin, summary, history)
    return history, [(text, score) for text, score in world.bcast(before, what="the samples")]


def describe(prepared: Prepared, folder: RunFolder, origin: Origin, summary: str, history: Sequence[Mapping]) -> None:
    """Writes the description of the run into its folder, and removes metrics and drafts that a resumed run writes
    again. Collective; raises UserError."""
    job = prepared.job
    named = origin.strategy if origin.comes_with_package else str(folder.shown / "strategy.py")
    options = resolved(job.config, strategy=named)
    with job.world.together("describing the run"):
        if folder.writes:  # first, since it may fail
            folder.notes += folder.curves.start_trackers(job.config, options)
        if origin.resumed is not None and folder.writes:
            remove_drafts(folder.path / "checkpoints")
            folder.keep_metrics(history)
            forget(folder.path, len(history))
        folder.write("strategy.py", origin.source)
        if job.config.algorithm.from_file:
            folder.write("algorithm.py", job.config.algorithm.source)
        about: dict[str, Any] = {
            "strategy": origin.strategy,
            "fingerprint": job.program.fingerprint,
            "summary": summary.split("\n"),
        }
        algorithm = job.config.algorithm  # for who reads the run without loading its page
        about |= {"algorithm": algorithm.title, "headlines": headlines_of(algorithm.metrics)}
        about |= {PRODUCTS: dict(prepared.products)} if prepared.products else {}
        about |= _made_with(job) if folder.writes else {}
        folder.write_values(PROGRAM, about | {STARTED: job.config.started})
        if origin.cluster:
            folder.write("cluster.toml", origin.cluster)
        folder.write_values(CONFIG, options)  # last: a folder with config.json is a run


def _made_with(job: Job) -> dict[str, Any]:
    """Returns code and machines of the last start of a run, for comparing runs."""
    world, device = job.world, job.world.computes
    devices = (
        f"{processor()}, {os.cpu_count()} cores" if device.index is None else f"{device.num_devices} x {device.name}"
    )
    nodes = f" on {world.num_nodes} nodes" if world.num_nodes > 1 else ""
    return {"software": software(), "hardware": f"{devices}{nodes}", "ranks": world.size}


def save_models(job: Job, folder: RunFolder, parent: str = "") -> None:
    """Writes the trained models that the algorithm keeps as Hugging Face folders, those with adapters as peft's, on the
    first rank of each; none with random weights. parent: the folder in the run folder; empty: the run folder."""
    if job.models.are_random:
        return
    roles = job.config.algorithm.roles
    for train in (call for call in job.workload.workflow.train_calls if roles[call.model].saved):
        role, path = train.model, folder.path / parent / train.model
        with job.world.together(f"saving the {role}"):
            trains = job.world.rank in job.layout(train).ranks
            if trains and (state := whole_state(job.models, train)) is not None:
                with writing(path):
                    path.parent.mkdir(DIRECTORY_MODE, exist_ok=True)
                    model, head = job.models.engines[role].model, roles[role].head
                    missing = job.known.missing(model.config.vocab_size) if head == "lm" else ()
                    beside = replace(job.models.texts[role], ends=job.eos_ids, suppressed=missing)
                    if model.adapters is not None:
                        save_adapter(state, model, path, beside, base=job.models.folders[role])
                    else:
                        save_state(state, model.config, head, path, beside)

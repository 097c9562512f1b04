"""What a checkpoint records of a run's inputs and surroundings, and how a resume compares it."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.texts.tokenizer_files import TOKENIZER_FILES
from rlhf_spmd.plan.layout import format_ranks
from rlhf_spmd.runtime.data.precomputed import folder_fingerprint, padded_models
from rlhf_spmd.runtime.execute.job import Job, RunState
from rlhf_spmd.runtime.run.inputs import functions_fingerprints


def run_state(state: RunState) -> dict:
    """The state of a run besides weights, options and inputs, for a checkpoint."""
    return {"state": asdict(state.of_algorithm) if state.of_algorithm is not None else {}}


def inputs(job: Job) -> dict[str, str]:
    """Fingerprints of the files that a run reads, by name."""
    config = job.config
    found = job.prompts.fingerprints(config.data.prompts)
    if job.evaluation is not None:
        found |= job.evaluation.prompts.fingerprints(config.eval.prompts)
    found |= functions_fingerprints(config)
    if config.algorithm.from_file:
        found["algorithm"] = hashlib.sha256(config.algorithm.source.encode()).hexdigest()
    for folder in dict.fromkeys(filter(None, map(config.folder, config.algorithm.roles))):
        found[f"model in {folder}"] = folder_fingerprint(Path(folder))
        others = [Path(folder) / name for name in TOKENIZER_FILES if not name.endswith(".json")]  # those the hash lacks
        parts = [f"{path.name} ".encode() + path.read_bytes() for path in others if path.is_file()]
        found[f"tokenizer files in {folder}"] = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return found


def refuse_other_support(job: Job, folder: Path, before: int | None) -> None:
    """Raises UserError if the run in a folder drew from other tokens. before: how many its checkpoint says; None: it
    is of a version that drew from all rows of the embeddings."""
    padded = padded_models(job.config, job.known)
    if before is None and padded:
        role, rows = next(iter(padded.items()))
        raise UserError(
            f"{folder} was started by a version of rlhf_spmd that gave all {rows} rows of the {role}'s embeddings a "
            f"probability; this version gives one only to the {job.known.count} tokens of the tokenizer, so the "
            "results would change on the way; resume it with that version, or start a new run"
        )
    if before not in (None, job.known.count):
        raise UserError(
            f"{folder} drew from {before} tokens, and the tokenizer of {job.config.main_folder} now has "
            f"{job.known.count}; restore the tokenizer's files, or start a new run"
        )


def surroundings(job: Job) -> dict[str, str]:
    """The environment that the last bits of a run's numbers depend on: name -> value, or the values with their ranks
    if they differ. Collective."""
    mine = {
        "stable program": job.program.fingerprint,  # "program", in earlier versions, named classes
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": "CPU" if job.world.computes.index is None else torch.cuda.get_device_name(job.world.computes.index),
    }
    every, found = job.world.allgather(mine, "the surroundings"), {}
    for name in mine:
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in enumerate(every):
            ranks_of.setdefault(theirs[name], []).append(rank)
        parts = [f"{value} (ranks {format_ranks(tuple(ranks))})" for value, ranks in ranks_of.items()]
        found[name] = ", ".join(parts) if len(parts) > 1 else mine[name]
    return found


def changed(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    """A note for a run that is resumed in another environment than its checkpoint was made in; else empty."""
    parts = []
    for name in now:
        if before.get(name, now[name]) != now[name]:
            parts.append(
                "another program" if name == "stable program" else f"{name} {now[name]} instead of {before[name]}"
            )
    return f"{', '.join(parts)}: from here on numbers may differ in their last digits" if parts else ""

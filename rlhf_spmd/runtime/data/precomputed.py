"""Logprobs that frozen models give the responses of the data set, computed once and kept in the folder of a run.

RUN/logprobs/HASH/000012-of-000340.safetensors has those of a batch of rows: for each key a float32 number for every
response token, row after row in the order of the files. HASH stands for all that the numbers depend on, so that no run
uses those of other rows or models.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import fingerprint, paths_in
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.plan.calls import Infer
from rlhf_spmd.runtime.data.packed_rows import NumberRows
from rlhf_spmd.runtime.data.prompts import PromptSet

FOLDER = "logprobs"  # in that of a run


def calls_of(config: Config) -> tuple[Infer, ...]:
    """Returns the calls whose results are kept."""
    return config.algorithm.workflow(config.options).repeated_calls


def folder_of_parts(parent: str, config: Config, prompts: PromptSet, known: KnownTokens) -> Path:
    """Returns the folder with the numbers of a data set.

    parent: the folder of the run.
    known: the tokens that have a probability.
    """
    generation = config.generation
    limits = generation.temperature, generation.min_new_tokens, known.count
    facts = [prompts.tokens_fingerprint(), config.dtype, *limits]
    for role in (call.model for call in calls_of(config)):
        files = config.files(role)
        for folder in map(Path, filter(None, (files.folder, files.adapter))):
            facts.append(fingerprint(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])))
    return Path(parent) / FOLDER / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def path_of_part(folder: Path, number: int, num_parts: int) -> Path:
    """Returns the file of a batch of rows. folder: see folder_of_parts."""
    return folder / f"{number + 1:06}-of-{num_parts:06}.safetensors"


def has_all_parts(run: str, num_sets: int) -> bool:
    """Returns whether the folder of a run has all numbers of this many data sets, by the names of its files."""
    folders = [paths_in(folder, "*.safetensors") for folder in paths_in(Path(run) / FOLDER, "*")]
    return len(folders) >= num_sets and all(parts and len(parts) == int(parts[0].stem[-6:]) for parts in folders)


def write_part(path: Path, values: Mapping[str, np.ndarray]) -> None:
    """Writes the numbers of a batch, by key. Raises UserError for numbers that are not finite."""
    for key, numbers in values.items():
        if not np.isfinite(numbers).all():
            raise UserError(f"{key} has numbers that are not finite; look at the model")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(dict(values), draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())  # whole when it has its name, also after a power failure
    draft.replace(path)


def with_logprobs(config: Config, prompts: PromptSet, known: KnownTokens) -> PromptSet:
    """Adds the numbers that this run has computed, or the one that data.precomputed_logprobs names. Raises
    UserError."""
    run = config.data.precomputed_logprobs or config.run_folder
    folder = folder_of_parts(run, config, prompts, known)
    parts = [_read_part(path, run) for path in paths_in(folder, "*.safetensors")]
    numbers = dict(prompts.numbers)
    for call in calls_of(config):
        key, ends = call.outputs[0], prompts.responses[call.responses[0]].ends
        values = np.concatenate([part[key] for part in parts]) if parts else np.zeros(0, np.float32)
        if len(values) != int(ends[-1]) and config.data.precompute:  # for the rows with which the run was started
            raise UserError(
                f"{config.data.prompts} changed since {run} was started; restore the file, or start a new run"
            )
        if len(values) != int(ends[-1]):
            raise UserError(
                f"{run} has no logprobs of all rows of {config.data.prompts} by this {call.model}, with these limits "
                "of tokens and dtype: compute them with data.precompute=true"
            )
        numbers[key] = NumberRows(values, ends)
    return replace(prompts, numbers=numbers)


def _read_part(path: Path, run: str) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} can't be read ({error}): remove it, and resume {run}, which computes it again"
        ) from None

"""Logprobs that frozen models give the responses of the data set, computed once and kept in a file.

The file is in the format safetensors: for each key a float32 number for every response token, row after row in the
order of the files; and what the numbers depend on, so that a run does not use those of other rows or models.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.files.reading import fingerprint, is_file, why_no_file
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.model.hf import read_config
from rlhf_spmd.plan.workflow import Infer
from rlhf_spmd.runtime.data.packed_rows import NumberRows
from rlhf_spmd.runtime.data.prompts import PromptSet

FORMAT = "rlhf_spmd logprobs 1"
ROWS, SUPPORT = "the tokens of the rows", "the tokens that may be drawn"
TIME = "the time of the first start"  # which the chat template may write
FIX = "compute it again (`precompute`), or drop the option that names it"


def calls_of(config: Config) -> tuple[Infer, ...]:
    """Returns the calls whose results are in the file."""
    return config.algorithm.workflow(config.options).repeated_calls


def about(config: Config, prompts: PromptSet, known: KnownTokens) -> dict[str, str]:
    """Returns what the numbers depend on, by name. known: the tokens that have a probability."""
    generation = config.generation
    found = {"format": FORMAT, ROWS: prompts.tokens_fingerprint(), "dtype": config.dtype}
    found["generation.temperature"] = f"{generation.temperature:g}"
    found["generation.min_new_tokens"] = str(generation.min_new_tokens)
    if padded := padded_models(config, known):
        found[SUPPORT] = f"{known.count} of {', '.join(f'{rows} ({role})' for role, rows in padded.items())}"
    for role in (call.model for call in calls_of(config)):
        files = config.files(role)
        folders = filter(None, [files.folder, files.adapter])
        found[f"the {role}"] = " ".join(folder_fingerprint(Path(folder)) for folder in folders)
    return found


def padded_models(config: Config, known: KnownTokens) -> dict[str, int]:
    """Returns, for each language model with more rows of embeddings than tokens that may be drawn, their number."""
    roles = config.algorithm.roles
    folders = {role: config.files(role).folder for role in roles if roles[role].head == "lm"}
    rows = {role: read_config(folder).vocab_size for role, folder in folders.items() if folder}
    return {role: num for role, num in rows.items() if num > known.count}


def time_of(config: Config) -> str:
    """Returns the time that chat templates wrote into the rows of the file that the options name; empty: there is
    none."""
    path = Path(config.data.precomputed_logprobs)
    if not is_file(path):
        return ""
    try:
        with safe_open(path, "np") as file:
            return (file.metadata() or {}).get(TIME, "")
    except (OSError, SafetensorError):
        return ""  # with_logprobs says it


def write_logprobs(path: Path, values: Mapping[str, np.ndarray], facts: Mapping[str, str]) -> None:
    """Writes the numbers of every key. Raises UserError."""
    draft = try_to_write(path)
    try:
        mode = draft.stat().st_mode  # as the umask allows; save_file makes files that only their owner can read
        save_file(dict(values), draft, metadata=dict(facts))
        draft.chmod(mode)
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        raise UserError(f"{path} can't be written: {error}; name another file") from None


def try_to_write(path: Path) -> Path:
    """Creates an empty file beside an output file, which is to replace it. Raises UserError if there can be none."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}; name another file") from None
    return draft


def with_logprobs(config: Config, prompts: PromptSet, known: KnownTokens) -> PromptSet:
    """Adds the numbers of the file that the options name to the set. Raises UserError if they are of something else."""
    path, found = Path(config.data.precomputed_logprobs), {}
    if why := why_no_file(path):
        raise UserError(f"the file of precomputed logprobs {path} {why}: write it with `precompute --out {path}`")
    try:
        with safe_open(path, "np") as file:
            _compare(path, file.metadata() or {}, about(config, prompts, known), config, prompts)
            for call in calls_of(config):
                found[call.outputs[0]] = file.get_tensor(call.outputs[0]).astype(np.float32, copy=False)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} holds no precomputed logprobs ({error}): {FIX}") from None
    numbers = dict(prompts.numbers)
    for call in calls_of(config):
        ends, values = prompts.responses[call.responses[0]].ends, found[call.outputs[0]]
        if values.shape != (int(ends[-1]),) or not np.isfinite(values).all():
            raise UserError(f"{path}: {call.outputs[0]} is not one finite number for each token: {FIX}")
        numbers[call.outputs[0]] = NumberRows(values, ends)
    return replace(prompts, numbers=numbers)


def _compare(
    path: Path, stored: Mapping[str, str], wanted: Mapping[str, str], config: Config, prompts: PromptSet
) -> None:
    """Raises UserError if a file was made from something else than a run has."""
    for name, value in wanted.items():
        if stored.get(name) == value:
            continue
        if name == "format":
            raise UserError(f"{path} holds no precomputed logprobs: {FIX}")
        if name == ROWS:
            raise UserError(
                f"{path} was computed for other rows than those of {config.data.prompts}, or they were cut at other "
                f"limits: {FIX}"
            )
        if name == SUPPORT:
            raise UserError(f"{path} was computed with probabilities of tokens that the tokenizer lacks: {FIX}")
        if name.startswith("the "):
            role = name.removeprefix("the ")
            raise UserError(f"{path} was computed with another {role} than {config.files(role).folder}: {FIX}")
        raise UserError(f"{path} was computed with {name}={stored.get(name)}, and this run has {value}: {FIX}")


def folder_fingerprint(folder: Path) -> str:
    """Returns a hash of the weights and descriptions in a model folder (files/reading.fingerprint)."""
    return fingerprint(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]))

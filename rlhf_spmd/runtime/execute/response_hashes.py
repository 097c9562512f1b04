"""Records of responses, which the ranks exchange at the end of an iteration: each a length and a hash, 44 bytes.

`tokens_sha256` is the hash of these hashes in the order of prompts and samples. It therefore does not depend on which
rank generated a response, and no rank needs the tokens of another.
"""

# M mini-batches, C columns, B sequences, G response tokens

import hashlib
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from rlhf_spmd.plan.calls import ModelCall
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration

MAX_SAMPLES = 1_000_000  # of a prompt
SAMPLES_OF_AGE = 2**24  # of a row that has been sampled for some iterations, times these
ROW = np.dtype([("prompt", "<u4"), ("sample", "<u4"), ("length", "<u4"), ("sha256", "u1", 32)])


def digests(prompt_MC: np.ndarray, sample_MC: np.ndarray, responses_MCG: Tensor) -> np.ndarray:
    """Returns a ROW for every response: [M * C]. Its sha256 is that of its tokens as int32, little-endian.

    responses_MCG: -1 after the end of each.
    """
    rows_MC = np.zeros(prompt_MC.shape, ROW)
    rows_MC["prompt"], rows_MC["sample"] = prompt_MC, sample_MC
    for rows_C, responses_CG in zip(rows_MC, responses_MCG, strict=True):
        tokens_CG = responses_CG.int().cpu().numpy().astype("<i4", copy=False)
        rows_C["length"] = (tokens_CG >= 0).sum(1)
        for row, tokens_G, length in zip(rows_C, tokens_CG, rows_C["length"].tolist(), strict=True):
            row["sha256"] = np.frombuffer(hashlib.sha256(tokens_G[:length]).digest(), np.uint8)
    return rows_MC.flatten()


def tokens_sha256(said: Iterable[np.ndarray]) -> str:
    """Returns a hash of all response tokens, from the records of all ranks."""
    rows = np.concatenate(list(said))
    rows = rows[np.lexsort((rows["sample"], rows["prompt"]))]
    return hashlib.sha256(np.ascontiguousarray(rows["sha256"]).tobytes()).hexdigest()


def responses_made(program: Program, rank: int, data: Iteration) -> np.ndarray:
    """Records of the responses that a rank generated and reports; those of a second generate call count as further
    samples."""
    made = [np.empty(0, ROW)]
    for number, call in enumerate(program.workload.workflow.generate_calls):
        columns = reported_columns(program, call, rank)
        if columns.start < columns.stop:
            responses_MCG = data.store.at(call.outputs[0], (ALL, columns))
            samples_MC = data.sample_MC[:, columns] + number * MAX_SAMPLES
            if data.carried is not None:  # an older row may have the same prompt
                samples_MC = samples_MC + (data.number - data.carried.began_MC[:, columns]) * SAMPLES_OF_AGE
            rows = digests(data.prompt_MC[:, columns], samples_MC, responses_MCG)
            made.append(rows if data.carried is None else rows[rows["length"] > 0])
    return np.concatenate(made)


def reported_columns(program: Program, call: ModelCall, rank: int) -> slice:
    """Returns the columns whose responses to a call this rank makes and reports at the end of an iteration; may be
    empty."""
    layout = program.placement.layouts[call.name]
    if rank not in layout.ranks or not layout.reports(rank):
        return slice(0, 0)
    columns = layout.columns(rank, program.workload.mini_batch)
    return slice(columns.start, columns.stop)

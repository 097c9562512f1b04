"""Every sample of an iteration on disk: prompt, response, tokens, scores, and what training read of it.

    rollouts/iteration-000010/part-00000.jsonl    the rows of the first data-parallel rank that trains on the responses

A rank writes the rows that it has. Only single numbers that another rank has, such as scores, are exchanged.
`python -m rlhf_spmd rollouts RUN` shows and filters them.
"""

# M mini-batches, C columns

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_spmd.plan.calls import ModelCall
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.runtime_words import END, RESPONSES, TOKEN_SHAPES, actions_of
from rlhf_spmd.runtime.checkpoint.checkpoint_files import DIRECTORY_MODE
from rlhf_spmd.runtime.data.readers import Record
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration, kept_of
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.response_hashes import reported_columns
from rlhf_spmd.runtime.generation.episodes import REASONS
from rlhf_spmd.runtime.records.rollout_files import other_names, types_of, write_part
from rlhf_spmd.runtime.records.run_folder import writing

FOLDER = "rollouts"
DRAWN = "drawn"  # of an episode: 1 for each token of the response that the model drew, 0 for those of answers
TURNS = "turns"  # of an episode: what was said, by turns (environments/renderer.py)
PLACE = ("iteration", "prompt_index", "sample")


class Rollouts:
    """Writes the samples of a run's iterations or evaluations. All ranks call `write` after the same ones."""

    def __init__(self, job: Job, folder: Path, kind: str = "iteration"):
        """folder: that of the run. kind: `iteration`, or `evaluation`, of which all are written."""
        self.job, self.root, self.kind = job, folder / FOLDER, kind
        self.every, self.format = job.config.rollouts.every, job.config.rollouts.format
        self.call = _call_with_rows(job.program)
        self.columns = reported_columns(job.program, self.call, job.world.rank)  # of which this rank writes a part
        self.actions = actions_of(self.call.responses[0])
        self.end = self.call.responses[0].removesuffix(RESPONSES) + END
        self.types: Mapping[str, Any] = {}
        if self.every and self.format == "parquet" and self.columns.stop:
            self.types = types_of(job.prompts.records(range(len(job.prompts))), job.prompts.column_names)

    def is_due(self, number: int) -> bool:
        """Returns whether the samples of an iteration or an evaluation are written."""
        return self.every > 0 and (self.kind != "iteration" or number % self.every == 0)

    def write(self, data: Iteration) -> None:
        """Writes the samples of an iteration, if that is due. Collective; raises UserError."""
        if not self.is_due(data.number):
            return
        world, layout = self.job.world, self.job.layout(self.call)
        numbers = numbers_of_rows(self.job, data)
        with world.together("writing the rollouts"):
            if not self.columns.stop:
                return
            folder = self.root / f"{self.kind}-{data.number:06d}"
            part = f"part-{layout.dp_index(world.rank):05d}.{self.format}"
            with writing(folder / part):
                folder.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
                draft = folder / f".{part}.{os.getpid()}"
                shapes = self.job.workload.workflow.shapes
                keys = [key for key in self.call.inputs if key in data.store and shapes[key] not in ("kept", "routes")]
                own = self._own(numbers, keys)
                renamed = other_names(self.job.prompts.column_names, own)
                write_part(draft, self._rows(data, numbers, keys), self.format, own, self.types, renamed)
                draft.replace(folder / part)

    def _own(self, numbers: Iterable[str], keys: Sequence[str]) -> dict[str, str]:
        """Returns the columns that a run adds to those of the data set, with their types (rollout_files.py).

        numbers: of rows.
        keys: that the call reads.
        """
        shapes = self.job.workload.workflow.shapes
        found = dict.fromkeys(PLACE, "int") | {"prompt": "str"}
        found |= {key.removesuffix("s"): "str" for key in self.call.responses} | dict.fromkeys(numbers, "float")
        found |= {self._tokens(key): "ints" for key in keys if shapes[key] in TOKEN_SHAPES}
        found |= {key: "floats" for key in keys if shapes[key] in ("token", "token+1") and key != self.actions}
        found |= {TURNS: "turns", self.end: "str", DRAWN: "ints"} if self.actions in keys else {}
        return found | {key: "float" for key in keys if shapes[key] == "row"}

    def _tokens(self, key: str) -> str:
        """Returns the column of tokens; the prompts of episodes have the name of all prompts."""
        return f"{key.removeprefix(f'{self.call.responses[0]}.').removesuffix('s')}_tokens"

    def _rows(
        self, data: Iteration, numbers: Mapping[str, np.ndarray], keys: Sequence[str]
    ) -> Iterator[tuple[Record, Record]]:
        """Yields this rank's rows: what the run adds, and the columns of the data set."""
        job, workload, call = self.job, self.job.workload, self.call
        shapes = workload.workflow.shapes
        values = {key: data.store.at(key, (ALL, self.columns)).cpu().numpy() for key in keys}
        for m, column in product(range(len(data.prompt_MC)), range(self.columns.start, self.columns.stop)):
            if data.prompt_MC[m, column] < 0:  # a place without a row
                continue
            index, sample = int(data.prompt_MC[m, column]), int(data.sample_MC[m, column])
            of_row = {key: values[key][m, column - self.columns.start] for key in keys}
            tokens = {key: row[row >= 0].tolist() for key, row in of_row.items() if shapes[key] in TOKEN_SHAPES}
            if self.actions in of_row and not tokens[call.prompts]:  # a blank row of an episode
                continue
            num_tokens = max((len(tokens[key]) for key in call.responses), default=0)
            if workload.partial_steps and not num_tokens:  # it goes on in the next iteration
                continue
            row: Record = dict(zip(PLACE, (data.number, index, sample), strict=True))
            row["prompt"] = job.prompts.texts[index]
            for key in call.responses:
                row[key.removesuffix("s")] = job.tokenizer.decode_pair(tokens[call.prompts], tokens[key])[1]
            is_dropped = (
                self.actions in of_row and not of_row[self.actions].any()
            )  # then numbers of the row mean nothing
            row |= {name: None if is_dropped else _number(values_MC[m, column]) for name, values_MC in numbers.items()}
            (record,) = job.prompts.records([index])
            if self.actions in of_row:
                drawn = (of_row[self.actions][:num_tokens] > 0).tolist()
                row |= {self.end: REASONS[int(numbers[self.end][m, column])], DRAWN: [int(one) for one in drawn]}
                if job.environments is not None:
                    row[TURNS] = job.environments.transcript(record, tokens[call.responses[0]], drawn)
            row |= {self._tokens(key): some for key, some in tokens.items()}
            for key, value in of_row.items():
                if shapes[key] in ("token", "token+1") and key != self.actions:
                    row[key] = [_number(one) for one in value[: num_tokens + (shapes[key] == "token+1")]]
                elif shapes[key] == "row":
                    row[key] = None if is_dropped else _number(value)
            yield row, record


def forget(folder: Path, num_iterations: int) -> None:
    """Deletes what a resumed run computes again after so many iterations."""
    for part in (folder / FOLDER).glob("*-*"):
        kind, _, number = part.name.partition("-")
        if number.isdigit() and int(number) >= num_iterations + (kind == "evaluation"):
            shutil.rmtree(part, ignore_errors=True)


def _call_with_rows(program: Program) -> ModelCall:
    """Returns the call whose ranks have most of a row: the training of the model that generates, else the first
    training; in an evaluation the last call."""
    workflow = program.workload.workflow
    models = [call.model for call in workflow.generate_calls] + list(workflow.trained_models)
    trains = [call for call in map(workflow.train_call, models) if call is not None]
    return (*trains, workflow.placed_calls[-1])[0]


def numbers_of_rows(job: Job, data: Iteration) -> dict[str, np.ndarray]:
    """Exchanges, by name, the number of every row [M, C], from the ranks that made it: results of calls that are one
    number of each row, and those of the reward functions. NaN: the row has none. Collective."""
    message = {}
    for name, values_MC in (dict(_made_here(job, data)) | data.noted).items():
        places = np.flatnonzero(~np.isnan(values_MC))
        message[name] = places.tolist(), values_MC.reshape(-1)[places].tolist()
    whole: dict[str, np.ndarray] = {}
    for of_rank in job.world.allgather(message, "the numbers of rows"):
        for name, (places, values) in of_rank.items():
            values_MC = whole.setdefault(name, np.full(data.prompt_MC.shape, np.nan))
            values_MC.reshape(-1)[places] = values
    return whole


def _made_here(job: Job, data: Iteration) -> Iterator[tuple[str, np.ndarray]]:
    """Yields key, and float64 [M, C], of the numbers of rows that this rank makes and reports; NaN elsewhere, and for
    rows that do not count."""
    workflow = job.workload.workflow
    for call in workflow.calls:
        for key in (key for key in call.outputs if workflow.shapes[key] == "row"):
            site, *_ = job.program.placement.sites(call, workflow)
            columns = reported_columns(job.program, workflow.placed_call(site), job.world.rank)
            if columns.stop and key in data.store:
                rows = {name: data.store.at(name, (ALL, columns)) for name in (key, *call.inputs)}
                kept_MC = kept_of(job.workload, rows, call.inputs)
                values_MC = np.full(data.prompt_MC.shape, np.nan)
                values_MC[:, columns] = torch.where(kept_MC, rows[key].double(), math.nan).cpu().numpy()
                yield key, values_MC


def _number(value: float) -> float | None:
    """Returns a float32 or float64 with as many digits as it has, None for NaN."""
    number = float(f"{value:.7g}")
    return number if math.isfinite(number) else None

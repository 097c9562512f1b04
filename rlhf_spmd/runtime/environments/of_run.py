"""The environments of a run on one rank: read once, and asked for the episodes of each generate call."""

import atexit
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlhf_spmd.model.hf import tool_schema
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.runtime.data.messages import conversation_of
from rlhf_spmd.runtime.environments.adapters import chosen, load_environments
from rlhf_spmd.runtime.environments.episodes import Episodes
from rlhf_spmd.runtime.environments.journal import Journal, forget
from rlhf_spmd.runtime.environments.rows import Limits, Row
from rlhf_spmd.runtime.environments.speech import Render, speech_of
from rlhf_spmd.runtime.environments.transcript import Turn, transcript
from rlhf_spmd.runtime.environments.workers import EnvironmentWorkers


class RunEnvironments:
    """The environments that `environment` names. Their workers start with the first episodes, so a rank that generates
    nothing has none."""

    def __init__(
        self,
        spec: str,
        columns: Sequence[str],
        tokenizer: Tokenizer,
        render: Render,
        stops: Sequence[int],
        *,
        template: str,
        key: str,
        num_workers: int,
        limits: Limits,
        seed: int,
        rank: int,
        on_failure: Literal["stop", "drop_group"] = "stop",
        form: str = "",
        beat: Callable[[], None] = lambda: None,
    ):
        """Loads the environments of a run. Raises UserError for an environment, a tool or a template that cannot be
        used.

        spec, columns: as in load_environments.
        render, stops, template, form: as in speech_of.
        key: the column of prompts.
        beat: see WorkerPool.
        """
        self.spec, self.columns, self.num_workers, self.limits = spec, list(columns), num_workers, limits
        self.seed, self.key, self.rank, self.on_failure, self.beat = seed, key, rank, on_failure, beat
        self.journal: Path | None = None  # its folder; None: answers are kept nowhere
        self.environments = load_environments(spec, columns)
        self.speeches = {
            name: speech_of(one, tokenizer, render, stops, template=template, describe=tool_schema, form=form)
            for name, one in self.environments.items()
        }
        self._workers: EnvironmentWorkers | None = None

    def of_call(self, job: Any, call: Any, data: Any, columns: slice) -> Episodes:
        """Returns the episodes of a generate call in an iteration or an evaluation, of the rows in some columns."""
        prompts, samples = (numbers[:, columns].flatten().tolist() for numbers in (data.prompt_MC, data.sample_MC))
        groups = [number // job.workload.group_size for number in range(len(prompts))]
        name = f"{data.what.partition(' ')[0]}-{call.name}"
        return self.episodes(self.rows(job, prompts, samples, groups), data.number, name)

    def rows(self, job: Any, prompts: Sequence[int], samples: Sequence[int], groups: Sequence[int]) -> list[Row]:
        """Returns the rows to be drawn.

        prompts: their numbers in the data set.
        samples, groups: see Row.
        """
        records = job.prompts.whole_records(prompts)
        return [
            row_of(prompt, sample, group, record, job.prompts.texts[prompt], self.key)
            for prompt, sample, group, record in zip(prompts, samples, groups, records, strict=True)
        ]

    def transcript(self, columns: Mapping[str, Any], token_ids: Sequence[int], drawn: Sequence[bool]) -> list[Turn]:
        """Returns the turns of an episode as text.

        columns: of its row.
        others: as in transcript.transcript.
        """
        found = chosen(self.environments, columns)
        name = next(name for name, one in self.environments.items() if one is found)
        return transcript(self.speeches[name], token_ids, drawn)

    def episodes(self, rows: Sequence[Row], iteration: int, name: str = "rollout", *, keep: bool = True) -> Episodes:
        """Returns the episodes of a generate call. Raises UserError for a row of an unknown environment.

        name: of its journal.
        keep: whether the journal is kept.
        """
        if self._workers is None:
            self._workers = EnvironmentWorkers(self.spec, self.columns, num=self.num_workers, beat=self.beat)
        by_environment = {id(one): self.speeches[key] for key, one in self.environments.items()}
        return Episodes(
            rows,
            [by_environment[id(chosen(self.environments, row.columns))] for row in rows],
            self._workers,
            Journal((self.journal if keep else None) or tempfile.mkdtemp(dir=_nowhere()), iteration, self.rank, name),
            self.limits,
            seed=self.seed,
            iteration=iteration,
            on_failure=self.on_failure,
        )

    def forget(self, before: int) -> None:
        """Removes the answers of iterations before this one, which a complete checkpoint covers."""
        if self.journal is not None:
            forget(self.journal, before)

    def close(self) -> None:
        """Ends the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


@cache
def _nowhere() -> str:
    """Returns a folder that ends with the process, for runs without a folder of their own."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def row_of(prompt: int, sample: int, group: int, record: Mapping[str, Any], text: str, key: str) -> Row:
    """Returns a row to be drawn.

    prompt: its number in the data set.
    sample, group: see Row.
    record: its columns.
    text: the prompt.
    key: the column of prompts.
    """
    return Row(prompt, sample, group, record, text, conversation_of(record, key), f"prompt {prompt} of the data set")

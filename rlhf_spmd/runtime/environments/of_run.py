"""The environments of a run on one rank: read once, and asked for the episodes of each generate call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import tool_schema
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.runtime.data.messages import conversation_of
from rlhf_spmd.runtime.environments.adapters import chosen, load_environments
from rlhf_spmd.runtime.environments.episode_states import Limits, Row
from rlhf_spmd.runtime.environments.episodes import Episodes
from rlhf_spmd.runtime.environments.renderer import Render, Turn, extending, renderer_of, transcript
from rlhf_spmd.runtime.environments.workers import environment_workers
from rlhf_spmd.runtime.workers.pool import WorkerPool


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
        on_failure: Literal["stop", "drop_group"] = "stop",
        form: str = "",
        drawing: Mapping[str, Any] | None = None,
        num_rows: int = 1,
        max_prompt: int = 0,
        beat: Callable[[], None] = lambda: None,
    ):
        """Loads the environments of a run. Raises UserError for an environment, a tool or a template that cannot be
        used.

        spec, columns: as in load_environments.
        render, stops, template, form: as in renderer_of.
        key: the column of prompts.
        drawing: how the model draws, for agents.
        num_rows, max_prompt: as in Episodes.
        beat: see WorkerPool.
        """
        self.spec, self.columns, self.num_workers, self.limits = spec, list(columns), num_workers, limits
        self.seed, self.key, self.on_failure, self.beat = seed, key, on_failure, beat
        self.run = ""  # its name, for the ids of episodes
        self.environments = load_environments(spec, columns)
        self.num_rows, self.max_prompt = num_rows, max_prompt
        if num_rows > 1 and any(environment.speaks != "agent" for environment in self.environments.values()):
            raise UserError(f"episode.rows={num_rows}: only agents open further rows; drop the option")
        has_agents = any(environment.speaks == "agent" for environment in self.environments.values())
        self.drawing = drawing if has_agents else None
        self.renderers = {
            name: renderer_of(environment, tokenizer, render, stops, template=template, describe=tool_schema, form=form)
            for name, environment in self.environments.items()
        }
        self._workers: WorkerPool | None = None

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
        return transcript(self.renderers[chosen(self.environments, columns).key], token_ids, drawn)

    def episodes(self, rows: Sequence[Row], iteration: int, name: str = "rollout") -> Episodes:
        """Returns the episodes of a generate call. Raises UserError for a row of an unknown environment. name: of the
        call."""
        if self._workers is None:
            how: dict[str, Any] = {"num": self.num_workers, "drawing": self.drawing, "beat": self.beat}
            if self.num_rows > 1:
                how |= {"num_rows": self.num_rows, "extends": extending(self.renderers.values())}
            self._workers = environment_workers(self.spec, self.columns, **how)
        renderers = [self.renderers[chosen(self.environments, row.columns).key] for row in rows]
        how = {"seed": self.seed, "iteration": iteration, "on_failure": self.on_failure}
        how |= {"num_rows": self.num_rows, "max_prompt": self.max_prompt}
        return Episodes(rows, renderers, self._workers, self.limits, name=f"{self.run} {name}", **how)

    def close(self) -> None:
        """Ends the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def row_of(prompt: int, sample: int, group: int, record: Mapping[str, Any], text: str, key: str) -> Row:
    """Returns a row to be drawn.

    prompt: its number in the data set.
    sample, group: see Row.
    record: its columns.
    text: the prompt.
    key: the column of prompts.
    """
    return Row(prompt, sample, group, record, text, conversation_of(record, key), f"prompt {prompt} of the data set")

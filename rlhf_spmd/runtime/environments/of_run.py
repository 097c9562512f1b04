"""The environments of a run on one rank: read once, and asked for the episodes of each generate call."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_spmd.config.options import Config
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import ChatTemplate
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.runtime.data.messages import conversation_of
from rlhf_spmd.runtime.environments.adapters import chosen, load_environments
from rlhf_spmd.runtime.environments.episode_states import Row
from rlhf_spmd.runtime.environments.episodes import Episodes
from rlhf_spmd.runtime.environments.native import ANSWER_ROLES
from rlhf_spmd.runtime.environments.renderer import Turn, extending, renderer_of, transcript
from rlhf_spmd.runtime.environments.workers import environment_workers
from rlhf_spmd.runtime.generation.requests import SAMPLING_KEYS
from rlhf_spmd.runtime.workers.pool import WorkerPool


class RunEnvironments:
    """The environments that `environment` names. Their workers start with the first episodes, so a rank that generates
    nothing has none."""

    def __init__(
        self,
        config: Config,
        columns: Sequence[str],
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        *,
        beat: Callable[[], None] = lambda: None,
    ):
        """Loads the environments of a run. Raises UserError for an environment, a tool or a template that cannot be
        used.

        columns: as in load_environments.
        eos_ids: the tokens that end a turn.
        beat: see WorkerPool.
        """
        self.config, self.columns, self.beat = config, list(columns), beat
        self.key = config.data.key or config.algorithm.prompts
        self.run = ""  # its name, for the ids of episodes
        self.environments = load_environments(config.environment, columns)
        agents = [environment for environment in self.environments.values() if environment.speaks == "agent"]
        if config.episode.rows > 1 and len(agents) < len(self.environments):
            raise UserError(f"episode.rows={config.episode.rows}: only agents open further rows; drop the option")
        self.has_agents = bool(agents)
        folder = config.files().tokenizer
        template = ChatTemplate(folder, config.data.chat_template, started=config.started)
        render = partial(template.render, chat_template_kwargs=config.data.chat_template_kwargs)
        named = config.data.chat_template or folder
        self.renderers = {
            name: renderer_of(environment, tokenizer, render, eos_ids, template=named)
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
        config = self.config
        if self._workers is None:
            drawing = {name: getattr(config.generation, name) for name in SAMPLING_KEYS} if self.has_agents else None
            self._workers = environment_workers(
                config.environment,
                self.columns,
                num=config.environment_workers,
                drawing=drawing,
                num_rows=config.episode.rows,
                extends=extending(self.renderers.values()) if config.episode.rows > 1 else ANSWER_ROLES,
                beat=self.beat,
            )
        renderers = [self.renderers[chosen(self.environments, row.columns).key] for row in rows]
        return Episodes(
            rows,
            renderers,
            self._workers,
            config.episode,
            seed=config.seed,
            iteration=iteration,
            name=f"{self.run} {name}",
            max_prompt=config.data.max_prompt,
        )

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
    return Row(prompt, sample, group, record, text, conversation_of(record, key))

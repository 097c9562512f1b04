"""What one rank has during a run: options, program, prompts, models, and the functions that the algorithm names.

The rows of an iteration form a matrix [M mini-batches, C columns]; a Run works on this rank's columns, which all ranks
of a data-parallel shard hold. One of these ranks counts them for the log (`Layout.reports`).
"""

# M mini-batches, C columns (= mini_batch), G response tokens

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.algorithms.masks import ended
from rlhf_spmd.config.options import Config
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.model.texts.tokenizer import Tokenizer, has_stop
from rlhf_spmd.pages.functions import PageFunction
from rlhf_spmd.plan.calls import ModelCall
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.runtime_words import MASK, actions_of
from rlhf_spmd.plan.workload import Workload
from rlhf_spmd.runtime.data.prompts import PromptSet
from rlhf_spmd.runtime.data.step_order import StepOrder
from rlhf_spmd.runtime.environments.of_run import RunEnvironments
from rlhf_spmd.runtime.execute.iteration import Iteration, Place, mask_of
from rlhf_spmd.runtime.generation.episodes import LAST
from rlhf_spmd.runtime.rewards.response_scores import Scorer
from rlhf_spmd.runtime.weights.rank_models import RankModels
from rlhf_spmd.runtime.world.metric_sums import Meter
from rlhf_spmd.runtime.world.world import World


@dataclass(slots=True)
class RunState:
    """What changes between iterations, the same on every rank. of_algorithm: as the algorithm's file defines it."""

    of_algorithm: Any
    steps: dict[str, int] = field(default_factory=dict)  # optimizer steps per model
    prompts_used: int = 0  # where rows are sampled in rounds: of the data set, in its order, by all batches so far


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's part of an execution: its setup, which is the same on every rank, what this rank has, and the state,
    which alone changes.

    functions: of the calls, by the name that a call gives.
    """

    config: Config
    program: Program
    tokenizer: Tokenizer
    prompts: PromptSet
    eos_ids: tuple[int, ...]  # that end a response
    known: KnownTokens  # that may be drawn, and that all models know
    functions: Mapping[str, PageFunction]

    world: World
    models: RankModels
    scorer: Scorer | None
    columns: Mapping[str, tuple[range, ...]]  # data key -> the columns on this rank

    state: RunState  # before the next iteration

    stream: int | None = None  # of random numbers for the generate call; None: each call has its own
    steps: StepOrder | None = None  # the rows of optimizer steps with a budget of tokens
    environments: RunEnvironments | None = None  # of this rank; None: responses have one turn

    def close(self) -> None:
        """Ends the workers of the environments. A run that an error ends leaves that to the end of the process."""
        if self.environments is not None:
            self.environments.close()

    @property
    def workload(self) -> Workload:
        """Of the program."""
        return self.program.workload

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of generation that every pass applies again."""
        generation = self.config.generation
        return {
            "temperature": generation.temperature,
            "eos_ids": self.eos_ids,
            "min_new_tokens": generation.min_new_tokens,
            "known": self.known,
        }

    @property
    def drawing(self) -> dict[str, Any]:
        """Options of generation; other passes replay the stored sampling support instead of restricting again."""
        generation, adds_adapters = self.config.generation, self.workload.adds_adapters
        restricted = {name: getattr(generation, name) for name in ("top_k", "top_p", "min_p", "stop")}
        return self.sampling | restricted | {"decode": self.tokenizer.decode, "adds_adapters": adds_adapters}

    def layout(self, call: ModelCall) -> Layout:
        """Returns the layout of a call."""
        return self.program.placement.layouts[call.name]

    def micro_batch(self, layout: Layout) -> int:
        """Returns the sequences of a forward pass on one data-parallel shard."""
        return layout.micro_batch or self.workload.micro_batch

    def place(self, run: Run, *, seen: bool = False) -> Place:
        """Returns the rows that a Run computes on this rank, or (seen) that it reads for them: slices of mini-batches
        and of columns."""
        rows, columns = self.program.mini_batches_of(run), self.program.columns_of(run, self.world.rank)
        if seen:
            columns = self.program.columns_seen(run, self.world.rank)
        return slice(rows.start, rows.stop), slice(columns.start, columns.stop)

    def meter(self, call: ModelCall, data: Iteration) -> Meter:
        """Counts rows; discarded if another rank of the same shard reports them."""
        return data.meter if self.layout(call).reports(self.world.rank) else Meter()

    def reduced(self, tensor: Tensor, run: Run, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sums a tensor over the ranks of a Run (or reduces it in another way), in place. Collective over them."""
        if run.group:
            dist.all_reduce(tensor, op=op, group=self.world.group(run.group))
        return tensor

    def ended(self, responses_BG: Tensor) -> Tensor:
        """Returns True where a response ended by itself, False where it was truncated: bool [B]."""
        ended_B, stop = ended(responses_BG, self.eos_ids), self.config.generation.stop
        if stop:
            ended_B |= responses_BG[:, -1] < 0
            for row in torch.nonzero(~ended_B).flatten().tolist():  # its last token may complete a stop text
                ended_B[row] = has_stop(self.tokenizer.decode, responses_BG[row].tolist(), stop)
        return ended_B

    def ended_of(self, rows: Mapping[str, Tensor], key: str) -> Tensor:
        """Returns True where a response ended by itself, or the episode that it is: bool [B].

        rows: by data key.
        """
        actions_BG = rows.get(actions_of(key))
        return self.ended(rows[key]) if actions_BG is None else (actions_BG == LAST).any(-1)

    def masks(self, words: Mapping[str, tuple[str, str]], rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the masks that functions may ask for. words: of algorithm.mask_words; rows: [B, G] by key."""
        return {
            word: mask_of(rows, key) if what == MASK else self.ended_of(rows, key)
            for word, (key, what) in words.items()
        }


def shape_of(place: Place) -> tuple[int, int]:
    """Returns mini-batches and columns of a place."""
    rows, columns = place
    return rows.stop - rows.start, columns.stop - columns.start

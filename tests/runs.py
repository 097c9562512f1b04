"""Runs of the real runtime inside a test process: no run folder, no console, all data at hand after each iteration."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config, make_workload
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.runtime.execute.executor import Executor, next_state
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration
from rlhf_spmd.runtime.execute.job import Job, RunState
from rlhf_spmd.runtime.execute.response_hashes import reported_columns
from rlhf_spmd.runtime.execute.rounds import settle
from rlhf_spmd.runtime.run.metrics import summarize
from rlhf_spmd.runtime.run.prepare import make_iteration, prepare
from rlhf_spmd.runtime.world.devices import RankDevice
from rlhf_spmd.runtime.world.metric_sums import Meter
from rlhf_spmd.runtime.world.trace import Tracer
from rlhf_spmd.strategies import flattening
from tests.trainee import whole_weights


class OneRank:
    """A world of one rank in a process that may be one of many: it does not communicate, and raises every error."""

    rank, size, node, num_nodes, nodes, hosts = 0, 1, 0, 1, (0,), ("here",)
    device, computes = torch.device("cpu"), RankDevice("cpu", None, 1, 1)

    def allgather(self, value, what="", **_):
        return [value]

    def allgather_bytes(self, message, what="", **_):
        return [message]

    def bcast(self, value, root=0, what="", **_):
        return value

    def barrier(self, what="", **_):
        pass

    def agree(self, what, values):
        pass

    def together(self, what):
        return nullcontext()

    def progress(self, position, iteration=-1, place=-1):
        pass

    def will_execute(self, program):
        pass

    def group(self, name):
        raise AssertionError(f"one rank needs no group, but asks for {name!r}")


class StepMeter(Meter):
    """A meter that also keeps the means of every optimizer step apart."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, list[dict[str, float]]] = {"actor": [], "critic": []}
        self._open: dict[str, list[float]] = {}

    def add(self, name: str, total: float, weight: float) -> None:
        super().add(name, total, weight)
        entry = self._open.setdefault(name, [0.0, 0.0])
        entry[0] += float(total)
        entry[1] += float(weight)
        if name in ("actor_lr", "critic_lr"):  # what a step says last
            means = {key: total / weight for key, (total, weight) in self._open.items() if weight}
            self.steps[name.removesuffix("_lr")].append(means)
            self._open = {}


def load(overrides: list[str], *more: str) -> Config:
    """Loads the config of tests/folders.write_all with more overrides."""
    return presets.load("tiny", [*overrides, *more])


def compiled(
    config: Config, num_ranks: int = 1, place: Callable = flattening.place, *, num_nodes: int = 1, **options
) -> Program:
    """Returns the program of some nodes, which the ranks of one machine can run as well. A config of float64, which no
    user can ask for, counts bytes as float32."""
    known = config if config.dtype != "float64" else dataclasses.replace(config, dtype="float32")
    workload, cluster = make_workload(known), Cluster.parse(f"{num_nodes}x{num_ranks // num_nodes}")
    return compile_program(workload, place(workload, cluster, **options), cluster)


class RunOf:
    """A run, executed iteration by iteration as in runtime/run/train.py."""

    def __init__(self, config: Config, world=None, program: Program | None = None):
        self.config, self.world = config, world or OneRank()
        self.program = program or compiled(config)
        self.prepared = prepare(config, self.program, self.world)
        self.use(self.prepared.job)
        self.number = 0
        self.data: Iteration | None = None  # of the last iteration
        self.meter = StepMeter()  # of the last iteration
        self.responses: list[dict[tuple[int, int], list[int]]] = []  # per iteration: (prompt, sample) -> tokens

    @property
    def state(self) -> RunState:
        return self.job.state

    def use(self, job: Job) -> None:
        """Goes on with another job."""
        self.job, self.executor = job, Executor(job, Tracer())

    def iteration(self) -> dict:
        """Runs one iteration and returns its metrics."""
        self.data, self.meter = make_iteration(self.job, self.number, self.data), StepMeter()
        self.data.meter = self.meter
        answers = self.executor.iteration(self.data)
        if self.program.chains:  # drained after each
            answers = self.executor.iteration(None, self.data)
        settle(self.job, self.data)
        self.responses.append(self._responses())
        metrics = summarize(self.job, answers, self.state.of_algorithm)
        self.state.of_algorithm = next_state(self.job, self.state.of_algorithm, answers)
        self.number += 1
        return metrics

    def _responses(self) -> dict[tuple[int, int], list[int]]:
        """Returns the responses of the last iteration, gathered from the ranks that generated them, if any did."""
        if not self.program.workload.workflow.generate_calls:
            return {}
        call = self.program.workload.workflow.generate_calls[0]
        columns, mine = reported_columns(self.program, call, self.world.rank), []
        if columns.start < columns.stop:
            rows = self.data.store.at("responses", (ALL, columns)).flatten(0, 1).tolist()
            places = (matrix[:, columns].flatten().tolist() for matrix in (self.data.prompt_MC, self.data.sample_MC))
            mine = [(*place, [t for t in row if t >= 0]) for *place, row in zip(*places, rows, strict=True)]
        everyone = self.world.allgather(mine, "the responses")
        return {(prompt, sample): tokens for rows in everyone for prompt, sample, tokens in rows}

    def iterations(self) -> list[dict]:
        """Runs all iterations of the config and returns their metrics."""
        return [self.iteration() for _ in range(self.config.iterations)]

    def weights(self, model: str) -> dict[str, Tensor]:
        """Returns a copy of a trained model's weights; on ranks that do not train it, nothing."""
        if model not in self.job.models.engines:
            return {}
        return whole_weights(self.job.models.engines[model])

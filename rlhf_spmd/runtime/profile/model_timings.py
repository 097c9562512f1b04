"""Measures a model shape for the profile subcommand: passes, decode steps and updates, with one layer and with three.

The difference is the time of two layers; the rest of the first measurement is everything else: embedding, head, the
interpreter. The runtime's own code is timed: packing, forward, losses, the generation engine, the flat engine's update.
"""

# B sequences, P prompt tokens, G response tokens, K tokens of a sampling support

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.config.model_folders import model_config_of
from rlhf_spmd.config.options import Config
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.model.sequences import forward
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.calls import Train
from rlhf_spmd.plan.cluster import Cluster, Node
from rlhf_spmd.plan.cost.calibration import ByLength, Curve, Layered, Measured
from rlhf_spmd.plan.cost.seconds import decode_steps
from rlhf_spmd.plan.layout import Layout, group_name
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.program.instructions import Program, Run
from rlhf_spmd.plan.runtime_words import LOGPROBS, VALUES, actions_of
from rlhf_spmd.plan.workload import ModelShape, Workload
from rlhf_spmd.runtime.engines.adamw import EngineOptions
from rlhf_spmd.runtime.engines.flat_engine import Groups
from rlhf_spmd.runtime.engines.train_engine import TrainEngine, make_engine
from rlhf_spmd.runtime.execute.iteration import Iteration, Rows, Store, sequences_of
from rlhf_spmd.runtime.execute.job import Job, RunState
from rlhf_spmd.runtime.execute.optimizer_step import OptimizerStep
from rlhf_spmd.runtime.execute.page_functions import read_output
from rlhf_spmd.runtime.generation.engine import Engine
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.profile.clock import Clock
from rlhf_spmd.runtime.profile.measured_sizes import Grid, rows_up_to
from rlhf_spmd.runtime.weights.rank_models import DTYPES
from rlhf_spmd.runtime.world.world import World

FEW, MANY = 1, 3  # layers of the measured models
Points = dict[float, tuple[float, ...]]  # amount -> seconds with few and with many layers


class TimedModel:
    """A model of a given shape and number of layers, with the passes to time. tp adjacent ranks hold a copy."""

    def __init__(
        self, world: World, config: Config, workload: Workload, grid: Grid, shape: ModelShape, tp: int, num: int
    ):
        """num: number of layers."""
        self.world, self.config, self.workload, self.grid, self.shape = world, config, workload, grid, shape
        ranks = tuple(range(world.rank // tp * tp, world.rank // tp * tp + tp))
        self.layout = Layout.grid_of(ranks, tp=tp)
        self.group = world.group(group_name(ranks)) if tp > 1 else None
        self.model = Transformer(
            model_config_of(shape, num, grid.longest + 1),
            head="scalar" if shape.scalar_head else "lm",
            dtype=DTYPES[config.dtype],
            device=world.device,
            parallel=Parallel(self.layout.shard(world.rank), group=self.group),
        )
        self.num_params = sum(weight.numel() for weight in self.model.parameters())
        self.generating: Engine | None = None  # kept from one timing to the next, with what it has captured
        workflow, head = workload.workflow, "scalar" if shape.scalar_head else "lm"
        self.call = next(call for call in workflow.train_calls if workflow.heads[call.model] == head)
        routed = {self.call.model: replace(shape, num_layers=MANY)}  # rows have routes of so many layers
        workload = replace(workload, models={**workload.models, **routed}, counted=frozenset())
        self.job = _job_of(world, config, workload, self.call, self.layout, shape.vocab_size)

    def rows(self, lengths: Sequence[tuple[int, int]]) -> Rows:
        """Returns the inputs of a call, for sequences with prompts and responses of these lengths. A call that reads
        pairs gets half as many rows."""
        device, pairs = self.world.device, self.call.num_sequences
        num_prompts, num_responses = zip(*lengths[: max(1, len(lengths) // pairs)], strict=True)
        responses_BG = self.tokens(num_responses)
        num_rows, width = responses_BG.shape
        shapes = {"token": (num_rows, width), "token+1": (num_rows, width + 1), "row": (num_rows,)}
        rows = {self.call.prompts: self.tokens(num_prompts)} | dict.fromkeys(self.call.responses, responses_BG)
        for key in self.call.inputs:
            kind = self.workload.workflow.shapes[key]
            if kind == "kept":
                others_K = torch.arange(self.config.generation.top_k, device=device)
                kept_BGK = (responses_BG[..., None] + others_K) % self.shape.vocab_size
                rows[key] = torch.where(responses_BG[..., None] < 0, -1, kept_BGK).int()
            elif key in map(actions_of, self.call.responses):  # of episodes: all tokens are drawn
                rows[key] = (responses_BG >= 0).float()
            elif kind == "routes":
                if not self.shape.num_experts:
                    continue  # a dense model stands for a mixture
                # a model with few layers takes the routes of the first ones
                size = num_rows, self.grid.longest, MANY, self.shape.experts_per_token
                chosen = torch.rand(*size[:3], self.shape.num_experts).topk(size[3]).indices.sort().values
                rows[key] = chosen.to(device, torch.uint8)
            elif key not in rows:
                counts = key in (self.call.only, self.call.divisor)  # without them a step has nothing to do
                rows[key] = torch.full(shapes[kind], float(counts), device=device)
        return rows

    def tokens(self, lengths: Sequence[int]) -> Tensor:
        """Returns random rows of tokens, padded with -1 on the right. Rows differ, because the engine computes equal
        prompts only once."""
        size = len(lengths), max(lengths)
        tokens = torch.randint(self.shape.vocab_size, size, generator=torch.Generator().manual_seed(0))
        real = torch.arange(size[1]) < torch.tensor(lengths)[:, None]
        return torch.where(real, tokens, -1).to(self.world.device)

    @torch.no_grad()
    def infer(self, rows: Rows) -> None:
        """Runs one micro-batch of an inference call."""
        batch, kept = sequences_of(self.call, rows), rows[self.call.kept] if self.call.kept else None
        what = VALUES if self.shape.scalar_head else LOGPROBS
        read_output(self.job, self.model, batch, forward(self.model, batch), [what], kept)

    def train(self, engine: TrainEngine, rows: Rows, *, update: bool = False) -> None:
        """Runs the passes of one micro-batch, whose gradients add up; or only begins and updates."""
        group = group_name(self.layout.ranks) if self.group is not None else None
        run = Run(self.call.name, group, mini_batch=0, epoch=1)  # not epoch 0, which compares logprobs
        num, program = len(rows[self.call.prompts]), self.job.program
        workload = replace(program.workload, mini_batch=num, micro_batch=num)
        job = replace(self.job, program=replace(program, workload=workload))
        data = Iteration.of_rows(0, 0, np.zeros((1, num), int), Store(workload, {}, self.world.device))
        step = OptimizerStep(job, self.call, run, engine, rows, 1e-9, data)
        if update:
            engine.begin()
            step.log(engine.update(lr=step.rate))
            return
        step.forward(0)
        step.backward(0)

    def generate(self, prompts_BP: Tensor, num_tokens: Sequence[int]) -> None:
        """Generates responses with these numbers of tokens."""
        prompts = [[token for token in row if token >= 0] for row in prompts_BP.tolist()]
        num_rows, options = len(prompts), self.config.generation
        limits = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        if self.generating is None or self.generating.scheduler.max_rows != num_rows:
            self.generating = None  # frees its cache first
            self.generating = Engine(
                self.model, longest=self.grid.longest + 1, max_sequences=num_rows, num_stored=options.top_k
            )
        engine = self.generating
        sampling = [Sampling(number, **limits) for number in num_tokens]
        # which tokens are drawn does not matter
        bits_RG = torch.zeros(num_rows, max(num_tokens), dtype=torch.int64, device=self.world.device)
        numbers = engine.submit(prompts, bits_RG, sampling)
        engine.run(numbers)
        engine.results(numbers)
        engine.requests.forget(numbers.stop)

    def engine(self) -> TrainEngine:
        """Makes a train engine, which takes over the model, and begins a step."""
        self.generating = None
        tp_index = self.layout.shard(self.world.rank).tp_index
        groups = Groups(tensor=self.group, model=self.group, tp_index=tp_index)
        options = EngineOptions(0, DTYPES[self.config.dtype])
        engine = make_engine(self.model.train(), groups=groups, options=options)
        engine.begin()
        return engine


def _job_of(world: World, config: Config, workload: Workload, call: Train, layout: Layout, num_tokens: int) -> Job:
    """Returns what a readout and an optimizer step of one call need of a job: neither prompts nor models of a run."""
    nothing: Any = None
    return Job(
        replace(config, generation=replace(config.generation, min_new_tokens=0, stop=())),
        Program(workload, Placement({call.name: layout}), Cluster((Node(world.size),)), {}, (), ()),
        tokenizer=nothing,
        prompts=nothing,
        eos_ids=(),
        known=KnownTokens(num_tokens),
        functions=config.algorithm.functions(workload.workflow),
        world=world,
        models=nothing,
        scorer=None,
        state=RunState(config.algorithm.initial_state(config.options)),
        columns={},
    )


def measure_shape(clock: Clock, config: Config, workload: Workload, grid: Grid, shape: ModelShape, tp: int) -> Measured:
    """Measures the tables of a shape in tp slices. Collective over all ranks."""
    few, many = both = tuple(TimedModel(clock.world, config, workload, grid, shape, tp, num) for num in (FEW, MANY))
    # in tensor-parallel passes, the ranks of a node wait for each other
    seconds = partial(clock.seconds, together=clock.world.nodes.count(clock.world.node) if tp > 1 else 0)
    drawn = {} if shape.scalar_head else generation(seconds, grid, both)
    passes = [
        (share, grid.rows(share, num_rows))
        for share in grid.shares
        for num_rows in rows_up_to(round(grid.most_rows / share))
    ]

    def table(works: Callable[[dict[str, Tensor]], list[Callable]]) -> ByLength:
        """Measures the seconds of passes, up to the tokens of the largest micro-batch.

        works: of both models, for some rows.
        """
        points: dict[float, Points] = {}
        for share, lengths in passes:
            points.setdefault(share, {})[float(sum(map(sum, lengths)))] = seconds(*works(few.rows(lengths)))
        return by_length(points, grid.longest)

    infer = table(lambda rows: [partial(one.infer, rows) for one in both])
    engines = [one.engine() for one in both]
    train = table(lambda rows: [partial(one.train, engine, rows) for one, engine in zip(both, engines, strict=True)])
    rows = few.rows(passes[-1][1])
    works = (partial(one.train, engine, rows, update=True) for one, engine in zip(both, engines, strict=True))
    update_s, more_update_s = seconds(*works)
    update = Curve((float(few.num_params), float(many.num_params)), (update_s, max(update_s, more_update_s)))
    return Measured(shape, tp, workload.param_bytes, infer, train, update, **drawn)


def generation(seconds: Callable[..., tuple[float, ...]], grid: Grid, both: tuple[TimedModel, ...]) -> dict:
    """Measures tables of a pass over prompts, by length and tokens; of a decode step, by rows; of the extra time of a
    step in which rows end."""
    prefill: dict[float, Points] = {}
    for share in grid.shares:
        for num_rows in rows_up_to(grid.most_places):
            num_prompts = [prompt for prompt, _ in grid.rows(share, num_rows)]
            works = (partial(one.generate, both[0].tokens(num_prompts), [1] * num_rows) for one in both)
            prefill.setdefault(share, {})[float(sum(num_prompts))] = seconds(*works)
    steps: Points = {}
    ends: dict[float, float] = {}
    most = max(grid.max_response, 2)
    for num_rows, first_s in zip(rows_up_to(grid.most_places), prefill[grid.shares[0]].values(), strict=True):
        lengths = grid.rows(grid.shares[0], num_rows)
        prompts_BP, staggered = both[0].tokens([prompt for prompt, _ in lengths]), [response for _, response in lengths]
        whole_s = seconds(*(partial(one.generate, prompts_BP, [most] * num_rows) for one in both))
        pairs = zip(whole_s, first_s, strict=True)
        steps[float(num_rows)] = tuple(max(0.0, all_s - one_s) / (most - 1) for all_s, one_s in pairs)
        staggered_s = seconds(*(partial(one.generate, prompts_BP, staggered) for one in both))
        done = list(decode_steps([response - 1 for response in staggered], num_rows))
        curves = [Curve(tuple(steps), tuple(s[i] for s in steps.values())) for i in range(2)] if len(steps) > 1 else []
        extra_s = [
            staggered_s[i] - first_s[i] - sum(num * curve.at(active) for num, active, _ in done)
            for i, curve in enumerate(curves)
        ]
        ends[float(num_rows)] = max(0.0, sum(extra_s) / len(extra_s) / len(done)) if extra_s else 0.0
    ends_curve = Curve(tuple(ends), tuple(ends.values()))
    return {"prefill": by_length(prefill, grid.max_prompt), "decode": layered(steps), "ends": ends_curve}


def by_length(by_share: dict[float, Points], longest: int) -> ByLength:
    """Returns tables over tokens, for each mean length."""
    return ByLength(tuple(share * longest for share in by_share), tuple(map(layered, by_share.values())))


def layered(points: Points) -> Layered:
    """Returns the time per layer: the difference of the two models, divided by the difference of their layers; and the
    rest."""
    layer = {amount: max(0.0, many_s - few_s) / (MANY - FEW) for amount, (few_s, many_s) in points.items()}
    rest = {amount: max(0.0, few_s - FEW * layer[amount]) for amount, (few_s, _) in points.items()}
    return Layered(*(Curve(tuple(part), tuple(part.values())) for part in (layer, rest)))

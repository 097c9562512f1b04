"""A run that draws one iteration ahead has the numbers of one rank whose weights are late when they draw.

    python tests/run_mpi.py 2 4 5 8 -- tests/mpi/test_ahead.py

The twin on one rank has no step that works on two batches: it is an ordinary run, in which every call that draws gets
the weights with which the iteration before it began.
"""

import dataclasses
from unittest.mock import patch

import pytest
import torch

from rlhf_spmd.config import presets
from rlhf_spmd.plan.calls import ModelCall, trains
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.runtime.execute.executor import Executor, next_state
from rlhf_spmd.runtime.execute.rounds import settle
from rlhf_spmd.runtime.run.loop import Loop
from rlhf_spmd.runtime.run.metrics import summarize
from rlhf_spmd.runtime.world.trace import Tracer
from rlhf_spmd.strategies import separation
from tests.folders import write_all
from tests.mpi.test_invariance import NOT_COMPARED, TOLERANCE, error, load_run, save_run, weights_of, with_groups
from tests.programs import errors
from tests.runs import RunOf, compiled

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
OTHERS = NOT_COMPARED
OPTIONS = {
    "ppo": ("ppo.epochs=2", "ppo.kl_controller=adaptive", "optimizer.critic_lr=1e-3"),
    "recompute": ("ppo.old_logprobs=recompute", "ppo.normalize_scores=true", "ppo.whiten=batch"),
    "current": ("ppo.old_logprobs=current", "ppo.importance_weights=token", "ppo.importance_cap=none", "ppo.epochs=2"),
    "grpo": (
        *("grpo.old_logprobs=loglinear", "grpo.importance_weights=token", "grpo.rejection=token", "grpo.epochs=2"),
        *("grpo.kl_coef=0.05", "samples_per_prompt=4", "rollout_batch=6"),
    ),
    "rounds": (
        *("grpo.rounds=3", "grpo.drop_equal_groups=true", "generation.temperature=0.1", "samples_per_prompt=2"),
        *("rollout_batch=12", "optimizer.actor_lr=3e-4"),
    ),
    "partial": (
        *("ppo.old_logprobs=current", "ppo.importance_weights=token", "ppo.importance_cap=none", "partial_steps=3"),
        *("generation.top_k=15", "generation.min_new_tokens=2", "ppo.epochs=2"),
    ),
    "partial groups": (
        *("grpo.kl_coef=0.05", "samples_per_prompt=2", "rollout_batch=12", "partial_steps=4", "grpo.scale=batch"),
        *("generation.stop=ba", "grpo.overlong=mask"),
    ),
    # each iteration makes some of its steps
    "stopped": (
        *("ppo.old_logprobs=loglinear", "ppo.importance_weights=token", "ppo.importance_cap=none", "ppo.epochs=2"),
        "ppo.kl_early_stop=1e-3",
    ),
}


def sliced(workload, cluster) -> Placement:
    """Returns training on the first rank, generation in two slices on the last two, all else on what is left."""
    last, rest = cluster.ranks[-2:], cluster.ranks[1:-2] or cluster.ranks[-1:]
    layouts = {call.name: Layout.data_parallel(rest) for call in workload.workflow.placed_calls}
    for call in workload.workflow.placed_calls:
        if trains(call, workload.workflow):
            layouts[call.name] = Layout.data_parallel(cluster.ranks[:1])
    return Placement(layouts | {"actor_generate": Layout.grid_of(last, tp=2)}, ahead=1)


def halves(workload, cluster) -> Placement:
    return separation.place(workload, cluster, ahead=1)


CASES = [pytest.param(halves, case, marks=pytest.mark.rotates, id=f"halves-{case}") for case in OPTIONS]
CASES += [
    pytest.param(sliced, case, marks=pytest.mark.ranks(4), id=f"sliced-{case}")
    for case in ("ppo", "grpo", "rounds", "partial")
]


class LateExecutor(Executor):
    """Gives draws the weights with which the iteration before this one began."""

    late = now = None
    made = 0  # steps of the actor before this iteration

    def iteration(self, data, before=None):
        engines = self.job.models.engines
        weights = {role: [w.detach().clone() for w in engine.model.parameters()] for role, engine in engines.items()}
        data.lag = int(self.now is not None)
        made, self.made = self.made, engines["actor"].optimizer_state()[0]
        data.before = {"actor_steps_made": (self.made - made) / (data.source_EMC.shape[0] * data.source_EMC.shape[1])}
        self.late, self.now = self.now or weights, weights
        return super().iteration(data)

    def run(self, run, data):
        call = self.program.workload.workflow.call(run.call)
        engine = self.job.models.engines.get(call.model) if isinstance(call, ModelCall) else None
        if engine is None or trains(call, self.program.workload.workflow):
            return super().run(run, data)
        self._set(engine, self.late[call.model])
        rest = super().run(run, data)
        assert rest is None
        self._set(engine, self.now[call.model])
        return None

    def _set(self, engine, weights):
        with torch.no_grad():
            for mine, given in zip(engine.model.parameters(), weights, strict=True):
                mine.copy_(given)


class Twin(RunOf):
    def __init__(self, config):
        with patch("rlhf_spmd.plan.program.compile.validate"):  # which refuses loglinear without a lag
            super().__init__(dataclasses.replace(config, parity_tolerance=100.0))
        self.executor = LateExecutor(self.job, Tracer())


class Ahead(RunOf):
    def __init__(self, config, world, program):
        super().__init__(config, world, program)
        self.history = []
        self.loop = Loop(self.job, Executor(self.job, Tracer()), self.history)

    def iteration(self):
        self.data = self.loop.begin(self.number)
        answers = self.loop.executor.iteration(self.loop.in_flight, self.data)
        settle(self.job, self.loop.in_flight)
        self.responses.append(self._responses())
        self.history.append(summarize(self.job, answers, self.state.of_algorithm))
        self.state.of_algorithm = next_state(self.job, self.state.of_algorithm, answers)
        self.number += 1
        return self.history[-1]


@pytest.fixture(scope="module")
def overrides(written):
    return written(write_all)


def config_of(overrides, case: str):
    is_ppo = not OPTIONS[case][0].startswith("grpo.")
    words = [word for word in overrides if is_ppo or not word.startswith(("ppo.", "models.critic", "optimizer.critic"))]
    sizes = ["iterations=4", "rollout_batch=24", "mini_batch=12", "micro_batch=4", "optimizer.actor_lr=1e-3"]
    return presets.load("tiny", [*words, *sizes, *OPTIONS[case]], algorithm="ppo" if is_ppo else "grpo")


@pytest.fixture(scope="module")
def alone(overrides, made_once):
    """Returns metrics and weights of the twin of each case."""

    def make(case, path):
        run = Twin(config_of(overrides, case))
        save_run(path, run.iterations(), weights_of(run))

    runs = made_once(sorted(OPTIONS), make)
    return {case: load_run(runs / case) for case in OPTIONS}


@pytest.mark.parametrize(("place", "case"), CASES)
def test_equals_the_twin_on_one_rank(place, case, world, overrides, alone, make_group):
    config = config_of(overrides, case)
    program = compiled(config, world.size, place)
    assert errors(program) == []
    run = Ahead(config, with_groups(world, program, make_group), program)
    history = run.iterations()
    expected, weights = alone[case]
    for mine, theirs in zip(history, expected, strict=True):
        assert mine["tokens_sha256"] == theirs["tokens_sha256"]
        for name in theirs.keys() - {*OTHERS, "tokens_sha256"}:
            assert error(mine[name], theirs[name]) <= TOLERANCE, name
        assert mine.keys() >= {"lag_mean_abs"} or config.partial_steps  # no response of the first mini-batch has ended
        # which is with late weights there
        assert error(mine.get("lag_mean_abs", 0.0), theirs.get("parity_mean_abs", 0.0)) <= 1e-4
        assert mine["parity_max_abs"] <= 1e-4  # by the weights that drew
    if config.partial_steps:
        assert [one.get("lag") for one in history] == [one.get("lag") for one in expected]
        assert max(one.get("lag", 0) for one in history) > 1 and min(one["held_groups"] for one in history) < 1
    else:
        assert [one["lag"] for one in history] == [0, 1, 1, 1]
        assert history[0]["lag_max_abs"] <= 1e-4 < history[2]["lag_max_abs"]
    spans = [span for span in run.loop.executor.recorder.spans if span[1] == "compute"]
    trained = {span[0] for span in spans if "iteration" not in span[5]}
    drawn = {(span[0], span[4], span[5]["iteration"]) for span in spans if "iteration" in span[5]}
    assert not {name for name in trained if name.endswith(("_generate", "reference_infer", "_parity"))}
    assert {(step, iteration) for _, step, iteration in drawn} <= {(0, 0), (0, 1), (1, 2), (2, 3)}
    assert not any(name.endswith("_train") for name, *_ in drawn)
    for name, weight in weights_of(run).items():
        assert torch.allclose(weight, weights[name], rtol=0, atol=2e-5), name
    if case == "stopped":
        assert 0 < min(one["actor_steps_made"] for one in history) < 1


def test_a_lag_stops_no_steps(world, overrides, make_group):
    """An early stop measures from the policy with which training begins: the first step measures nothing, however far
    the generator is, and the second one stops by what the first one changed."""
    config = config_of([*overrides, "ppo.kl_early_stop=1e-9"], "ppo")
    program = compiled(config, world.size, halves)
    history = Ahead(config, with_groups(world, program, make_group), program).iterations()
    assert [one["actor_steps_made"] for one in history] == [2 / 4] * 4
    assert min(one["lag_mean_abs"] for one in history[1:]) > 1e-3

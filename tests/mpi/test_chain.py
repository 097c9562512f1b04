"""A run whose iterations follow one another without a meeting has the bits of one whose iterations all end with one.

python tests/run_mpi.py 2 4 5 8 -- tests/mpi/test_chain.py
"""

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import Config
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.runtime.execute.executor import Executor
from rlhf_spmd.runtime.run.chain import Chain
from rlhf_spmd.runtime.world.reports import Reports
from rlhf_spmd.runtime.world.trace import Tracer
from rlhf_spmd.strategies import separation
from tests.folders import given_rows, write_all
from tests.mpi.test_invariance import apart, scattered, trained_on_halves, weights_of, with_groups
from tests.runs import RunOf, compiled

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
TIMED = ("iteration_s", "generate_s", "gen_tokens_per_s", "tflops", "peak_bytes")
NUM = 4  # iterations, of which the first and the last are drained
OPTIONS = {
    "ppo": ("ppo.epochs=2", "optimizer.critic_lr=1e-3"),
    "state": ("ppo.kl_controller=adaptive", "ppo.normalize_scores=true", "ppo.normalize_values=true"),
    "whole": ("ppo.whiten=batch", "ppo.kl_controller=adaptive", "ppo.old_logprobs=recompute", "ppo.epochs=2"),
    "stopped": ("ppo.kl_early_stop=1e-3", "ppo.epochs=2"),
    "grpo": ("grpo.epochs=2", "grpo.kl_coef=0.05", "samples_per_prompt=4", "rollout_batch=4"),
    "remax": (),
    "rloo": ("samples_per_prompt=4", "rollout_batch=4"),
    "reinforce_plus_plus": ("samples_per_prompt=4", "rollout_batch=4"),
    "distill": ("models.teacher=ACTOR",),
    "dpo": ("dpo.epochs=2", "data.prompts=PAIRS", "generation.max_new_tokens=7"),
}
ALGORITHMS = ("grpo", "remax", "rloo", "reinforce_plus_plus", "distill", "dpo")  # of the cases of these names


def halves(workload, cluster) -> Placement:
    """Returns each model, its calls and training, on a half; actor and reference on the first."""
    ranks = cluster.ranks
    half = {"actor": ranks[: len(ranks) // 2], "reference": ranks[: len(ranks) // 2]}
    other = ranks[len(ranks) // 2 :]
    layouts = {call.name: Layout.data_parallel(half.get(call.model, other)) for call in workload.workflow.placed_calls}
    return Placement(layouts)


def beside(workload, cluster) -> Placement:
    """Returns generation beside the critic's training, all else on all ranks, as the planner often has it."""
    ranks, half = cluster.ranks, len(cluster.ranks) // 2
    apart = {"actor_generate": ranks[:half], "critic_train": ranks[half:]}
    calls = workload.workflow.placed_calls
    return Placement({call.name: Layout.data_parallel(apart.get(call.name, ranks)) for call in calls})


def sliced(workload, cluster) -> Placement:
    """Returns training in two stages, generation in two slices, with a copy of the critic beside the actor's."""
    return separation.place(workload, cluster, training_pp=2, generation_tp=2, ratios=("actor=1", "critic=1"))


PLACEMENTS = {
    "separation": separation.place,
    "separation 1": lambda workload, cluster: separation.place(workload, cluster, generation_ranks=1, in_flight=1),
    "apart": apart,
    "halves": halves,
    "beside": beside,
    "trained on halves": trained_on_halves,
    "scattered": scattered,
    "sliced": sliced,
}
CASES = [("separation", case) for case in OPTIONS]
CASES += [("separation 1", "state"), ("apart", "ppo"), ("halves", "state"), ("halves", "ppo"), ("beside", "state")]
CASES += [("trained on halves", "state"), ("scattered", "ppo"), ("scattered", "whole")]
MORE = [("separation", "rloo"), ("separation", "reinforce_plus_plus"), ("separation 1", "state")]
# of the same: others have their calls or their placement
MORE += [("halves", "ppo"), ("halves", "state"), ("scattered", "ppo")]


class Chained(RunOf):
    """A run whose chain is drained after the first iteration and at the end."""

    def iterations(self):
        history = []
        self.executor = Executor(self.job, Tracer())
        chain = Chain(self.job, self.executor, history, is_due=lambda num: num in (1, self.config.iterations))
        self.drained = [done.number for done in chain.iterations() if done.is_drained]
        return history


@pytest.fixture(scope="module")
def overrides(written):
    def write(folder: Path) -> list[str]:
        lines = "".join(json.dumps(row) + "\n" for row in given_rows(60))
        (folder / "pairs.jsonl").write_text(lines, encoding="utf-8")
        return write_all(folder)

    return written(write)


def config_of(folder: Path, overrides: list[str], case: str) -> Config:
    """Returns the options of a case of OPTIONS."""
    algorithm = case if case in ALGORITHMS else "ppo"
    common = (f"iterations={NUM}", "generation.max_new_tokens=6", "rollout_batch=16", "mini_batch=8", "micro_batch=2")
    foreign = () if algorithm == "ppo" else ("ppo.", "models.critic", "optimizer.critic")
    foreign += ("models.reward",) if algorithm in ("distill", "dpo") else ()
    words = [*(word for word in overrides if not word.startswith(foreign)), *common, *OPTIONS[case]]
    words = [
        word.replace("ACTOR", f"{folder / 'actor'}").replace("PAIRS", f"{folder / 'pairs.jsonl'}") for word in words
    ]
    return presets.load("tiny", words, algorithm=algorithm)


@pytest.mark.parametrize(
    ("placement", "case"),
    [
        *(
            pytest.param(*case, id="-".join(case), marks=[pytest.mark.rotates, *[pytest.mark.slow] * (case in MORE)])
            for case in CASES
        ),
        pytest.param("sliced", "state", id="sliced-state", marks=pytest.mark.ranks(4)),
    ],
)
def test_a_chain_has_the_bits_of_iterations_that_end_with_a_meeting(
    placement, case, world, shared_folder, overrides, make_group
):
    config = config_of(shared_folder, overrides, case)

    def place(workload, cluster, *, chain: bool) -> Placement:
        return dataclasses.replace(PLACEMENTS[placement](workload, cluster), chain=chain)

    runs = []
    for kind, chain in ((RunOf, False), (Chained, True)):
        program = compiled(config, world.size, place, chain=chain)
        assert program.chains == chain
        run = kind(config, with_groups(world, program, make_group), program)
        runs.append((run.iterations(), weights_of(run), run.state, run))
    (history, weights, state, _), (of_chain, chained, chained_state, run) = runs
    assert run.drained == [0, NUM - 1]
    assert [{name: value for name, value in row.items() if name not in TIMED} for row in of_chain] == [
        {name: value for name, value in row.items() if name not in TIMED} for row in history
    ]
    assert chained.keys() == weights.keys()
    assert all(torch.equal(weight, chained[name]) for name, weight in weights.items())
    assert (chained_state.of_algorithm, chained_state.steps) == (state.of_algorithm, state.steps)


def test_a_long_report_of_a_rank_that_computes_holds_up_nobody(world, shared_folder):
    reports, asked = Reports(world.messages()), shared_folder / "asked"
    reports.send(0, bytes(10_000_000))
    if world.rank == 0:
        found = reports.arrived(0)  # others do nothing in MPI until this has returned
        asked.touch()
        reports.tell(True)
        found = found or reports.all_of(0)
        assert [len(report) for report in found] == [10_000_000] * world.size
    else:
        while not asked.exists():
            time.sleep(0.01)
    assert reports.told()
    reports.finish()
    assert reports.merge(range(world.size), [world.rank], lambda values: sum(values, [])) == list(range(world.size))

"""Episodes of several turns on several ranks: the tokens and rewards of the run on one rank, whatever the placement,
and the same bits of weights however late answers come."""

from functools import partial

import pytest
import torch

from rlhf_spmd.model.parallel import Parallel
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.runtime.generation.episodes import Answer
from rlhf_spmd.runtime.generation.shared_episodes import HEADER, SIZE, SharedEpisodes
from rlhf_spmd.strategies import flattening, separation
from tests.folders import write_all
from tests.mpi.test_invariance import TOLERANCE, error, with_groups
from tests.programs import errors
from tests.runs import RunOf, compiled, load
from tests.unit.runtime.execute.test_episodes import EOS_IDS, OPTIONS, a_run
from tests.unit.runtime.generation.test_episodes import Scripted

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]


def sliced(workload, cluster, **grid: int) -> Placement:
    """Returns generation on all ranks, all else in two slices or stages where the ranks are even."""
    ranks = cluster.ranks
    if len(ranks) % 2:
        return flattening.place(workload, cluster)
    calls = {call.name: Layout.grid_of(ranks, **(grid or {"tp": 2})) for call in workload.workflow.placed_calls}
    whole = {call.name: Layout.data_parallel(ranks) for call in workload.workflow.generate_calls}
    judges = {name: Layout.data_parallel(ranks) for name in calls if name.startswith("reward")}  # a function
    return Placement(calls | whole | judges)


def staged(workload, cluster) -> Placement:
    """Returns the same with two stages and, where there are ranks enough, two slices of each."""
    return sliced(workload, cluster, pp=2, tp=2 if len(cluster.ranks) % 4 == 0 else 1)


def parted(workload, cluster, **grid: int) -> Placement:
    """Returns one grid for all calls with weights, as flattening has it with slices: several ranks draw a row."""
    placement, layout = sliced(workload, cluster, **grid), Layout.grid_of(cluster.ranks, **grid)
    return Placement(placement.layouts | {call.name: layout for call in workload.workflow.generate_calls})


PLACES = {
    "flattening": flattening.place,
    "separation": separation.place,
    "sliced": sliced,
    "staged": staged,
    "flattening in slices": partial(parted, tp=2),
    "flattening in stages": partial(parted, pp=2),
    "flattening in both": partial(parted, pp=2, tp=2),
    "separation in slices": partial(separation.place, generation_tp=2),
    "separation in stages": partial(separation.place, generation_pp=2, training_tp=2),
    "separation in both": partial(separation.place, generation_pp=2, generation_tp=2),
}
LEAST_RANKS = {"flattening in both": 4, "separation in slices": 4, "separation in stages": 4, "separation in both": 8}
# at so many ranks in `make test`; the others at four
AT_TWO, AT_BOTH = ("flattening", "separation", "flattening in slices", "flattening in stages"), ("staged",)


def marks_of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.slow_at(*() if name in AT_BOTH else (4,) if name in AT_TWO else (2,))


@pytest.fixture(scope="module")
def alone(world, shared_folder):
    """Returns the options of a run, and its metrics and responses on one rank."""
    if world.rank:
        return world.bcast(None, what="the run on one rank")
    words = write_all(shared_folder, eos_token_ids=EOS_IDS)
    run = a_run(words, seed=0, latest=3)
    return world.bcast((words, run.iterations(), said_by(run)), what="the run on one rank")


def said_by(run: RunOf) -> str:
    """Returns the responses of all iterations, as text."""
    return repr([sorted(responses.items()) for responses in run.responses])


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in PLACES])
def test_episodes_are_those_of_one_rank(name, world, alone, make_group):
    place = PLACES[name]
    if " in " in name and (world.size < LEAST_RANKS.get(name, 2) or world.size % 2):
        pytest.skip("not on so many ranks")
    words, expected, responses = alone
    program = compiled(load([*words, *OPTIONS]), world.size, place)
    assert errors(program) == []
    runs = []
    for seed, latest in ((1, 0), (2, 9)):
        run = a_run(words, seed=seed, latest=latest, world=with_groups(world, program, make_group), program=program)
        runs.append(run)
        for metrics, of_one in zip(run.iterations(), expected, strict=True):
            assert metrics["tokens_sha256"] == of_one["tokens_sha256"]
            for name in (
                "reward",
                "score_environment",
                "turns",
                "response_length",
                "ended_fraction",
                "policy_loss",
                "kl",
                "actor_grad_norm",
            ):
                assert error(metrics[name], of_one[name]) <= TOLERANCE, name
            assert of_one["actor_grad_norm"] > 0.01
        assert said_by(run) == responses
    for model in ("actor", "critic"):
        first, second = (run.weights(model) for run in runs)
        for name, weight in first.items():
            assert torch.equal(weight, second[name]), (model, name)


class Given(Scripted):
    """Has all answers at once."""

    given = [Answer(3, tuple(range(3000))), Answer(0, ()), Answer(2, None, "max_turns"), Answer(1, (5, 6))]

    def openings(self) -> list[list[int]]:
        return [[7] * number for number in range(1, 5)]

    def answers(self, wait_s: float) -> list[Answer]:
        given, self.given = self.given, []
        return given


def test_a_long_answer_is_told_in_several_steps(world):
    """Every rank hears it in the same step, and what came after it in the order in which it came."""
    group = world.group("all")
    parallel = Parallel(Shard(tp=world.size, tp_index=world.rank), group, copy=group)
    episodes = SharedEpisodes(Given() if world.rank == 0 else None, 4, parallel, world.device)
    assert episodes.openings() == Given().openings()
    heard = [episodes.answers(0.0) for _ in range(4)]
    assert heard == [[], [], Given.given, []] and 3000 + 4 * HEADER < 3 * SIZE

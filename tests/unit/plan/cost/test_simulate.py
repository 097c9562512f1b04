"""Critical paths against closed forms: sums where everything is in one line, maxima where it overlaps."""

import random
from dataclasses import replace

import pytest

from bench.forecast.scan import machine
from bench.forecast.suites import Case
from rlhf_spmd.config import options as config
from rlhf_spmd.config.presets import load
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.cost.forecast import times_of
from rlhf_spmd.plan.cost.forecast_summary import bubble, runs
from rlhf_spmd.plan.cost.simulate import Times, simulate
from rlhf_spmd.plan.program.chain import unrolled
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Load, Offload, Run
from rlhf_spmd.strategies import flattening, interleaving2, separation
from tests.programs import make_workload, place_models, random_plan, random_program

SECONDS = {
    "actor_generate": 8.0,
    "reference_infer": 4.0,
    "reward_infer": 2.0,
    "critic_infer": 1.0,
    "estimate_advantages": 0.0,
    "actor_train": 0.5,
    "critic_train": 0.25,
}
M = 4  # mini-batches


def program_of(place, size: int, **options):
    workload, cluster = make_workload(num_mini_batches=M, epochs=2, mini_batch=8), Cluster.parse(f"1x{size}")
    return compile_program(workload, place(workload, cluster, **options), cluster)


def seconds(program, all_s=SECONDS):
    """Returns the seconds of a call: it takes its time for all mini-batches, whatever the number of rows; a train step
    its own."""

    def run_s(rank: int, step: Run) -> float:
        train = step.call.endswith("_train")
        return all_s[step.call] * (1 if train else len(program.mini_batches_of(step)) / M)

    return run_s


def forecast(place, size: int, **options) -> float:
    program = program_of(place, size, **options)
    return simulate(program, Times(seconds(program))).makespan_s


@pytest.mark.parametrize("size", [1, 2, 4])
def test_flattening_is_a_sum(size):
    assert forecast(flattening.place, size) == pytest.approx(8 + 4 + 2 + 1 + 2 * M * 0.75)


@pytest.mark.parametrize("size", [2, 4])
def test_interleaving_runs_reference_and_reward_at_the_same_time(size):
    assert forecast(interleaving2.place, size) == pytest.approx(8 + max(4, 2) + 1 + 2 * M * 0.75)


def test_separation_overlaps_generation_with_the_first_epoch():
    """On two ranks a mini-batch takes 15/4 s to make and 0.75 s to train on: only the last one's training is seen."""
    assert forecast(separation.place, 2, chain=False) == pytest.approx(15 + 0.75 + M * 0.75)


def test_messages_take_their_time_and_slow_ranks_hold_up_their_group():
    program = program_of(separation.place, 2, chain=False)
    weights = sum(1 for transfer in program.transfers if transfer.model)
    slow = simulate(program, Times(seconds(program), lambda message: 0.0 if message.keys else 10.0))
    assert weights == 2
    assert slow.makespan_s == pytest.approx(simulate(program, Times(seconds(program))).makespan_s + 10.0 * weights)
    program = program_of(flattening.place, 2)
    late = simulate(program, Times(lambda rank, step: float(rank == 1 and step.call == "actor_generate")))
    assert late.makespan_s == 1.0 and late.times[0][0] == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(30))
def test_any_program_ends_and_takes_between_the_longest_rank_and_the_sum(seed):
    program = random_program(random.Random(seed).choice)
    found = simulate(program, Times(lambda rank, step: 1.0))
    work = [sum(isinstance(step, Run) for step in steps) for steps in program.instructions]
    assert max(work) <= found.makespan_s <= sum(work)
    for spans in found.times:
        assert all(begin <= end for begin, end in spans)
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_ranks_share_the_cores_of_their_node(workers):
    """Four ranks compute alone; with c cores for them, each gets c / 4."""
    program = program_of(flattening.place, 4)
    found = simulate(
        program, Times(lambda rank, step: float(step.call == "actor_generate"), num_workers=lambda n: workers)
    )
    assert found.makespan_s == pytest.approx(4 / workers)


def test_a_rank_sends_one_message_after_the_other():
    """Under separation on two ranks every mini-batch's messages leave from the same rank."""
    program = program_of(separation.place, 2, chain=False)
    none = {"actor_generate": 0.0}
    found = simulate(program, Times(lambda rank, step: none.get(step.call, 0.0), lambda m: 1.0 if m.keys else 0.0))
    messages = sum(len(transfer.messages) for transfer in program.transfers if not transfer.model)
    assert found.makespan_s == pytest.approx(messages)


# ---- iterations that are a chain -------------------------------------------------------------------------------------


def period_of_two_ranks(stream: bool, **changes) -> float:
    """Returns the seconds from one iteration to the next: rank 0 trains, rank 1 does all else."""
    program, all_s = program_of(separation.place, 2, chain=True, stream=stream), SECONDS | changes
    return simulate(program, Times(seconds(program, all_s))).makespan_s


@pytest.mark.parametrize("critic_step_s", [0.125, 0.25, 1.5, 2.0, 4.0])
def test_the_next_iteration_waits_for_the_critic_only_where_it_needs_that(critic_step_s):
    """Without streaming: the actor trains, then the critic, while the next responses are generated and judged; the
    critic's values wait for both."""
    actor_s, critic_s = 2 * M * SECONDS["actor_train"], 2 * M * critic_step_s
    expected = max(8 + 4 + 2, critic_s) + 1 + actor_s
    assert period_of_two_ranks(False, critic_train=critic_step_s) == pytest.approx(expected)
    assert critic_s < 14 or expected == pytest.approx(actor_s + critic_s + 1)


@pytest.mark.parametrize("actor_step_s", [0.5, 3.0, 5.0])
def test_a_chain_that_streams(actor_step_s):
    """The actor's first epoch is on mini-batches as they arrive, each after 15/4 s; then comes the other one, and the
    critic, which has trained before the next values are needed."""
    piece_s = 15 / M
    first_s = max(M * piece_s + actor_step_s, piece_s + M * actor_step_s)
    found_s = period_of_two_ranks(True, actor_train=actor_step_s, critic_train=0.25)
    assert found_s == pytest.approx(first_s + M * actor_step_s)


@pytest.mark.parametrize(("critic_step_s", "gains"), [(0.25, False), (2.0, True)])
def test_a_chain_of_models_apart_takes_as_long_as_its_slowest_model(critic_step_s, gains):
    """Each of four models has a rank of its own; nobody waits for more than rows."""
    workload = make_workload(num_mini_batches=M, epochs=2, mini_batch=8)
    apart = place_models(workload, 4, actor=(0,), critic=(1,), reference=(2,), reward=(3,))
    program = compile_program(workload, replace(apart.placement, chain=True), apart.cluster)
    all_s = dict.fromkeys(SECONDS, 1.0) | {
        "estimate_advantages": 0.0,
        "actor_train": 0.5,
        "critic_train": critic_step_s,
    }
    chained, unchained = (simulate(one, Times(lambda rank, run: all_s[run.call])) for one in (program, apart))
    # generation, an inference, and training of the actor; or the critic's inference and training
    assert chained.makespan_s == pytest.approx(max(1 + 1 + 2 * M * 0.5, 1 + 2 * M * critic_step_s))
    assert (chained.makespan_s < unchained.makespan_s) == gains


def slow_period_s(program, times, num: int = 8) -> float:
    """Returns by how many seconds one more iteration makes a list of some in a row longer."""
    shorter, longer = (simulate(unrolled(program, n), times).makespan_s for n in (num, num + 1))
    return longer - shorter


@pytest.mark.parametrize("seed", range(40))
def test_a_period_is_what_one_more_iteration_takes(seed):
    """Against a slow obvious twin, for any placement; and each rank executes its list back to back."""
    rng = random.Random(seed)
    workload, placement, cluster = random_plan(rng.choice)
    program = compile_program(workload, replace(placement, chain=True), cluster)
    drawn = {}

    def draw(key) -> float:
        return drawn.setdefault(key, rng.random())  # the same in all iterations

    times = Times(
        lambda rank, run: draw((rank, replace(run, iteration=0))),
        lambda message: draw((message.source, message.destination, message.keys)),
    )
    found = simulate(program, times)
    assert program.chains and found.makespan_s == pytest.approx(slow_period_s(program, times))
    worked = sum(end_s - begin_s for _, _, begin_s, end_s in runs(found))
    assert bubble(found) == pytest.approx(1 - worked / found.makespan_s / cluster.num_devices)
    for listed, spans in zip(program.instructions, found.times, strict=True):
        if any(isinstance(step, Run) for step in listed):
            assert spans[-1][1] - spans[0][0] == pytest.approx(found.makespan_s) and spans[0][0] >= 0.0
    assert min(spans[0][0] for spans in found.times) == 0.0


TWO_TYPES = {"calibration": "a100-80g-derived,h100-80g-derived", "strategy": "heterogeneous"}


@pytest.mark.parametrize(
    "case",
    [
        Case("llama-13b", "3x8+1x8", options={"training_tp": 4, "training_pp": 2, "generation_tp": 4}, **TWO_TYPES),
        Case(
            "llama-7b", "1x8+1x8", options={"training_tp": 4, "zero": 1, "generation_device": "h100-80g"}, **TWO_TYPES
        ),
        Case("llama-7b", "4x8", "separation", {"training_tp": 2, "training_pp": 2, "zero": 1, "generation_tp": 2}),
    ],
    ids=str,
)
def test_periods_of_large_programs_with_stages(case):
    """Also where devices differ; passes of pipelines are known from the iteration before."""
    cluster, calibration = machine(case)
    workload = config.make_workload(load(case.preset))
    program = load_strategy(case.strategy).compile(workload, cluster, dict(case.options) | {"chain": True})
    times = times_of(program, calibration)
    assert simulate(program, times).makespan_s == pytest.approx(slow_period_s(program, times, 3))


@pytest.mark.parametrize("load_s", [3.0, 8.0, 11.0])
def test_a_model_is_loaded_beside_the_run_before(load_s):
    """The reference during generation; the reward model after the reference has gone, since two never wait together."""
    program = program_of(flattening.place, 1, offload=True)
    steps = [step for step in program.instructions[0] if isinstance(step, Load | Offload | Run)]
    names = [step.model if not isinstance(step, Run) else step.call for step in steps[:7]]
    assert names == [
        *("reference", "actor_generate", "reference_infer", "reference"),
        *("reward", "reward_infer", "reward"),
    ]
    without = simulate(program, Times(seconds(program), lambda _: 0.0)).makespan_s
    found = simulate(program, Times(seconds(program), lambda _: 0.0, lambda rank, load: load_s))
    assert found.makespan_s - without == pytest.approx(max(0.0, load_s - SECONDS["actor_generate"]) + load_s)
    loads = [
        span for step, span in zip(found.program.instructions[0], found.times[0], strict=True) if type(step) is Load
    ]
    assert loads[0] == (0.0, load_s) and loads[1][1] - loads[1][0] == pytest.approx(load_s)

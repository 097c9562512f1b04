"""Every ZeRO stage on every kind of subgroup against one process running plain torch on the whole batch.

    python tests/run_mpi.py 4 --limit 300 -- tests/mpi/test_train_engine.py

Runs at 2 to 8 ranks; cases that do not fit are skipped. Costs 90 s of processor time at 4 ranks.
"""

import pytest
import torch

from tests.trainee import (
    CLIP,
    Trainee,
    single_process,
    tiny,
    whole_weights,
)

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.usefixtures("cheap_garbage_collection"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]


# --- Against the single process -----------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("zero", "group"),
    [
        *((zero, "all") for zero in range(4)),
        *((1, "first half"), (2, "last"), (3, "odd"), (0, "one"), (2, "odd")),
        pytest.param(3, "apart", marks=pytest.mark.ranks(8)),  # ranks up to 6
    ],
)
def test_training_equals_single_process(job, group, zero):
    """Uneven data (one rank without any), 1 to 3 micro-batches, clipping active; the other ranks do nothing."""
    for num_micro in {"all": (1, 2, 3), "one": (1, 2), "odd": (3,)}.get(group, (2,)):
        trainee = Trainee(job, group, zero, clip=CLIP, num_micro=num_micro)
        for step in range(4):
            trainee.step(step)
        trainee.check(single_process(4, clip=CLIP))
        assert not trainee.inside or min(trainee.run.norms) > CLIP


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("zero", "on", "bare"),
    [
        (0, "linear", ("norm", "bias", "embed")),
        (1, "linear", ("norm", "bias", "embed")),
        (1, "matrices", ("norm", "bias")),
        (2, "linear", ("norm", "bias", "embed")),
        (3, "matrices", ("norm", "bias")),
    ],
)
def test_weight_decay_on_some_weights(job, zero, on, bare):
    """An engine that goes on from the state has the same bits. (At stage 0 a rank stores a part, and reads all.)"""
    trainees = [
        Trainee(job, "all", zero, clip=CLIP, num_micro=2, weight_decay=0.5, weight_decay_on=on)
        for _ in range(2 if zero else 1)
    ]
    for step in range(2):
        trainees[0].step(step)
    num_steps, state = trainees[0].engine.optimizer_state()
    kept = {(kind, name): x.clone() for name, kinds in state.items() for kind, x in kinds.items()}
    for trainee in trainees[1:]:
        trainee.engine.load(num_steps, lambda kind, interval: kept[kind, interval])
        trainee.engine.publish()
    for trainee in trainees:
        trainee.step(2)
    trainees[0].check(single_process(3, clip=CLIP, decay=0.5, bare=bare))
    pairs = zip(*(whole_weights(one.engine).values() for one in (trainees[0], trainees[-1])), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# --- bfloat16 -----------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize(("zero", "group"), [(0, "odd"), (1, "all"), (2, "one"), (3, "all")])
def test_bfloat16_stays_close(job, group, zero):
    """Learning rates far below bfloat16's last digit add up in float32 masters; sums over micro-batches keep digits."""
    steps, lr = 30 if zero < 3 else 12, 3e-4
    trainee = Trainee(job, group, zero, clip=CLIP, num_micro=2, lr=lr, dtype=torch.bfloat16)
    for step in range(steps):
        trainee.step(step)
    if not trainee.inside:
        return
    expected = single_process(steps, clip=CLIP, lr=lr, rounded=True)
    assert trainee.run.losses == pytest.approx(expected.losses, rel=2e-2)
    assert trainee.run.norms == pytest.approx(expected.norms, rel=2e-2)
    start = dict(tiny().bfloat16().float().named_parameters())
    errors, ways = [], []
    for name, weight in whole_weights(trainee.engine).items():
        assert weight.dtype == torch.bfloat16
        errors.append((weight.float() - expected.state[name]).abs().flatten())
        ways.append((start[name] - expected.state[name]).abs().flatten())
    # Rounding leaves a quarter of the last digit on average; the way is many updates, each lost on its own.
    assert torch.cat(errors).mean() < 0.4 * torch.cat(ways).mean()

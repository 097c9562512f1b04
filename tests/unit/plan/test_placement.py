"""Model placement ratios (APP, arXiv 2312.11819) and the layouts of a placement."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement, split_by_ratio
from tests.programs import make_workload

MODELS = ("actor", "critic", "reference", "reward")


def split(shares, size: int) -> dict[str, tuple[int, ...]]:
    return split_by_ratio(dict(zip(MODELS, shares, strict=False)), tuple(range(size)))


# ---- shares of the ranks -------------------------------------------------------------------------------------------


def test_the_paper_s_example():
    """Eight devices: actor and critic on all of them, the reference on the first half, the reward on the second."""
    placed = split((1, 1, 0.5, 0.5), 8)
    assert placed["actor"] == placed["critic"] == tuple(range(8))
    assert placed["reference"] == (0, 1, 2, 3) and placed["reward"] == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("shares", "size", "words"),
    [
        ((0.9, 0.1), 4, ["0.1 of critic", "no rank of 4", "at least 1/4"]),
        ((0.1, 0.9), 4, ["0.1 of actor", "no rank of 4"]),
        ((0.4, 0.4, 0.1, 0.1), 4, ["0.1 of reward", "no rank of 4", "start more ranks"]),
        ((0.5, 0.5), 1, ["critic", "no rank of 1"]),
        ((1e-5, 1 - 1e-5), 8, ["1e-05 of actor", "no rank of 8"]),
        ((0.5, 0.4), 8, ["actor, critic", "sum to 9/10", "not to 1"]),
        ((0.5,), 8, ["actor", "sum to 1/2"]),
        ((0.5, 0.6), 8, ["actor, critic", "11/10", "not to 1"]),
        ((0.333, 0.333, 0.333), 8, ["999/1000", "not to 1"]),
        ((0.5, 0.5, 0.5, 0.25), 8, ["reference, reward", "sum to 3/4"]),
        ((0, 1), 8, ["ratio 0 of actor", "(0, 1]"]),
        ((-0.5, 0.5), 8, ["ratio -0.5 of actor", "(0, 1]"]),
        ((1.5,), 8, ["ratio 1.5 of actor", "(0, 1]"]),
        (("half", 0.5), 8, ["'half' of actor", "1/2"]),
        (("1/0", 0.5), 8, ["'1/0' of actor", "not a number"]),
        ((float("nan"), 0.5), 8, ["nan of actor", "not a number"]),
        ((float("inf"), 0.5), 8, ["inf of actor", "not a number"]),
        ((None, 0.5), 8, ["None of actor", "not a number"]),
        (([0.5], 0.5), 8, ["[0.5] of actor", "not a number"]),
    ],
)
def test_shares_that_cannot_be(shares, size, words):
    with pytest.raises(UserError) as error:
        split(shares, size)
    assert all(word in str(error.value) for word in words), error.value


@given(
    weights=st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 24),
    whole=st.integers(0, 2),
    form=st.sampled_from([float, str, Fraction]),
)
@settings(max_examples=60, deadline=None)
def test_the_shares_of_a_group_partition_the_ranks(weights, size, whole, form):
    ranks = tuple(range(3, 3 + size))
    groups = [{f"{g}.{i}": Fraction(w, sum(group)) for i, w in enumerate(group)} for g, group in enumerate(weights)]
    ratios = {f"all {i}": 1 for i in range(whole)} | {name: form(s) for group in groups for name, s in group.items()}
    try:
        placed = split_by_ratio(ratios, ranks)
    except UserError as error:
        assert "no rank" in str(error)
        assert any(share * size < 1 for group in groups for share in group.values())
        return
    assert list(placed) == list(ratios)
    assert all(placed[f"all {i}"] == ranks for i in range(whole))
    for group in groups:
        assert sum((placed[name] for name in group), ()) == ranks
        assert all(abs(len(placed[name]) - share * size) <= 1 for name, share in group.items())


# ---- placements ----------------------------------------------------------------------------------------------------

EVERYONE = Layout.data_parallel(range(4))


def test_a_compute_runs_once_for_every_distinct_list_of_ranks_that_reads_it():
    workload = make_workload()
    compute = workload.workflow.call("estimate_advantages")
    same = dict.fromkeys(("actor_train", "critic_train"), EVERYONE)
    assert Placement(same).sites(compute, workload.workflow) == ("actor_train",)
    apart = same | {"critic_train": Layout.data_parallel((2, 3))}
    assert Placement(apart).sites(compute, workload.workflow) == ("actor_train", "critic_train")

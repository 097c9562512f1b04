"""Strategies by name and by file; every error is one message that names the strategy."""

import re
import textwrap
from fractions import Fraction

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages import strategy as strategies
from rlhf_spmd.pages.strategy import load_strategy
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.proof.check import check
from tests.programs import make_workload

HEAD = """
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement, split_by_ratio
"""
EVERYWHERE = """
def place(workload, cluster, *, zero: int = 0):
    everyone = Layout.data_parallel(cluster.ranks)
    trained = Layout.data_parallel(cluster.ranks, zero=zero)
    return Placement.by_model(workload, actor=trained, critic=trained, reference=everyone, reward=everyone)
"""
# Leaves out what `change` changes: every call on all ranks, then one line of one's own.
CHANGED = """
def place(workload, cluster):
    everyone = Layout.data_parallel(cluster.ranks)
    layouts = {call.name: everyone for call in workload.workflow.placed_calls}
    %s
    return Placement(layouts)
"""


@pytest.fixture
def write(tmp_path):
    def write(source: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(HEAD + textwrap.dedent(source), encoding="utf-8")
        return str(tmp_path / name)

    return write


def compiled(name: str, layout: str = "1x4", **options):
    return load_strategy(name).compile(make_workload(), Cluster.parse(layout), options)


def refused(name: str, layout: str = "1x4", **options) -> str:
    with pytest.raises(UserError) as error:
        compiled(name, layout, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


# ---- finding them --------------------------------------------------------------------------------------------------


def test_every_strategy_of_the_package_compiles_and_is_sound():
    assert "flattening" in strategies.strategy_names() and "_template" not in strategies.strategy_names()
    for name in strategies.strategy_names():
        for layout in ("1x1", "1x2", "1x4", "2x2"):
            if name == "heterogeneous":  # it needs a cluster file
                assert "two device types" in refused(name, layout)
                continue
            if layout == "1x1" and name not in ("flattening", "reallocation"):  # the others set models apart
                assert re.search("start (more|at least 2) ranks", refused(name, layout))
                continue
            errors = [f for f in check(compiled(name, layout)) if f.severity == "error"]
            assert not errors, (name, layout, errors)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def plaice(workload, cluster): ...", ["no function place(workload, cluster", "_template.py"]),
        ("place = 3", ["no function place"]),
        ("def place(:", ["cannot be imported: SyntaxError"]),
        ("import no_such_package", ["cannot be imported: ModuleNotFoundError", "no_such_package"]),
        ("1 / 0", ["cannot be imported: ZeroDivisionError: division by zero"]),
        ("raise SystemExit(3)", ["cannot be imported: SystemExit: 3"]),
    ],
)
def test_files_that_are_no_strategy(write, source, words):
    path = write(source)
    with pytest.raises(UserError) as error:
        load_strategy(path)
    assert all(word in str(error.value) for word in (path, *words)), error.value


def test_further_options_are_those_of_a_dataclass(write):
    both = [list(load_strategy(name).parameters) for name in ("separation", "heterogeneous")]
    assert both[0][0] == "generation_ranks" and both[1][0] == "generation_device" and both[0][1:] == both[1][1:]
    assert load_strategy("separation").typed({"zero": "2", "stream": "false"}) == {"zero": 2, "stream": False}
    own = load_strategy(write(EVERYWHERE + '\n\nOPTIONS = {"mine": 1}\n'))  # whatever a user calls so
    assert own.further is None and "zero" in own.parameters


# ---- options -------------------------------------------------------------------------------------------------------

OPTIONS = """
SEEN = {}
def place(workload, cluster, *, zero: int = 0, ratio: Fraction = Fraction(1, 2), ratios: list[float] = (), free=1,
          micro_batch: int | None = None, fast: bool = False):
    SEEN.update(zero=zero, ratio=ratio, ratios=ratios, free=free, micro_batch=micro_batch, fast=fast)
    everyone = Layout.data_parallel(cluster.ranks)
    return Placement.by_model(workload, actor=everyone, critic=everyone, reference=everyone, reward=everyone)
"""


def test_options_get_the_types_of_place(write):
    strategy = load_strategy(write("from fractions import Fraction" + OPTIONS))
    text = {"zero": "2", "ratio": "1/3", "ratios": "0.5,0.5", "free": "1", "micro_batch": "none", "fast": "true"}
    strategy.compile(make_workload(), Cluster.parse("1x2"), text)
    seen = strategy.place.__globals__["SEEN"]
    assert seen == {
        "zero": 2,
        "ratio": Fraction(1, 3),
        "ratios": [0.5, 0.5],
        "free": "1",
        "micro_batch": None,
        "fast": True,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zeroo": "1"}, ["unknown option 'zeroo'", "did you mean 'zero'?", "known: zero"]),
        ({"zero": "high"}, ["strategy.zero=high", "valid integer"]),
        (
            {"zero": "7"},
            [
                "calls actor_generate, critic_infer, actor_train, critic_train on ranks 0-3",
                "ZeRO stage 7 does not exist; use 0, 1, 2 or 3",
            ],
        ),
    ],
)
def test_wrong_options_name_the_strategy(write, options, words):
    text = refused(write(EVERYWHERE), **options)
    assert text.startswith("strategy mine: ") and "place() raised" not in text
    assert all(word in text for word in words), text


# ---- what place() does ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('too hot')", ["place() raised ValueError: too hot"]),
        ("return [][0]", ["place() raised IndexError"]),
        ("assert cluster.num_devices == 3", ["place() raised AssertionError"]),
        ("return split_by_ratio({'actor': 0.5}, cluster.ranks)", ["ratios of actor sum to 1/2"]),
        ("return None", ["place() returned None, not a Placement", "Placement.by_model"]),
        ("return {'actor': cluster.ranks}", ["place() returned {'actor': (0, 1, 2, 3)}, not a Placement"]),
        ("return Placement(None)", ["place() returned Placement(layouts=None", "), not a Placement"]),
        ("return Placement", ["not a Placement"]),
        ("return Placement.by_model(workload)", ["a layout for each model of the workflow", "not none"]),
        ("return Layout(['a'], dp=1)", ["whole numbers", "'a'"]),
    ],
)
def test_a_place_that_fails(write, body, words):
    text = refused(write(f"def place(workload, cluster):\n    {body}\n"))
    assert text.startswith("strategy mine: ") and all(word in text for word in words), text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("del layouts['critic_infer']", ["call critic_infer has no layout", "add it to the placement"]),
        ("layouts['critic_guess'] = everyone", ["critic_guess is not a call", "critic_infer"]),
        ("layouts['reward_infer'] = Layout.data_parallel(())", ["call reward_infer: no rank is left for it; give it"]),
        ("layouts['reward_infer'] = Layout((), dp=0)", ["call reward_infer: no rank is left for it"]),
        ("layouts['reward_infer'] = (0, 1)", ["call reward_infer: (0, 1) is not a Layout", "Layout.data_parallel"]),
        (
            "layouts['reward_infer'] = Layout.data_parallel((2, 4))",
            ["call reward_infer on ranks 2,4", "rank 4 is outside the world of ranks 0 to 3", "start at least 5 ranks"],
        ),
        (
            "layouts['actor_train'] = Layout.data_parallel(range(8))",
            ["call actor_train on ranks 0-7", "rank 4 is outside", "start at least 8 ranks"],
        ),
        (
            "layouts['actor_generate'] = Layout.data_parallel((0, 1), zero=2)",
            ["call actor_generate on ranks 0-1", "ZeRO 2 would be ignored", "trains on ranks 0-3", "use zero=0 here"],
        ),
        ("layouts['actor_train'] = Layout.data_parallel((3, 3))", ["actor_train on ranks 3,3", "a rank appears twice"]),
        ("layouts['actor_train'] = Layout.data_parallel((0, 1), zero=7)", ["actor_train on ranks 0-1", "stage 7"]),
        (
            "layouts['actor_train'] = Layout(cluster.ranks, dp=2, tp=2)",
            ["actor_train on ranks 0-3", "tp 2 is more than the 1 key-value heads of actor", "lower tp to 1"],
        ),
        ("layouts['actor_train'] = Layout(cluster.ranks, dp=3)", ["actor_train on ranks 0-3", "number of ranks, 4"]),
    ],
)
def test_a_placement_that_does_not_fit_names_strategy_call_ranks_and_mend(write, change, words):
    text = refused(write(CHANGED % change))
    assert text.startswith("strategy mine: ") and "raised" not in text
    assert all(word in text for word in words), text


def test_the_template_runs_as_it_stands():
    path = strategies.__file__.replace("rlhf_spmd/pages/strategy.py", "strategies/_template.py")
    program = load_strategy(path).compile(make_workload(), Cluster.parse("1x4"), {"ratio": "1/4"})
    assert program.placement.layouts["reference_infer"].ranks == (0,)
    assert program.placement.layouts["reward_infer"].ranks == (1, 2, 3)

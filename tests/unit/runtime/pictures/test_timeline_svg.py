"""The last iteration of runs as a picture inside a page."""

from xml.etree import ElementTree

from rlhf_spmd.runtime.pictures.palette import style_of_span, styles_of
from rlhf_spmd.runtime.pictures.timeline_svg import MOST_LANES, last_iteration, timelines
from tests.programs import make_workload
from tests.unit.runtime.pictures.test_curves_svg import check
from tests.unit.runtime.world.test_trace import record, two_ranks


def test_the_last_iteration_of_two_runs_on_one_axis():
    many = [record(rank, ("actor_generate", "compute", 0.0, 4.0 + rank, 7)) for rank in range(40)]
    shown = [last_iteration("one", two_ranks()), last_iteration("a <run> on many ranks", many)]
    assert shown[0].title == "one: iteration 2, 1 s, ranks busy 100%"
    assert "iteration 8, 43 s" in shown[1].title and shown[1].title.endswith(", 32 of 40 ranks")
    svg = timelines(shown)
    check(svg)
    texts = [one.text for one in ElementTree.fromstring(svg).iter("text")]
    assert texts.count("rank 0") == 2 and "rank 31" in texts and f"rank {MOST_LANES}" not in texts
    assert "seconds since the start of the iteration" in texts and "actor generate" in texts


def test_no_span_no_picture():
    assert last_iteration("none", []) is None and last_iteration("none", [record(0)]) is None


def test_a_call_has_the_same_look_by_its_name_alone():
    workflow = make_workload().workflow
    for name, style in styles_of(workflow).items():
        found = style_of_span(name, "compute", [*workflow.models])
        assert (found.label, found.colour) == (style.label, style.colour)
    assert style_of_span("actor_generate_greedy", "compute", ["actor"]).label == "actor generate"

"""Timelines: the picture shows what the spans say."""

from matplotlib.text import Annotation

from rlhf_spmd.runtime.pictures import picture
from rlhf_spmd.runtime.pictures.palette import styles_of
from rlhf_spmd.runtime.pictures.timeline import Panel, add_stack, write_png
from tests.programs import make_workload
from tests.unit.runtime.world.test_trace import record, two_ranks

WORKFLOW = make_workload().workflow


def drawn_texts(monkeypatch, path, records, **options):
    """Draws, and returns all text of the figure."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    kept = []
    save = Figure.savefig
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *args, **kw: (save(figure, *args, **kw), kept.append(figure)))
        write_png(path, records, workflow=WORKFLOW, **options)
    return [text.get_text() for text in kept[0].findobj(Text) if text.get_text()]


def test_picture(tmp_path, monkeypatch):
    path = tmp_path / "timeline.png"
    first = [{**one, "spans": [row for row in one["spans"] if row[4] == 0]} for one in two_ranks()]
    texts = drawn_texts(monkeypatch, path, first, title="flattening on 2 ranks")
    assert path.read_bytes().startswith(b"\x89PNG")
    for expected in (
        "flattening on 2 ranks",
        "iteration 1: 3 s, ranks busy 65%",
        "seconds since the start of iteration 1",
        "rank 0",
        "rank 1",
        "iteration 1",
        "63% busy",
        "67%",
        "actor generate",
        "actor train",
        "reference infer",
        "estimate advantages",
        "transfer",
        "waiting for other ranks",
        "idle",
    ):
        assert expected in texts, texts
    assert "iteration 2" not in texts


def test_picture_of_the_last_iteration(tmp_path, monkeypatch):
    texts = drawn_texts(monkeypatch, tmp_path / "t.png", two_ranks(), title="t", num_iterations=1)
    assert "iteration 2: 1 s, ranks busy 100%" in texts and "actor train" not in texts


def test_a_busy_share_stands_at_the_end_of_its_own_lane():
    drawn = picture.Picture()
    panels = [Panel(str(end), [record(0, ("actor_train", "compute", 0, end, 0))]) for end in (4, 1)]
    add_stack(drawn, panels, styles=styles_of(WORKFLOW))
    long, short = (text.xy for text in drawn.draw().findobj(Annotation))
    assert (long[0] - short[0], long[1], short[1]) == (3, 0, 0)

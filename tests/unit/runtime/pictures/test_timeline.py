"""Timelines: the picture shows what the spans say."""

from rlhf_spmd.runtime.pictures import picture
from rlhf_spmd.runtime.pictures.timeline import LANE_INCH, LEFT, RIGHT, write_png
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
        "63%",
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


def test_a_step_that_draws_ahead_names_both_iterations(tmp_path, monkeypatch):
    records = two_ranks()
    for one in records:
        for row in one["spans"]:
            if row[0] == "actor_generate":
                row[5] = {"iteration": row[4] + 1}
    texts = drawn_texts(monkeypatch, tmp_path / "t.png", records, title="t")
    assert "iteration 1, drawing 2" in texts and "iteration 2, drawing 3" in texts
    for one in records:
        one["spans"] = [row for row in one["spans"] if row[4] == 0 or row[0] != "actor_generate"]
        one["spans"].append(["actor_train", "compute", 1.7e9 + 3.0, 1.7e9 + 5.0, 1, {}])  # the last step draws nothing
    texts = drawn_texts(monkeypatch, tmp_path / "t.png", records, title="t")
    assert "iteration 1, drawing 2" in texts and "iteration 2" not in texts


def test_iterations_that_overlap_are_named_in_their_spans(tmp_path, monkeypatch):
    spans = [
        record(0, ("actor_generate", "compute", 0.0, 4.0, 0), ("actor_generate", "compute", 6.0, 10.0, 1)),
        record(
            1,
            ("critic_train", "compute", 0.0, 3.0, None),
            ("actor_train", "compute", 4.0, 6.0, 0),
            ("critic_train", "compute", 6.0, 9.0, 0),
            ("wait", "wait", 9.0, 10.0, 1),
        ),
    ]
    texts = drawn_texts(monkeypatch, tmp_path / "t.png", spans, title="t", num_iterations=1)
    for expected in ("actor generate 1", "actor generate 2", "critic train", "critic train 1", "actor train 1"):
        assert expected in texts, texts
    assert "iterations 1 to 2: 10 s, ranks busy 80%" in texts
    spans[1]["spans"][2][3] -= 2.9  # the critic's training ends as the next iteration begins
    texts = drawn_texts(monkeypatch, tmp_path / "t.png", spans, title="t", num_iterations=1)
    assert "iteration 2: 4 s, ranks busy 50%" in texts and "actor generate" in texts


def test_picture_of_the_last_iteration(tmp_path, monkeypatch):
    texts = drawn_texts(monkeypatch, tmp_path / "t.png", two_ranks(), title="t", num_iterations=1)
    assert "iteration 2: 1 s, ranks busy 100%" in texts and "actor train" not in texts


def test_idle_waiting_training_and_other_work_look_different(tmp_path):
    from matplotlib import image

    path = tmp_path / "t.png"
    spans = [("actor_generate", "compute", 0, 1, 0), ("x", "wait", 2, 3, 0), ("actor_train", "compute", 3, 4, 0)]
    write_png(path, [record(0, *spans)], title="t", workflow=WORKFLOW)
    row = image.imread(path)[:, :, :3]
    above = round((0.62 + 0.24 + LANE_INCH[1] * 0.2) * picture.DPI)  # the words
    left, right = round(LEFT * picture.DPI), round((picture.WIDTH - RIGHT) * picture.DPI)

    def pixels(number):  # of second `number`
        quarter = (right - left) // 4
        return row[above, left + number * quarter + 10 : left + (number + 1) * quarter - 10]

    def colours(number):
        return {tuple(map(float, one)) for one in pixels(number).round(2)}

    (generate,), (idle,), waiting, (train,) = map(colours, range(4))
    assert len({generate, idle, train}) == 3 and len(waiting) > 3  # hatched
    assert (1.0, 1.0, 1.0) in waiting and not waiting & {generate, idle, train}
    assert sum(train) < sum(generate) < sum(idle)

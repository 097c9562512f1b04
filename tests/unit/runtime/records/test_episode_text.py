"""Episodes as text: who said what, in lines of some columns."""

from rlhf_spmd.runtime.records.episode_text import episode_text

TURNS = [
    {"model": "I look.\nThen I count.", "calls": ['f({"x": 1})', "g({})"], "answers": ["1", "word " * 30]},
    {"model": "", "calls": [], "answers": []},
    {"model": "\x1b[1mdone", "calls": [], "answers": []},
]


def test_calls_and_answers_have_lines_of_their_own():
    text = episode_text(TURNS, "completed", width=60)
    assert text.split("\n") == [
        " 1 model  I look.",
        "          Then I count.",
        '   call   f({"x": 1})',
        "   call   g({})",
        "   answer 1",
        "   answer " + " ".join(["word"] * 10),
        "          " + " ".join(["word"] * 10),
        "          " + " ".join(["word"] * 10),
        " 2 model  (nothing)",
        " 3 model  \\x1b[1mdone",
        "   ended: completed",
    ]
    assert "ended" not in episode_text(TURNS, "")

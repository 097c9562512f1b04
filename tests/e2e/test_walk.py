"""docs/one_iteration.md shows what a run of the demo executes."""

import pytest

from tools.pages import walk

LONGEST = 12  # frames of our own code from `main` to the model


@pytest.mark.slow
def test_the_page_is_as_a_run_is():
    ways = walk.stacks()
    assert walk.PAGE.read_text(encoding="utf-8") == walk.page(ways), "run `python -m tools walk`"
    to_the_model = ways["The model reads a micro-batch that is trained on"]
    assert to_the_model[-1][0] == "Transformer.forward" and len(to_the_model) <= LONGEST
    assert walk.to_read_more(ways) == set(), "put them on the list of what to read (tools/pages/walk.py)"


def test_what_to_read_is_little():
    texts = [(walk.REPOSITORY / file).read_text(encoding="utf-8") for file in walk.TO_READ]
    num_lines = sum(text.count("\n") for text in texts)
    assert len(texts) <= walk.MOST_FILES and num_lines <= walk.MOST_LINES, num_lines

"""The board of the positions of all ranks."""

import os

from rlhf_spmd.runtime.observe.node_files import new_file, open_file
from rlhf_spmd.runtime.observe.position_board import Board, RankStatus, board_bytes


def test_a_board_shows_positions_and_grants_one_claim():
    file = new_file(board_bytes(2))
    first, second = (Board(open_file(*file), rank=rank, node_ranks=(4, 6), node=0, num_nodes=1) for rank in (4, 6))
    os.unlink(file[0])
    assert first.read((4, 6)) == {4: RankStatus(), 6: RankStatus()}
    second.post(b"iteration 1", 1, 0)
    second.post(("iteration 2 \u2603" + "x" * 2000).encode(), 2, 0)
    text = first.read((6,))[6].text
    assert text.startswith("iteration 2 \u2603xxx") and 900 < len(text) < 1020
    assert first.statuses((6,)) == {}  # it has shown no life yet
    second.post(b"iteration 3", 3, 7)
    second.report(active_s=1.0, is_meeting=True)
    assert first.read((6,))[6].text == "iteration 3"
    status = first.statuses((4, 6))[6]
    assert (status.text, status.iteration, status.position, status.active_s, status.is_meeting) == (
        "iteration 3",
        3,
        7,
        1.0,
        True,
    )
    assert first.read((5,)) == {}  # on another node, and there is no store to ask
    assert [first.claim(), second.claim(), first.claim()] == [True, False, False]

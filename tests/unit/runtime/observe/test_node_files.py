"""Files that the ranks of a node share."""

import os

import pytest

from rlhf_spmd.runtime.observe import node_files


@pytest.mark.parametrize("has_room", [True, False])
def test_a_file_of_the_ranks_of_a_node_has_no_name(has_room, monkeypatch, tmp_path):
    folder = tmp_path if has_room else tmp_path / "absent"
    monkeypatch.setattr(node_files, "SHARED_MEMORY", str(folder))
    everyone: list[list] = []

    def gather(view: list) -> list[list]:
        everyone.append(view)
        return [view, ["/nope", 0]]

    descriptor, views = node_files.share_file(4096, 0, 0, gather, is_empty=True)
    assert os.fstat(descriptor).st_size == 0 and views == [[0, True], ["/nope", 0]] and not list(tmp_path.iterdir())
    assert os.path.realpath(f"/proc/self/fd/{descriptor}").startswith(str(folder) if has_room else "/memfd:")
    assert node_files.open_file(f"/proc/self/fd/{descriptor}", 0) is None  # another file by that path
    assert node_files.share_file(4096, 1, 1, gather) == (None, [[1, False], ["/nope", 0]])
    os.close(descriptor)

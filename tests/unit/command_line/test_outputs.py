"""Where subcommands write: not over other files, not under other endings, and not where they may not."""

from argparse import Namespace

import pytest

from rlhf_spmd.command_line.outputs import check_out
from rlhf_spmd.errors import UserError


def test_where_a_file_may_be_written(tmp_path):
    def check(name: str, *, overwrite: bool = False) -> None:
        check_out(Namespace(out=str(tmp_path / name), overwrite=overwrite), ".json", ".jsn")

    check("mine.json")
    check("new/mine.JSN")
    (tmp_path / "mine.json").touch()
    check("mine.json", overwrite=True)
    for name, says in (("mine.json", "exists already"), ("mine.txt", "the ending .json or .jsn")):
        with pytest.raises(UserError, match=says):
            check(name)

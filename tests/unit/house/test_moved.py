"""Modules that users imported from earlier versions: what is said, and that the new address exists."""

import subprocess
import sys
from importlib import import_module

import pytest

from rlhf_spmd import MOVED
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.strategy import load_strategy


@pytest.mark.parametrize("module", MOVED)
def test_the_new_address(module):
    with pytest.raises(ModuleNotFoundError, match=f"rlhf_spmd.{module} is now rlhf_spmd.{MOVED[module]}; import"):
        import_module(f"rlhf_spmd.{module}")
    assert import_module(f"rlhf_spmd.{MOVED[module]}")


def test_what_config_held():
    from rlhf_spmd.config import options

    with pytest.raises(ImportError, match="rlhf_spmd.config.make_workload is now rlhf_spmd.config.options.make_"):
        exec("from rlhf_spmd.config import make_workload")
    assert options.make_workload and not hasattr(sys.modules["rlhf_spmd.config"], "__wrapped__")


def test_a_page_of_a_user(tmp_path):
    (tmp_path / "mine.py").write_text("from rlhf_spmd.presets import load\n", encoding="utf-8")
    with pytest.raises(UserError, match="mine.py.*rlhf_spmd.presets is now rlhf_spmd.config.presets"):
        load_strategy(str(tmp_path / "mine.py"))


def test_modules_that_never_were():
    code = "import rlhf_spmd.presents"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'rlhf_spmd.presents'\n")

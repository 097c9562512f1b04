"""Whose code an environment is: its file is an input of a run, and a run folder that names one says so."""

import json

from rlhf_spmd.config import presets
from rlhf_spmd.config.checks import foreign_functions
from rlhf_spmd.config.file import read_config_file
from rlhf_spmd.runtime.run.inputs import functions_fingerprints


def test_the_file_of_an_environment_is_an_input(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text("TOOLS = []\n", encoding="utf-8")
    config = presets.load("tools", [f"environment={file}:TOOLS"])
    before = functions_fingerprints(config)
    assert f"environment in {file}" in before
    file.write_text("TOOLS = [print]\n", encoding="utf-8")
    after = functions_fingerprints(config)
    assert [name for name in before if before[name] != after[name]] == [f"environment in {file}"]
    assert not [name for name in functions_fingerprints(presets.load("tools")) if name.startswith("environment")]


def test_a_run_folder_that_names_an_environment_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"preset": "tiny", "environment": "mine.py:E"}), encoding="utf-8")
    assert read_config_file(str(tmp_path / "config.json")).code == {"environment": "mine.py:E"}
    assert foreign_functions("mine.py:E", "rlhf_spmd.embedded.table_tools:Table") == ["mine.py:E"]

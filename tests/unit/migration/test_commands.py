"""Commands of TRL, verl and OpenRLHF, as their documents show them, become options that mean the same.

Checked are the sizes and numbers that decide what is learned, and the model and the data.
"""

import shlex
import tomllib
from pathlib import Path

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.migration.sources import read_words
from rlhf_spmd.migration.translate import translate

COMMANDS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_means_the_same(name, tmp_path, capsys):
    program, words = name.partition(":")[0], shlex.split(COMMANDS[name]["command"])
    found = translate(read_words(program, words))
    meaning = found.options | {key: text.partition("  (")[0] for key, text in found.later.items()}
    expected = COMMANDS[name]["means"]
    assert {key: meaning.get(key) for key in expected} == expected
    assert main(["coming-from", program, *words]) == 0, "model, data and batch are in it"
    text = capsys.readouterr().out
    assert "Unknown" not in text
    path = tmp_path / "options.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["check", "--config", str(path)]) in (0, 1), "1: it needs more memory"

"""Files cannot make this program run code: only code that the user named runs. That nothing is unpickled is a rule of
ruff (pyproject.toml)."""

import json

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import load_tokenizer
from tests.folders import write_model
from tests.size_rules import REPOSITORY as ROOT


def test_code_in_a_model_folder_does_not_run(tmp_path):
    folder, marker = write_model(tmp_path / "model"), tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n", encoding="utf-8")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        values["auto_map"] = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
        values |= {"tokenizer_class": "Own", "model_type": "llama"} if name != "config.json" else {}
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    (folder / "tokenizer.json").unlink()  # so that transformers must find a class for the tokenizer
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load_tokenizer(folder)
    assert not marker.exists()


def test_a_strategy_in_the_working_folder_does_not_hide_ours(tmp_path, monkeypatch):
    from rlhf_spmd.pages.strategy import load_strategy

    (tmp_path / "separation.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_strategy("separation").source == (ROOT / "strategies" / "separation.py").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="unknown strategy 'mine'"):  # a file is named as one: mine.py
        load_strategy("mine")

"""What a checkpoint records of a run's inputs and surroundings."""

import shutil
from types import SimpleNamespace

from transformers import AutoTokenizer, GenerationConfig

from rlhf_spmd.config import presets
from rlhf_spmd.model.adapters.merge import merge
from rlhf_spmd.model.hf import ChatTemplate
from rlhf_spmd.runtime.records.run_folder import RunFolder
from rlhf_spmd.runtime.run import recorded
from tests.folders import write_all
from tests.runs import OneRank, RunOf, load


def test_a_change_of_any_file_changes_a_fingerprint(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(presets.load("tiny").models["actor"], folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("", encoding="utf-8")
    (tmp_path / "r.py").write_text("def f(prompts, responses): ...\n", encoding="utf-8")
    words = [f"models.actor={folder}", f"reward_function={tmp_path / 'r.py'}:f"]
    prompts = SimpleNamespace(fingerprints=lambda file: {f"prompts in {file}": "1"})
    calls = SimpleNamespace(workflow=SimpleNamespace(train_calls=()))
    config = presets.load("tiny", words)
    job = SimpleNamespace(config=config, prompts=prompts, workload=calls, world=OneRank())
    prepared = SimpleNamespace(job=job, evaluation=None)
    before = recorded.inputs(prepared)
    changes = {
        "chat_template.jinja": "model",
        "additional_chat_templates/tool_use.jinja": "model",
        "generation_config.json": "model",
        "../r.py": "reward function",
    }
    for file, name in changes.items():
        with (folder / file).open("a", encoding="utf-8") as opened:
            opened.write(" \n")
        now = recorded.inputs(prepared)
        (changed,) = [one for one in now if now[one] != before[one]]
        assert changed.startswith(name) and now.keys() == before.keys()
        before = now


def test_every_folder_has_what_the_model_was_trained_with(tmp_path):
    """The best whole models, adapters, their merges and what goes on from them, as transformers reads
    them: texts of conversations with and without tools, ends, and tokens that are never drawn."""
    words = [*write_all(tmp_path, vocab_size=66, eos_token_ids=(1, 7)), "generation.stop=ba"]
    base, given = tmp_path / "actor", tmp_path / "t.jinja"
    named = base / "additional_chat_templates"
    named.mkdir()
    for path, text in ((base / "chat_template", "own"), (named / "tool_use", "tools"), (named / "rag", "named")):
        path.with_suffix(".jinja").write_text(text, encoding="utf-8")
    given.write_text("{{ tools }}[{{ messages[0].content }}]\r\n", encoding="utf-8", newline="")
    chat, tools = [{"role": "user", "content": "da"}], [{"type": "function", "function": {"name": "f"}}]
    asked = [f"data.chat_template={given}"]
    runs = {"own": [], "whole": asked, "adapter": [*asked, "lora.rank=2"]}
    runs["on"] = [f"models.actor={tmp_path / 'adapter' / 'best' / 'actor'}"]
    folders = {}
    for name, more in runs.items():
        run = RunOf(load(words, *more))
        rendered = ChatTemplate(run.config.files().tokenizer, run.config.data.chat_template, started="")
        given.rename(tmp_path / "gone") if more[:1] == asked else None  # a run has read it
        (tmp_path / name).mkdir()
        recorded.save_models(run.job, RunFolder(tmp_path / name), "best")
        (tmp_path / "gone").rename(given) if more[:1] == asked else None
        expected = [rendered.render("", chat, tools=one) for one in (None, tools)]
        folders[tmp_path / name / "best" / "actor"] = expected
    merge(tmp_path / "on" / "best" / "actor", tmp_path / "merged", base=base)
    folders[tmp_path / "merged"] = expected
    for folder, expected in folders.items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        options = {"tokenize": False, "add_generation_prompt": True}
        found = [tokenizer.apply_chat_template(chat, tools=one, **options) for one in (None, tools)]
        assert found == expected, folder
        assert tokenizer.get_chat_template("rag") == "named"
        generation = GenerationConfig.from_pretrained(folder)
        assert ({*generation.eos_token_id}, generation.stop_strings) == ({1, 7}, ["ba"]), folder
        assert generation.suppress_tokens == [63, 64, 65], folder

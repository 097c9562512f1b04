"""Chat templates that write the time, to the microsecond: resumed runs and files have that of the first start."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from rlhf_spmd import embedded

CLOCK = "{{ bos_token }}{{ strftime_now('%d %b %Y %H:%M:%S.%f') }} {% if greeting %}{{ greeting }}{% endif %}"
TEMPLATE = CLOCK + "{% for m in messages %}{{ m.content }}{% endfor %}"
SMALL = ["rollout_batch=4", "mini_batch=4", "num_samples=1", "data.max_prompt=200", "generation.max_new_tokens=8"]


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("templates")
    (folder / "t.jinja").write_text(TEMPLATE, encoding="utf-8")
    rows = [json.loads(line) for line in embedded.path_of("prompts.jsonl").read_text(encoding="utf-8").split("\n")[:6]]
    for name, part in (("rows", rows[:4]), ("held-out", rows[4:])):
        chats = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    words = [f"data.prompts={folder / 'rows.jsonl'}", f"data.chat_template={folder / 't.jinja'}", *SMALL]
    return ["--preset", "tiny", *words, "--runs", str(folder / "runs")]


def run(warm, *words: object) -> str:
    status, stdout, stderr = warm.run([*words])
    assert status == 0, stderr
    return stdout


def prompt_of(folder: Path) -> str:
    return json.loads((folder / "samples.jsonl").read_text(encoding="utf-8").partition("\n")[0])["prompt"]


@pytest.fixture(scope="module")
def finished(options, warm) -> Path:
    more = ["--algorithm", "grpo", "reward_function=rlhf_spmd.rewards:num_words", "samples_per_prompt=2"]
    more += [f"eval.prompts={Path(options[-1]).with_name('held-out.jsonl')}", "iterations=1"]
    more += ['data.chat_template_kwargs={"greeting": "Hello"}', "mini_batch=8", "--name", "a"]
    stdout = run(warm, "train", *options, *more)
    assert ", which the chat template writes" in stdout
    return Path(options[-1]) / "a"


def test_a_resumed_run_has_the_time_of_its_first_start(finished, warm, tmp_path):
    """From the checkpoint, or from the run folder where there is no checkpoint."""
    again, anew = (shutil.copytree(finished, tmp_path / name) for name in ("again", "anew"))
    shutil.rmtree(anew / "checkpoints")
    for folder in (again, anew):
        stdout = run(warm, "train", "--resume", folder, "iterations=2")
        assert "resumed" in stdout and "earlier version" not in stdout
        started = json.loads((folder / "program.json").read_text(encoding="utf-8"))["started"]
        newest = json.loads((folder / "checkpoints" / "iteration-000002" / "program.json").read_text(encoding="utf-8"))
        assert (
            started
            == newest["started"]
            == json.loads((finished / "program.json").read_text(encoding="utf-8"))["started"]
        )
        assert prompt_of(folder) == prompt_of(finished) and " Hello" in prompt_of(folder)
    rows = [(folder / "metrics.jsonl").read_text(encoding="utf-8") for folder in (again, anew)]
    assert len({json.loads(text.split("\n")[1])["tokens_sha256"] for text in rows}) == 1


def test_a_run_of_an_earlier_version_is_told_the_cause(finished, warm, tmp_path):
    """Its time can be added by hand."""
    old = shutil.copytree(finished, tmp_path / "old")
    checkpoint = old / "checkpoints" / "iteration-000001"
    started = json.loads((old / "program.json").read_text(encoding="utf-8"))["started"]
    for path in (old / "program.json", checkpoint / "program.json"):
        path.write_text(
            json.dumps(
                {name: one for name, one in json.loads(path.read_text(encoding="utf-8")).items() if name != "started"}
            ),
            encoding="utf-8",
        )
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    content = (checkpoint / "program.json").read_bytes()
    manifest["files"]["program.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    status, _, stderr = warm.run(["train", "--resume", old, "iterations=2"])
    assert (
        status == 2 and "rows.jsonl changed since" in stderr and "their chat template writes the time, and an" in stderr
    )
    assert f'add it to {old / "program.json"}, such as "started": "' in stderr
    (old / "program.json").write_text(json.dumps({"strategy": "flattening", "started": started}), encoding="utf-8")
    assert "earlier version" not in run(warm, "train", "--resume", old, "iterations=2")
    for path in (old / "program.json", old / "checkpoints"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert "did not keep the time of the first start" in run(warm, "train", "--resume", old, "iterations=1")


def test_a_file_of_precomputed_logprobs_brings_its_time(options, warm, tmp_path):
    said = [[{"role": "assistant", "content": text}] for text in (" The boat was perfect.", " She felt sleepy.")]
    rows = [json.loads(line) for line in Path(options[2].partition("=")[2]).read_text(encoding="utf-8").split("\n")[:4]]
    pairs = [row | {"chosen": said[0], "rejected": said[1]} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    words = [*options, "--algorithm", "dpo", "iterations=1", f"data.prompts={tmp_path / 'pairs.jsonl'}"]
    del words[words.index("--runs") : words.index("--runs") + 2]
    run(warm, "precompute", *words, "--out", tmp_path / "l.safetensors")
    words += ["--runs", tmp_path, "--name", "b", f"data.precomputed_logprobs={tmp_path / 'l.safetensors'}"]
    run(warm, "train", *words)
    run(warm, "train", "--resume", tmp_path / "b", "iterations=2")


def test_generate_gives_a_template_what_options_and_rows_say(options, warm, tmp_path):
    template, rows = (options[number].partition("=")[2] for number in (3, 2))
    words = ["--model", embedded.path_of("actor"), "--prompts", rows, f"data.chat_template={template}"]
    words += ["generation.max_new_tokens=4", "--out", tmp_path / "out.jsonl"]
    run(warm, "generate", *words, 'data.chat_template_kwargs={"greeting": "Hello"}')
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert len({line["prompt"].partition(" Hello")[0] for line in lines}) == 1 and " Hello" in lines[0]["prompt"]
    status, _, stderr = warm.run(["generate", *words, "--overwrite", 'data.chat_template_kwargs={"greting": "Hello"}'])
    assert status == 2 and "data.chat_template_kwargs has 'greting', which the chat template of" in stderr
    status, _, stderr = warm.run(["generate", *words, "--overwrite", 'data.chat_template_kwargs={"tools": []}'])
    assert status == 2 and "data.chat_template_kwargs has 'tools', which every chat template is given" in stderr

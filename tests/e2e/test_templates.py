"""A chat template that writes the time, to the microsecond: a resumed run has that of its first start."""

import json

from rlhf_spmd import embedded

TEMPLATE = (
    "{{ bos_token }}{{ strftime_now('%d %b %Y %H:%M:%S.%f') }} {{ greeting }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
SMALL = ["rollout_batch=4", "mini_batch=8", "num_samples=1", "data.max_prompt=200", "generation.max_new_tokens=8"]


def test_a_resumed_run_has_the_time_of_its_first_start(warm, tmp_path):
    """Also in its evaluations."""
    (tmp_path / "t.jinja").write_text(TEMPLATE, encoding="utf-8")
    rows = [json.loads(line) for line in embedded.path_of("prompts.jsonl").read_text(encoding="utf-8").split("\n")[:6]]
    for name, part in (("rows", rows[:4]), ("held-out", rows[4:])):
        chats = [{"prompt": None, "messages": [{"role": "user", "content": row["prompt"]}]} for row in part]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    words = [f"data.prompts={tmp_path / 'rows.jsonl'}", f"eval.prompts={tmp_path / 'held-out.jsonl'}", *SMALL]
    words += [f"data.chat_template={tmp_path / 't.jinja'}", 'data.chat_template_kwargs={"greeting": "Hello"}']
    words += ["samples_per_prompt=2", "reward_function=rlhf_spmd.rewards:num_words", "iterations=1"]
    words += ["--preset", "tiny", "--algorithm", "grpo", "--runs", str(tmp_path), "--name", "a"]
    status, stdout, stderr = warm.run(["train", *words])
    assert status == 0 and "the chat template writes the time " in stdout, stderr
    run = tmp_path / "a"
    samples = (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    started = json.loads((run / "program.json").read_text(encoding="utf-8"))["started"]
    assert samples and all(f"{started[17:26]} Hello" in json.loads(line)["prompt"] for line in samples)
    status, stdout, stderr = warm.run(["train", "--resume", run, "iterations=2"])
    assert status == 0 and "resumed" in stdout, stderr
    newest = run / "checkpoints" / "iteration-000002" / "program.json"
    assert json.loads(newest.read_text(encoding="utf-8"))["started"] == started

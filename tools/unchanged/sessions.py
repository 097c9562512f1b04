"""The goldens of `tools unchanged` that are sessions: what a user types one after the other, beyond runs of PPO.

GRPO with two reward functions, tools with a kill, one iteration ahead, LoRA with its merge, SFT and DPO on chat rows,
generate and evaluate. Of each what does not tell the time: metrics, evaluations, tensors, rows that were written, and
the line of JSON with which a command ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

from bench.rows import REPOSITORY, TIMED, read_rows
from rlhf_spmd import embedded
from tools.unchanged.runs import LIMIT_S, leaves, tensors

# metrics of tools that depend on seconds, or on what the rows that answered together were
OF_TOOLS = ("answers", "tool_s", "tool_p95_s", "calls_repeated", "parity_max_abs", "parity_mean_abs")
OF_A_PLACE = ("run", "folder", "out", "actor", "seconds", "wall_s", "rows_per_s", "tokens_per_s", "peak_rss", "run_dir")
REWARDS = """\
def right(responses, answer):
    return [float(response.strip() == wanted) for response, wanted in zip(responses, answer)]


def short(responses):
    return [1.0 / (1 + len(response)) for response in responses]
"""
CHAT = ("--model", "{tools}", "data.max_prompt=40", "generation.max_new_tokens=8", "iterations=2", "rollout_batch=8")
CHAT += ("mini_batch=4", "micro_batch=2")
GRPO = ("--preset", "arithmetic", "iterations=2", "rollout_batch=8", "samples_per_prompt=4", "mini_batch=16")
GRPO += ("eval.num_prompts=16", "eval.every=1", "rollouts.every=1")
TOOLS = ("--preset", "tools", "iterations=2", "rollout_batch=4", "samples_per_prompt=4", "mini_batch=16")
TOOLS += ("eval.num_prompts=8", "eval.every=2", "checkpoint.every=1")
AHEAD = ("--preset", "tiny", "--strategy", "separation", "strategy.ahead=1", "iterations=3", "rollout_batch=16")
AHEAD += ("mini_batch=8", "generation.max_new_tokens=8")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line on some ranks; {here}, {tools} and {tiny} in a word are folders.

    name: of the run that it makes; empty: it makes none.
    dies: it is killed after its first iteration.
    """

    ranks: int
    words: tuple[str, ...]
    name: str = ""
    dies: bool = False

    def line(self, here: Path) -> list[str]:
        """Returns what to start."""
        folders = {"here": here, "tools": embedded.path_of("tools/actor"), "tiny": embedded.path_of("tiny/actor")}
        words = [*self.words, *(["--runs", "{here}", "--name", self.name] if self.name else [])]
        mpirun = str(Path(sys.executable).with_name("mpirun"))
        line = [mpirun, "-n", str(self.ranks), sys.executable, "-m", "rlhf_spmd", *words]
        return [word.format(**folders) if "{" in word else word for word in line]


SESSIONS: dict[str, tuple[Command, ...]] = {
    "grpo with two reward functions": (
        Command(2, ("train", *GRPO, "reward_function={here}/rewards.py:right,{here}/rewards.py:short"), "grpo"),
        Command(1, ("rollouts", "{here}/grpo", "--limit", "1", "--json")),
    ),
    "tools with a kill": (
        Command(2, ("train", *TOOLS), "tools", dies=True),
        Command(2, ("train", "--resume", "{here}/tools")),
    ),
    "one iteration ahead": (
        Command(4, ("train", *AHEAD, "checkpoint.every=1"), "ahead"),
        Command(2, ("train", "--resume", "{here}/ahead", "iterations=4")),
    ),
    "lora and its merge": (
        Command(2, ("train", *GRPO, "lora.rank=4", "grpo.kl_coef=0.01", "optimizer.actor_lr=1e-2"), "lora"),
        Command(1, ("convert", "{here}/lora/actor", "{here}/merged", "--merge", "--json")),
    ),
    "sft and dpo on chat rows": (
        Command(2, ("train", "--algorithm", "sft", *CHAT, "data.prompts={here}/chat.jsonl"), "sft"),
        Command(2, ("train", "--algorithm", "dpo", *CHAT, "data.prompts={here}/pairs.jsonl"), "dpo"),
    ),
    "generate and evaluate": (
        Command(
            2,
            (
                "generate",
                "--model",
                "{tools}",
                "--prompts",
                "{here}/chat.jsonl",
                "--out",
                "{here}/out.jsonl",
                "generation.max_new_tokens=8",
            ),
        ),
        Command(2, ("evaluate", *GRPO, "eval.samples_per_prompt=3", "eval.temperature=1", "--json")),
    ),
}


def goldens(folder: Path) -> dict[str, dict[str, str] | list[str]]:
    """Returns what every session left, by its name, and the tokens of data sets. folder: for files and runs."""
    found: dict[str, dict[str, str] | list[str]] = {**token_goldens(folder / "forms")}
    for number, (name, commands) in enumerate(SESSIONS.items()):
        here = folder / f"session-{number}"
        write_files(here)
        for command in commands:
            start(command, here)
        found[f"session {name}"] = left_in(here)
        print(f"  {name}", file=sys.stderr, flush=True)
    return found


def write_files(here: Path) -> None:
    """Writes the reward functions, conversations of several turns, and pairs of them."""
    here.mkdir()
    (here / "rewards.py").write_text(REWARDS, encoding="utf-8")
    chats, pairs = [], []
    for row in read_rows(embedded.path_of("tools/prompts.jsonl"))[:12]:
        (question,) = row["prompt"]
        answer = {"role": "assistant", "content": row["answer"]}
        chats.append({"messages": [question, answer, question, {"role": "assistant", "content": "0"}]})
        pairs.append({"prompt": [question], "chosen": [answer], "rejected": [{"role": "assistant", "content": "1"}]})
    for name, rows in (("chat.jsonl", chats), ("pairs.jsonl", pairs)):
        (here / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def start(command: Command, here: Path) -> None:
    """Runs a command, and keeps the last line of its output. Raises if it fails."""
    line, environment = command.line(here), os.environ | {"OMP_NUM_THREADS": "1"}
    log = here / f"{command.words[0]}.log"
    with (
        log.open("w", encoding="utf-8") as out,
        subprocess.Popen(line, cwd=REPOSITORY, env=environment, stdout=out, stderr=out) as process,
    ):
        if command.dies:
            _kill(process, here / command.name)
        elif process.wait(LIMIT_S):
            raise RuntimeError(f"{' '.join(line)} ended with {process.returncode}:\n{log.read_text(encoding='utf-8')}")


def _kill(process: subprocess.Popen[bytes], run: Path) -> None:
    """Kills a launcher once its run has done an iteration, and waits until nobody holds the run folder."""
    end = time.monotonic() + LIMIT_S
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(6)  # until the supervisors have seen it


def left_in(here: Path) -> dict[str, str]:
    """Returns what is compared of a session's folder, as names and texts."""
    found: dict[str, str] = {}
    for path in sorted(here.rglob("*")):
        name = path.relative_to(here).as_posix()
        if "checkpoints" in path.parts or "journal" in path.parts or path.parent == here and path.suffix == ".py":
            continue
        if path.suffix == ".safetensors":
            found |= {f"{name} {tensor}": text for tensor, text in tensors(path).items()}
        elif path.suffix == ".jsonl" and (path.parent != here or path.name == "out.jsonl"):
            for number, row in enumerate(read_rows(path)):
                found |= leaves(f"{name} {number}", timeless(row))
        elif path.suffix == ".log" and path.parent == here:
            found |= leaves(name, last_line(path))
    return found


def last_line(path: Path) -> dict:
    """Returns the last object of JSON in the output of a command, after which a launcher may pass on stderr; empty:
    there is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((timeless(json.loads(line)) for line in reversed(lines) if line.startswith("{")), {})


def timeless(row: dict) -> dict:
    """Returns a row without what tells the time or the place."""
    return {name: value for name, value in row.items() if name not in (*TIMED, *OF_TOOLS, *OF_A_PLACE)}


# ---- tokens of data sets ---------------------------------------------------------------------------------------------

FORMS = (  # algorithm, model, file, further options
    ("grpo", "tools", "chat.jsonl", ("data.key=messages",)),
    ("sft", "tools", "chat.jsonl", ()),
    ("sft", "tools", "chat.jsonl", ("data.turns=all",)),
    ("sft", "tools", "shared.jsonl", ()),
    ("dpo", "tools", "pairs.jsonl", ()),
    ("sft", "tiny", "answers.csv", ()),
    ("sft", "tiny", "answers.parquet", ()),
    ("sft", "tiny", "answers.json", ()),
    ("ppo", "tiny", "lines.txt", ()),
    ("ppo", "tiny", str(embedded.path_of("tiny/prompts.jsonl")), ()),
    ("grpo", "arithmetic", str(embedded.path_of("arithmetic/prompts.jsonl")), ()),
    ("reward_model", "tiny", str(embedded.path_of("tiny/pairs.jsonl")), ()),
)


def token_goldens(here: Path) -> dict[str, list[str]]:
    """Returns hashes of tokens, other columns and the order of rows of each form of a data set."""
    from rlhf_spmd.config import presets
    from rlhf_spmd.model.hf import load_tokenizer, read_config
    from rlhf_spmd.runtime.run.inputs import read_prompts
    from rlhf_spmd.runtime.run.prepare import shared_vocabulary

    write_forms(here)
    found = {}
    for algorithm, model, file, words in FORMS:
        folder = embedded.path_of(f"{model}/actor")
        more = [f"data.prompts={here / file}", "data.max_prompt=60", "generation.max_new_tokens=40"]
        config = presets.load("model", [*more, *words], algorithm=algorithm, model=str(folder))
        tokenizer = load_tokenizer(folder)
        eos_ids = tokenizer.eos_ids(read_config(folder))
        start = {"started": ""} if "started" in signature(read_prompts).parameters else {}  # of earlier commits
        prompts = read_prompts(config, tokenizer, shared_vocabulary(config, tokenizer), eos_ids, **start)
        lines = [prompts.tokens_fingerprint(), prompts.columns_fingerprint(), str(prompts.batch(0, 8))]
        found[" ".join(["tokens", algorithm, model, Path(file).name, *words])] = lines
    return found


def write_forms(here: Path) -> None:
    """Writes the data sets of FORMS: conversations, and the same answers in several kinds of file."""
    import csv

    import pyarrow
    import pyarrow.parquet

    write_files(here)
    names = {"user": "human", "assistant": "gpt"}
    with (here / "shared.jsonl").open("w", encoding="utf-8") as file:
        for row in read_rows(here / "chat.jsonl"):
            said = [{"from": names[one["role"]], "value": one["content"]} for one in row["messages"]]
            file.write(json.dumps({"conversations": said}) + "\n")
    answers = read_rows(embedded.path_of("tiny/answers.jsonl"))[:40]
    with (here / "answers.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, answers[0])
        writer.writeheader()
        writer.writerows(answers)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(answers), here / "answers.parquet")
    (here / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    (here / "lines.txt").write_text("".join(f"{row['prompt']}\n" for row in answers), encoding="utf-8")

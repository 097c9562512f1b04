"""`python -m rlhf_spmd check`: at once, without torch or MPI, an answer for people and one for machines."""

import resource
import subprocess
import sys

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.command_line import checks
from tests.pages import write_page

HEAVY = {"torch", "mpi4py", "transformers", "deepspeed", "triton", "safetensors", "tokenizers", "matplotlib"}
FITS = ["check", "flattening", "--layout", "1x4", "--preset", "llama-7b", "--device-type", "cpu"]


def run(*arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, *python, "-m", "rlhf_spmd", *arguments, "--json"]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)


def processor_seconds(*arguments: str) -> tuple[float, subprocess.CompletedProcess]:
    """Returns what a Python program uses of the processor from the start of the interpreter to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, encoding="utf-8", timeout=300, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


@pytest.mark.timed
def test_hundreds_of_devices_take_seconds():
    """Nothing in the plan may compare all ranks with all ranks for every rank: that was a minute and a half."""
    options = ("strategy.zero=3", "mini_batch=512", "rollout_batch=512")
    words = ("check", "flattening", "--layout", "64x8", "--preset", "llama-7b", *options)
    check_s, done = processor_seconds("-m", "rlhf_spmd", *words)
    assert done.returncode == 0, done.stderr
    assert check_s < 30.0


def test_nothing_heavy_is_imported(tmp_path):
    """No torch for functions that need it, which a child imports."""
    (tmp_path / "c.yaml").write_text("seed: 3\n", encoding="utf-8")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8")
    (tmp_path / "r.py").write_text("import torch\n\ndef right(responses, answer): ...\n", encoding="utf-8")
    own = ["--algorithm", "grpo", f"data.prompts={tmp_path / 'p.jsonl'}", f"reward_function={tmp_path / 'r.py'}:right"]
    for words in ([], ["--config", str(tmp_path / "c.yaml")], own):
        done = run(*FITS, *words, python=("-X", "importtime"))
        found = [
            line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")
        ]
        assert "rlhf_spmd.plan.proof.check" in found and done.returncode == 0
        assert {name.partition(".")[0] for name in found} & HEAVY == set()


# ---- the rest in this process: it is the same main() ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["arguments are required", "--help"]),
        (["chekc"], ["unknown subcommand 'chekc' (did you mean 'check'?); known: train, "]),
        (["check"], ["STRATEGY"]),
        (["check", "flatening"], ["unknown strategy 'flatening'", "did you mean 'flattening'"]),
        (["check", "none.py"], ["none.py does not exist"]),
        (["check", "flattening", "--preset", "llama-7"], ["unknown preset 'llama-7'", "llama-7b"]),
        (["check", "flattening", "--layout", "0x8"], ["layout '0x8'"]),
        (["check", "flattening", "--rank", "4"], ["--rank 4", "1x4", "0-3"]),
        (["check", "flattening", "--lay", "1x4"], ["unknown argument '--lay' (did you mean '--layout'?)"]),
        (
            ["check", "flattening", "--algorthm", "grpo"],
            ["unknown argument '--algorthm' (did you mean '--algorithm'?)"],
        ),
        (["check", "flattening", "extra"], ["check takes one strategy", "drop extra"]),
        (["check", "flattening", "iterations=none"], ["iterations=none", "valid integer"]),
        (["check", "flattening", "itertions=3"], ["'itertions'", "did you mean 'iterations'"]),
        (["check", "flattening", "mini_batch=100"], ["mini_batch=100", "512"]),
        (["check", "flattening", "strategy.zeero=1"], ["strategy flattening", "did you mean 'zero'?"]),
        (["check", "flattening", "strategy.zero=7"], ["strategy flattening", "critic_train on ranks 0-3", "stage 7"]),
        (["check", "separation", "strategy.generation_ranks=4"], ["leave 0 to train", "from 1 to 3"]),
        (["check", "separation", "strategy.generation_ranks=0"], ["0 generation ranks of 4", "from 1 to 3"]),
        (
            ["check", "separation", "--layout", "1x2", "strategy.generation_ranks=2"],
            ["set strategy.generation_ranks=1"],
        ),
        (
            ["check", "separation", "--layout", "1x2", "strategy.ratios=actor=1/2,critic=1/2"],
            ["no rank of 1", "start more ranks"],
        ),
        (["check", "interleaving1", "strategy.ratios=reference=1/2,reward=3/4"], ["reference, reward sum to 5/4"]),
        (["check", "separation", "--preset", "tiny", "--algorithm", "sft"], ["there is nothing to "]),
        (["check", "flattening", "--model", "no/folder"], ["no/folder/config.json does not exist"]),
        (["convert", "a.gguf", "folder", "iterations=3"], ["unknown argument 'iterations=3'"]),
    ],
)
def test_mistakes_are_one_line_on_stderr(arguments, words, capsys):
    if arguments[:1] == ["check"] and "--preset" not in arguments and len(arguments) > 1:
        arguments = [*arguments[:2], "--preset", "llama-7b", *arguments[2:]]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("rlhf_spmd: error: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("data.prompts=p.jsonl reward_function=r.py:right", ""),  # a column that only the second row has
        ("data.prompts=p.jsonl reward_function=r.py:places", "no parameter of it receives the response (p, r)"),
        ("data.prompts=p.jsonl reward_function=r.py:other", "asks for solution, which is not a column"),
        (
            "data.prompts=p.jsonl reward_function=r.py:verl",
            "asks for ground_truth, which is not a column of the data set (answer)",
        ),
        ("data.prompts=p.jsonl,q.txt reward_function=r.py:source", ""),
        ("data.prompts=none.jsonl reward_function=r.py:other", "prompt file none.jsonl does not exist"),
        ("data.prompts=p.jsonl reward_function=r.py:right eval.prompts=q.txt", "evaluation on q.txt: reward function"),
        ("data.prompts=p.jsonl reward_function=m:f", "No module named 'm'"),
        ("data.prompts=p.jsonl reward_function=r.py", "write it as module:function"),
        ("data.prompts=p.jsonl reward_function=r.py:rihgt", "did you mean 'right'?"),
        ("data.prompts=p.jsonl reward_function=none.py:right", "none.py does not exist"),
        ("data.prompts=p.jsonl reward_function=bad.py:right", "bad.py raised SyntaxError: "),
        ("data.prompts=p.jsonl reward_function=lacks.py:right", "No module named 'no_such_package'"),
    ],
)
def test_reward_functions_are_bound_as_a_run_binds_them(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "p.jsonl").write_text('{"prompt": "ba"}\n{"prompt": "be", "answer": "x"}\n', encoding="utf-8")
    (tmp_path / "q.txt").write_text("bo\n", encoding="utf-8")
    (tmp_path / "r.py").write_text(
        "def right(responses, answer): ...\ndef places(p, r): ...\ndef other(responses, solution): ...\n"
        "def verl(solution_str, ground_truth): ...\ndef source(responses, data_source): ...\n"
        "def gives(responses):\n    yield 1.0\n",
        encoding="utf-8",
    )
    (tmp_path / "bad.py").write_text("def right(responses: ...\n", encoding="utf-8")
    (tmp_path / "lacks.py").write_text("import no_such_package\ndef right(responses): ...\n", encoding="utf-8")
    assert main(["check", "flattening", "--layout", "1x2", "--algorithm", "grpo", *words.split()]) == bool(says)
    out, err = capsys.readouterr()
    kind = "Refused: 1 error." if says else "No findings: "
    assert says in out and err == "" and out.splitlines()[-2].startswith(kind)
    assert not {"r", "bad", "lacks", "m"} & set(sys.modules)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import time\ntime.sleep(60)", "importing it took more than 1 s"),
        ("import os\nos._exit(0)", "importing it took more than 30 s, or ended the process"),
        ("import torch", "it imports torch, which is not installed here"),
        ("import os\nassert os.environ['CUDA_VISIBLE_DEVICES'] == ''\nprint('hidden')", ""),
    ],
)
def test_named_functions_are_imported_in_a_child(text, says, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "IMPORT_S", 1 if "sleep" in text else 30)
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "r.py"
    path.write_text(f"{text}\ndef right(responses): ...\n", encoding="utf-8")
    words = ["check", "flattening", "--layout", "1x2", "--algorithm", "grpo", f"reward_function={path}:right"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"reward function {path}:right is not checked: {says}" in out if says else "not checked" not in out
    assert "hidden" not in out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([], ""),
        (
            [("scores_B, mask_BG, *, scale", "rewards_B, mask_BG, *, scale")],
            "token_weights(): no value for parameter 'rewards_B'",
        ),
        (
            [("def surrogate(logprobs_BG,", "def surrogate(logprobs_BG, rate,")],
            "surrogate(): no value for parameter 'rate'",
        ),
        (
            [("def surrogate(", "def surrogate_prepare(rate): ...\n\n\ndef surrogate(")],
            "surrogate_prepare(): no value for parameter 'rate'",
        ),
        (
            [('train("surrogate"', 'train("policy_loss"')],
            "policy_loss(): no value for parameter ",
        ),  # of surrogates.py
        ([("def surrogate(", "def other(")], "no function surrogate is in the algorithm file or in advantages, "),
    ],
)
def test_functions_of_a_page_are_bound_as_a_run_binds_them(changes, says, capsys, tmp_path):
    page = str(write_page(tmp_path, *changes))
    assert main(["check", "flattening", "--algorithm", page]) == bool(says)
    out = capsys.readouterr().out
    assert says in out and out.splitlines()[-2].startswith("Refused: 1 error." if says else "No findings: ")

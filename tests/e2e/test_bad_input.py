"""What a user gets wrong: one clear message from one rank that names culprit and mend, a non-zero exit of the whole
job within ten seconds, and no traceback. One case of each kind runs on two ranks; the others start the program as one
rank, or as `check` where the message depends on the number of ranks, and are slow tests. All are forks (tests/warm.py)
but those of STARTED."""

import json
import resource
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.folders import write_all, write_model
from tests.run_mpi import mpi_command, run_limited
from tests.unchanged import contents
from tests.unit.files.test_output import on_terminal
from tests.unit.model.adapters.test_files import change
from tests.unit.model.adapters.test_merge import make_adapter

LIMIT_S = 60.0  # for a hang
PROMISED_S = 10.0  # of a rank's processor time: by the clock a job takes longer beside other tests
NUM_RANKS = 2
STARTED = ("the command line", "a checkpoint")  # kinds that are launched as by a user


@dataclass(frozen=True)
class Case:
    """Options of one wrong run and what its message must say. `files` are written into the folder first.

    kind: of what goes wrong; None: of a kind that another case has on two ranks.
    by_check: with one rank there would be another message.
    """

    options: tuple[str, ...]
    says: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    kind: str | None = None
    by_check: bool = False


STRATEGY_HEAD = (
    "from rlhf_spmd.plan.layout import Layout\nfrom rlhf_spmd.plan.placement import Placement, split_by_ratio\n"
)


def strategy(body: str) -> str:
    """Returns a strategy module around one expression for the layout of the reward model."""
    return (
        STRATEGY_HEAD
        + "def place(workload, cluster):\n    everyone = Layout.data_parallel(cluster.ranks)\n"
        + f"    reward = {body}\n"
        + "    others = dict.fromkeys(('actor', 'critic', 'reference'), everyone)\n"
        + "    return Placement.by_model(workload, reward=reward, **others)\n"
    )


CASES = {
    "unknown strategy": Case(("--strategy", "flatening"), ("flatening", "did you mean 'flattening'")),
    "unknown key": Case(("ppo.klcoef=1",), ("ppo.klcoef", "did you mean 'ppo.kl_coef'"), kind="the options"),
    "a device that is not there": Case(("device=shared",), ("device=shared", "sees no device", "device=cpu")),
    "unknown option": Case(("--stategy", "flattening"), ("--stategy",), kind="the command line"),
    "call without ranks": Case(
        ("--strategy", "{folder}/s.py"),
        ("strategy s", "reward_infer", "no rank is left"),
        {"s.py": strategy("Layout.data_parallel(())")},
        by_check=True,
    ),
    "missing call": Case(
        ("--strategy", "{folder}/s.py"),
        ("strategy s", "critic_infer has no layout"),
        {
            "s.py": STRATEGY_HEAD
            + "def place(workload, cluster):\n    return Placement({c.name: Layout.data_parallel(cluster.ranks) "
            + "for c in workload.workflow.placed_calls if c.name != 'critic_infer'})\n"
        },
        by_check=True,
    ),
    "rank outside the world": Case(
        ("--strategy", "{folder}/s.py"),
        ("strategy s", "reward_infer", "rank 7 is outside the world of ranks 0 to 1", "at least 8 ranks"),
        {"s.py": strategy("Layout.data_parallel((0, 7))")},
        kind="the placement",
    ),
    "a cluster file with a typo": Case(
        ("--cluster", "{folder}/c.toml"),
        ("c.toml", "nodes.0.device", "Field required", "cluster_file.py"),
        {"c.toml": "[[nodes]]\ndevices = 2\n"},
    ),
    "a cluster of another size": Case(
        ("--cluster", "{folder}/c.toml"),
        ("c.toml has 3 devices", "2 ranks"),
        {"c.toml": '[[nodes]]\ndevices = 3\ndevice = "cpu"\n'},
        kind="the cluster",
    ),
    "an unknown option in a file": Case(
        ("--config", "{folder}/c.yaml"),
        ("c.yaml, line 3: unknown option 'ppo.klcoef'", "did you mean 'ppo.kl_coef'"),
        {"c.yaml": "seed: 1\nppo:\n  klcoef: 0.1\n"},
        kind="the file of options",
    ),
    "missing checkpoint": Case(("models.actor={folder}/nowhere",), ("nowhere", "config.json")),
    "truncated checkpoint": Case(("models.actor={folder}/cut",), ("model.safetensors",), kind="a checkpoint"),
    "unsupported family": Case(("models.actor={folder}/bloom",), ("bloom", "llama")),
    "null in config.json": Case(("models.actor={folder}/null",), ("null/config.json", "'rms_norm_eps' is None")),
    "an adapter without its base": Case(
        ("models.actor={folder}/adapter",), ("adapter holds an adapter for elsewhere", "lora.base=FOLDER")
    ),
    "adapters and full training": Case(
        ("models.actor={folder}/adapter", "lora.base={folder}/actor", "lora.actor.rank=0"),
        ("lora.actor.rank=0", "the actor goes on from the adapter in", "--merge"),
    ),
    "reward without a head": Case(
        ("models.reward={folder}/actor",), ("actor/model.safetensors", "no tensor score.weight", "give a folder")
    ),
    "tokenizer too large": Case(
        ("models.actor={folder}/small",), ("the prompt", "have 40 tokens", "belongs to", "small")
    ),
    "reference too small": Case(("models.reference={folder}/small",), ("the reference", "small", "40 tokens", "63")),
    "empty prompts": Case(("data.prompts={folder}/p.jsonl",), ("p.jsonl", "empty"), {"p.jsonl": ""}),
    "malformed prompts": Case(
        ("data.prompts={folder}/p.jsonl",),
        ("p.jsonl", "line 2"),
        {"p.jsonl": '{"prompt": "ba be"}\n{"prompt": "ba\n'},
        kind="the prompts",
    ),
    "long prompt": Case(
        ("data.prompts={folder}/p.txt",), ("p.txt", "line 2", "data.max_prompt"), {"p.txt": "ba\n" + "be " * 40 + "\n"}
    ),
    "a bad row of a second file": Case(
        ("data.prompts={models}/prompts.jsonl,{folder}/p.jsonl", "data.weights=1,2"),
        ("p.jsonl, line 2: the value of 'prompt' is a number, not a string",),
        {"p.jsonl": '{"prompt": "ba"}\n{"prompt": 3}\n'},
    ),
    "a file of prompts named twice": Case(
        ("data.prompts={models}/prompts.jsonl,{models}/prompts.jsonl",), ("prompts.jsonl twice", "data.weights")
    ),
    "missing prompts": Case(("data.prompts={folder}/no.jsonl",), ("no.jsonl",)),
    "reward raises": Case(
        ("reward_function={folder}/r.py:f",),
        ("r.py:f", "ValueError", "no such luck"),
        {"r.py": "def f(prompts, responses):\n    raise ValueError('no such luck')\n"},
        kind="an error in code of the user",
    ),
    "reward exits": Case(
        ("reward_function={folder}/r.py:f",),
        ("r.py:f", "SystemExit"),
        {"r.py": "import sys\ndef f(prompts, responses):\n    sys.exit(0)\n"},
        kind="an exit in code of the user",
    ),
    "strategy exits": Case(
        ("--strategy", "{folder}/s.py"),
        ("strategy s", "SystemExit"),
        {"s.py": strategy("exit(0)")},
        kind="an exit in a strategy",
    ),
    "reward of wrong count": Case(
        ("reward_function={folder}/r.py:f",), ("r.py:f",), {"r.py": "def f(prompts, responses):\n    return [1.0]\n"}
    ),
    "reward is NaN": Case(
        ("reward_function={folder}/r.py:f",),
        ("r.py:f", "nan"),
        {"r.py": "def f(prompts, responses):\n    return [float('nan')] * len(prompts)\n"},
    ),
    "reward crashes in a worker": Case(
        ("reward_function={folder}/r.py:f", "reward_workers=2"),
        ("r.py:f: its worker process exited with status 5 on response", "prompt '"),
        {"r.py": "import os\ndef f(prompts, responses):\n    os._exit(5)\n"},
        kind="a worker of a reward function",
    ),
    "reward that a worker cannot import": Case(
        ("reward_function={folder}/r.py:f", "reward_workers=1"),
        ("r.py", "ModuleNotFoundError", "install no_such_module"),
        {"r.py": "import no_such_module\ndef f(prompts, responses): ...\n"},
    ),
    "reward function missing": Case(
        ("reward_function={folder}/r.py:g",), ("r.py", "'g'"), {"r.py": "def f(prompts, responses): ...\n"}
    ),
    "an environment without the methods of one": Case(
        ("environment={folder}/e.py:Game",),
        ("e.py:Game", "it has no reset() (it has play)", "add reset(self, **columns)"),
        {"e.py": "class Game:\n    def play(self, move: int): ...\n"},
        kind="an environment",
    ),
    "a tool without types": Case(
        ("environment={folder}/e.py:add",),
        ("e.py:add", "the tool add can't be described", "missing a type hint"),
        {"e.py": 'def add(a, b):\n    """Adds.\n\n    Args:\n        a: One.\n        b: Other.\n    """\n'},
    ),
    "a template that changes earlier turns": Case(
        ("environment={folder}/e.py:Game", "data.chat_template={folder}/last.jinja"),
        ("last.jinja does not only add to what it wrote of earlier turns", "give data.chat_template=FILE"),
        {
            "e.py": "class Game:\n    def reset(self): ...\n    def step(self, text): ...\n",
            "last.jinja": "{{ messages[-1].content }}",
        },
    ),
    "top_p alone": Case(("generation.top_p=0.9",), ("generation.top_k",)),
    "mini-batch": Case(("mini_batch=7",), ("24 sequences", "mini_batch=7")),
    "too long for the model": Case(("generation.max_new_tokens=60",), ("68 tokens", "64")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns good models and prompts, and checkpoints that are bad or do not fit."""
    folder = tmp_path_factory.mktemp("bad")
    write_all(folder)
    write_model(folder / "cut")
    whole = (folder / "cut" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    shutil.copytree(folder / "actor", folder / "bloom")
    config = (folder / "bloom" / "config.json").read_text(encoding="utf-8").replace('"llama"', '"bloom"')
    (folder / "bloom" / "config.json").write_text(config, encoding="utf-8")
    shutil.copytree(folder / "actor", folder / "null")
    values = json.loads((folder / "null" / "config.json").read_text(encoding="utf-8"))
    (folder / "null" / "config.json").write_text(json.dumps(values | {"rms_norm_eps": None}), encoding="utf-8")
    write_model(folder / "small", vocab_size=40)
    make_adapter(folder / "adapter", folder / "actor")
    change(folder / "adapter", base_model_name_or_path="elsewhere")
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if case.kind else pytest.mark.slow) for name, case in CASES.items()]
)
def test_one_message(name, folder, warm, tmp_path):
    case = CASES[name]
    for file, text in case.files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    shown = folder if not case.files else tmp_path
    options = [option.format(folder=shown, models=folder) for option in case.options]
    before = contents(folder) | contents(tmp_path)
    if case.by_check:
        _, strategy, *overrides = options
        words = ["check", strategy, "--layout", f"1x{NUM_RANKS}", *write_all_once(folder), *overrides]
        status, stdout, stderr = warm.run(words)
    elif case.kind in STARTED:
        status, stdout, stderr = launched(folder, options, tmp_path)
    else:
        words = ["train", *write_all_once(folder), "--runs", tmp_path / "runs", *options]
        status, stdout, stderr = warm.run(words, 0 if case.kind is None else NUM_RANKS)
    output = stdout + stderr
    assert (contents(folder) | contents(tmp_path)).items() >= before.items()
    assert status not in (0, None), output
    assert output.count("rlhf_spmd: error:") == 1, output
    assert "Traceback" not in output, output
    for words in case.says:
        assert words in output, f"{words!r} is not in:\n{output}"


def launched(folder: Path, options: list[str], runs: Path) -> tuple[int | None, str, str]:
    """Returns status, standard output and standard error of a launch of two ranks, which must end in time."""
    used_s = processor_s()
    words = ["train", *write_all_once(folder), "--runs", str(runs / "runs"), *options]
    command = [*mpi_command(NUM_RANKS), sys.executable, "-m", "rlhf_spmd", *words]
    status, stdout, stderr = run_limited(command, limit_s=LIMIT_S)
    assert processor_s() - used_s < NUM_RANKS * PROMISED_S, stdout + stderr
    return status, stdout, stderr


def processor_s() -> float:
    """Returns processor seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_different_configs(folder, warm, tmp_path):
    """Ranks started with different options find out before they compute anything."""
    words = ["train", *write_all_once(folder), "--runs", str(tmp_path / "runs")]
    command = [*warm.command(1), *words, "seed=1", ":", "-n", "1", *warm.command(), *words, "seed=2"]
    status, stdout, stderr = run_limited(command, limit_s=LIMIT_S)
    assert status not in (0, None)
    assert stderr.count("rlhf_spmd: error:") == 1, stderr
    for words in ("option seed is not the same on every rank", "'1' on rank 0", "'2' on rank 1"):
        assert words in stderr, stderr
    assert "Traceback" not in stderr


def write_all_once(folder: Path) -> list[str]:
    """Returns the overrides of the module's good folder."""
    return [
        f"models.actor={folder / 'actor'}",
        f"models.reward={folder / 'reward'}",
        f"data.prompts={folder / 'prompts.jsonl'}",
        "data.max_prompt=8",
        "generation.max_new_tokens=10",
        "rollout_batch=24",
        "mini_batch=12",
        "iterations=2",
    ]


def test_a_message_stays_the_last_line_of_a_terminal():
    command = f"{sys.executable} -m rlhf_spmd train generation.temperature=-1; true"
    said = on_terminal(["sh", "-c", command], 80, TERM="xterm")
    assert said.endswith("rlhf_spmd: error: generation.temperature=-1: it should be greater than 0\n"), said

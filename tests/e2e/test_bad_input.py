"""What a user gets wrong: one clear message from one rank that names culprit and mend, a non-zero exit of the whole
job within ten seconds, and no traceback. One case of each kind runs on two ranks; the others start the program as one
rank, or as `check` where the message depends on the number of ranks. All are forks (tests/warm.py) but those of
STARTED."""

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
STARTED = ("the command line", "a checkpoint", "an exit in code of the user")  # kinds that are launched as by a user
TEMPLATE = Path(__file__).parents[2] / "strategies" / "_template.py"


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
    "missing strategy file": Case(("--strategy", "{folder}/no.py"), ("no.py", "does not exist")),
    "unknown preset": Case(("--preset", "tinny"), ("tinny", "did you mean 'tiny'")),
    "unknown key": Case(("ppo.klcoef=1",), ("ppo.klcoef", "did you mean 'ppo.kl_coef'"), kind="the options"),
    "wrong value": Case(("iterations=many",), ("iterations=many", "whole number")),
    "a device that is not there": Case(("device=shared",), ("device=shared", "sees no device", "device=cpu")),
    "not an option with its value": Case(("iterations",), ("iterations", "KEY=VALUE")),
    "unknown option": Case(("--stategy", "flattening"), ("--stategy",), kind="the command line"),
    "unknown strategy option": Case(("strategy.zerro=1",), ("flattening", "zerro", "did you mean 'strategy.zero'")),
    "call without ranks": Case(
        ("--strategy", "{folder}/s.py"),
        ("strategy s", "reward_infer", "no ranks"),
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
    "no training rank": Case(
        ("--strategy", "separation", "strategy.generation_ranks=2"),
        ("strategy separation: 2 generation ranks of 2 leave 0 to train", "set strategy.generation_ranks"),
        by_check=True,
    ),
    "a grid that is not the group": Case(
        ("--strategy", "{folder}/s.py"),
        ("strategy s", "reward_infer", "dp 2 x pp 1 x tp 2 is not the number of ranks, 2", "change one of them"),
        {"s.py": strategy("Layout((0, 1), dp=2, tp=2)")},
        by_check=True,
    ),
    "ranks that a grid does not divide": Case(
        ("--strategy", "reallocation", "strategy.training_tp=1", "strategy.training_pp=3"),
        ("strategy reallocation", "actor_train", "dp 1 x pp 3 x tp 1 is not the number of ranks, 2", "change one"),
        by_check=True,
    ),
    "more slices than heads": Case(
        ("--strategy", "{folder}/s.py", "models.reward={models}/narrow"),
        ("strategy s", "reward_infer", "tp 2 is more than the 1 key-value heads of reward", "lower tp to 1"),
        {"s.py": strategy("Layout((0, 1), dp=1, tp=2)")},
        by_check=True,
    ),
    "more stages than layers": Case(
        ("--strategy", "{folder}/s.py", "models.reward={models}/narrow"),
        ("strategy s", "reward_infer", "pp 2 is more than the 1 layers of reward", "lower pp"),
        {"s.py": strategy("Layout((0, 1), dp=1, pp=2)")},
        by_check=True,
    ),
    "stages with ZeRO 2": Case(
        ("--strategy", "reallocation", "strategy.training_tp=1", "strategy.training_pp=2", "strategy.zero=2"),
        ("strategy reallocation", "actor_train", "ZeRO 2 with pp 2", "use ZeRO 0 or 1, or pp 1"),
        by_check=True,
    ),
    "no such cluster file": Case(
        ("--strategy", "heterogeneous", "--cluster", "{folder}/no.toml"), ("no.toml", "cannot be read", ".toml file")
    ),
    "a cluster file with a typo": Case(
        ("--cluster", "{folder}/c.toml"),
        ("c.toml", "nodes.0.device", "Field required", "cluster_file.py"),
        {"c.toml": "[[nodes]]\ndevices = 2\n"},
    ),
    "a cluster of another size": Case(
        ("--cluster", "{folder}/c.toml"),
        ("c.toml has 3 devices", "this world has 2 ranks", "start one rank per device"),
        {"c.toml": '[[nodes]]\ndevices = 3\ndevice = "cpu"\n'},
        kind="the cluster",
    ),
    "one device type where two are wanted": Case(
        ("--strategy", "heterogeneous"), ("strategy heterogeneous", "1 (cpu)", "--cluster FILE"), by_check=True
    ),
    "no generation rank": Case(
        ("--strategy", "separation", "strategy.generation_ranks=0"),
        ("strategy separation: 0 generation ranks of 2 leave 2 to train", "at least one of each"),
        by_check=True,
    ),
    "more shadows than ranks": Case(
        ("--strategy", "separation", "strategy.ratios=actor=1/2,critic=1/2"),
        ("strategy separation: ratio 1/2 of critic rounds to no rank of 1", "start more ranks"),
        by_check=True,
    ),
    "ratios that do not add up": Case(
        ("--strategy", "interleaving2", "strategy.ratios=reference=1/2,reward=3/4"),
        ("strategy interleaving2: ratios of reference, reward sum to 5/4", "not to 1"),
        by_check=True,
    ),
    "ratio that is none": Case(
        ("--strategy", str(TEMPLATE), "strategy.ratio=abc"), ("strategy _template", "ratio 'abc'", "write 0.5 or 1/2")
    ),
    "ratio of no rank": Case(
        ("--strategy", "{folder}/s.py"),
        ("strategy s", "reward rounds to no rank"),
        {"s.py": strategy("Layout.data_parallel(split_by_ratio({'a': 0.9, 'reward': 0.1}, cluster.ranks)['reward'])")},
        by_check=True,
    ),
    "no such file of options": Case(("--config", "{folder}/no.yaml"), ("no.yaml can't be read", "give a file")),
    "an unknown option in a file": Case(
        ("--config", "{folder}/c.yaml"),
        ("c.yaml, line 3: unknown option 'ppo.klcoef'", "did you mean 'ppo.kl_coef'"),
        {"c.yaml": "seed: 1\nppo:\n  klcoef: 0.1\n"},
        kind="the file of options",
    ),
    "a wrong value in a file": Case(
        ("--config", "{folder}/c.yaml"), ("c.yaml, line 1: seed=many", "whole number"), {"c.yaml": "seed: many\n"}
    ),
    "an option twice in a file": Case(
        ("--config", "{folder}/c.yaml"),
        ("c.yaml, line 3: seed is already given in line 1; drop one",),
        {"c.yaml": "seed: 1\niterations: 2\nseed: 2\n"},
    ),
    "a tab in a file": Case(
        ("--config", "{folder}/c.yaml"),
        ("c.yaml, line 2: not valid YAML", "spaces"),
        {"c.yaml": "ppo:\n\tkl_coef: 0.1\n"},
    ),
    "an empty file of options": Case(("--config", "{folder}/c.yaml"), ("c.yaml is empty",), {"c.yaml": "\n"}),
    "a file of options that is a list": Case(
        ("--config", "{folder}/c.yaml"), ("c.yaml holds a sequence, not options",), {"c.yaml": "- seed\n"}
    ),
    "a strategy in a file that does not exist": Case(
        ("--config", "{folder}/c.yaml"),
        ("unknown strategy 'seperation'", "did you mean 'separation'"),
        {"c.yaml": "strategy: {name: seperation}\n"},
    ),
    "missing checkpoint": Case(("models.actor={folder}/nowhere",), ("nowhere", "config.json")),
    "truncated checkpoint": Case(("models.actor={folder}/cut",), ("model.safetensors",), kind="a checkpoint"),
    "unsupported family": Case(("models.actor={folder}/gpt2",), ("gpt2", "llama")),
    "null in config.json": Case(("models.actor={folder}/null",), ("null/config.json", "'rms_norm_eps' is None")),
    "adapters of no layer": Case(("lora.rank=2", "lora.targets=q_prj"), ("lora.targets", "q_prj", "'q_proj'")),
    "a rank above that of a layer": Case(("lora.rank=33",), ("lora.actor.rank=33", "lower the rank to 16, or leave")),
    "joined copies without adapters": Case(("lora.generate=joined",), ("no model with adapters generates", "drop")),
    "an adapter without its base": Case(
        ("models.actor={folder}/adapter",), ("adapter holds an adapter for elsewhere", "lora.base=FOLDER")
    ),
    "a critic for another base": Case(
        ("models.critic={folder}/of_critic", "models.actor={folder}/adapter", "lora.base={folder}/actor"),
        ("the critic goes on from the adapter in", "whose weights are not those of lora.base", "drop it"),
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
    "a second file that is not there": Case(
        ("data.prompts={models}/prompts.jsonl,{folder}/no.parquet",), ("no.parquet does not exist",)
    ),
    "a file of prompts named twice": Case(
        ("data.prompts={models}/prompts.jsonl,{models}/prompts.jsonl",), ("prompts.jsonl twice", "data.weights")
    ),
    "weights of other files": Case(("data.weights=1,2",), ("2 weights for 1 files of prompts", "give one for each")),
    "a weight of zero": Case(("data.prompts=a.txt,b.txt", "data.weights=1,0"), ("data.weights=1,0", "greater than 0")),
    "shuffle maybe": Case(("data.shuffle=maybe",), ("data.shuffle=maybe", "true or false")),
    "aliases of nobody": Case(("logging.aliases=ray",), ("logging.aliases=ray", "'none', 'trl' or 'verl'")),
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
    "shape of a checkpoint": Case(("shape=llama-7b",), ("shape=llama-7b", "drop one")),
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
    "a time limit for a function in the rank": Case(
        ("reward_function={folder}/r.py:f", "reward_timeout_s=5"),
        ("reward_timeout_s=5.0: it needs processes", "set reward_workers=2"),
        {"r.py": "def f(prompts, responses):\n    return [1.0] * len(prompts)\n"},
    ),
    "workers without a function": Case(
        ("reward_workers=2",), ("reward_workers=2: there is no reward_function", "give one")
    ),
    "a negative number of workers": Case(("reward_workers=-1",), ("reward_workers=-1", "greater than or equal to 0")),
    "corrections of equal logprobs": Case(
        ("ppo.importance_weights=token",), ("importance_weights and rejection compare", "set old_logprobs=recompute")
    ),
    "an empty range of weights": Case(
        ("ppo.old_logprobs=recompute", "ppo.rejection=token", "ppo.rejection_range=2,0.5"),
        ("rejection_range=(2.0, 0.5)", "first number must be smaller"),
    ),
    "an adaptive coefficient that becomes negative": Case(
        ("--strategy", "flattening", "ppo.kl_controller=adaptive", "ppo.kl_horizon=4"),
        ("= 24 sequences may lower kl_coef", "set kl_horizon to at least 5"),
        by_check=True,
    ),
    "a divergence without the reference": Case(
        ("--algorithm", "grpo", "samples_per_prompt=2", "grpo.kl_coef=0.1", "grpo.kl_estimator=k1"),
        ("has no gradient from the reference", "kl_estimator=k2 or k3, or kl_unbiased=true"),
    ),
    "oversampling without dropping": Case(
        ("--algorithm", "grpo", "samples_per_prompt=2", "grpo.oversampling=2"),
        ("oversampling makes up for what is left out", "set drop_equal_groups=true"),
    ),
    "a broken number of groups": Case(
        ("--algorithm", "grpo", "samples_per_prompt=4", "grpo.drop_equal_groups=true", "grpo.oversampling=2"),
        ("a mini-batch of 12 responses has 3 groups", "1.5 would be trained on", "choose mini_batch"),
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
    "limits that contradict each other": Case(
        ("environment=m:f", "episode.max_row_tokens=9"),
        ("episode.max_row_tokens=9, generation.max_new_tokens=10: the first limits", "lower the second"),
    ),
    "limits without episodes": Case(
        ("episode.max_turns=3",), ("episode.max_turns=3: it is for responses that an environment answers",)
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
    shutil.copytree(folder / "actor", folder / "gpt2")
    config = (folder / "gpt2" / "config.json").read_text(encoding="utf-8").replace('"llama"', '"gpt2"')
    (folder / "gpt2" / "config.json").write_text(config, encoding="utf-8")
    shutil.copytree(folder / "actor", folder / "null")
    values = json.loads((folder / "null" / "config.json").read_text(encoding="utf-8"))
    (folder / "null" / "config.json").write_text(json.dumps(values | {"rms_norm_eps": None}), encoding="utf-8")
    write_model(folder / "small", vocab_size=40)
    write_model(folder / "narrow", head="scalar", num_layers=1, num_kv_heads=1)
    make_adapter(folder / "adapter", folder / "actor")
    change(folder / "adapter", base_model_name_or_path="elsewhere")
    make_adapter(folder / "of_critic", folder / "reward", task="SEQ_CLS")
    return folder


@pytest.mark.parametrize("name", CASES)
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


def test_no_run_folder_is_left_by_bad_input(folder, warm, tmp_path):
    status, _, _ = warm.run(["train", *write_all_once(folder), "--runs", tmp_path / "runs", "ppo.nonsense=1"])
    assert status == 2 and not (tmp_path / "runs").exists()


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
    assert said.endswith("rlhf_spmd: error: generation.temperature=-1: give a value greater than 0\n"), said

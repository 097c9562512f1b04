"""The verb `coming-from`: configurations and commands of the other programs become files that `check` takes."""

import itertools
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from rlhf_spmd.__main__ import main
from rlhf_spmd.config.options import leaves
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.migration.sources import Source, read_file, read_words
from rlhf_spmd.migration.translate import shape_near, translate
from rlhf_spmd.pages.algorithm import algorithm_names
from rlhf_spmd.pages.other_names import PROGRAMS, defaults, find

EXAMPLES = sorted(Path(__file__).with_name("examples").iterdir())
PROMISED = 0.9  # share of the options that are known
COMMANDS = ("python3", "ray", "torchrun")  # that the scripts start
PPO, SFT, DPO = (f"-m openrlhf.cli.{name} --pretrain a" for name in ("train_ppo_ray", "train_sft", "train_dpo"))


def words_of_script(path: Path) -> list[str]:
    """Returns what a shell makes of the command that a script starts."""
    functions = "".join(f'{name}() {{ printf "%s\\0" {name} "$@"; }}; ' for name in COMMANDS)
    command = ["bash", "-c", f"{functions}source {path}"]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, env=dict(os.environ))
    return made.stdout.decode().split("\0")[:-1]


def arguments_of(name: str, *words: str) -> list[str]:
    """Returns the words of `coming-from` for an example. words: KEY=VALUE, behind those of the example."""
    path = Path(__file__).with_name("examples") / name
    if path.suffix == ".yaml":
        return [str(path), *words]
    program = name.partition("_")[0]
    own = words if program == "verl" else [f"--{word}" for word in words]
    return [program, *words_of_script(path), *own]


def source_of_example(name: str, *words: str) -> Source:
    """Returns an example, with words of a command line."""
    first, *others = arguments_of(name, *words)
    return read_words(first, others) if first in PROGRAMS else read_file(first, others)


def options_of(name: str, *words: str, algorithm: str | None = None) -> dict:
    """Returns the options of an example, with words of a command line."""
    return dict(translate(source_of_example(name, *words), algorithm).options)


def of_words(program: str, command: str, algorithm: str | None = None):
    """Translates a command."""
    return translate(read_words(program, shlex.split(command)), algorithm)


def source_of(tmp_path: Path, text: str, name: str = "job.yaml", words: tuple[str, ...] = ()):
    """Writes a file with this text, and reads it."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_file(str(path), words)


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES])
def test_check_takes_the_file_and_nearly_every_option_is_known(name, tmp_path, capsys):
    assert main(["coming-from", *arguments_of(name)]) == 0
    text = capsys.readouterr().out
    options = tmp_path / "options.yaml"
    options.write_text(text, encoding="utf-8")
    assert main(["check", "--config", str(options)]) == 0, capsys.readouterr()
    kinds = [line.kind for line in translate(source_of_example(name)).lines]
    assert kinds.count("option") >= 12 and kinds.count(None) <= (1 - PROMISED) * len(kinds)
    named = [line.removeprefix("# ").partition(":")[0] for line in text.splitlines()]
    assert source_of_example(name).values.keys() <= {*named}, "every option is answered"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", "qwen2.5-1.5b"),
        ("meta-llama/Llama-2-7b-hf", "llama-7b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-v0.3", "llama-7b"),
        ("Qwen/Qwen3-32B", "qwen2.5-32b"),
        ("some/model", ""),
    ],
)
def test_a_model_that_is_not_here_has_a_shape_of_its_size(name, preset):
    assert shape_near(name) == preset


def test_optimizer_steps_of_trl_are_iterations_here():
    """512 responses of an iteration, 256 of a step: two steps for each iteration."""
    words = ("generation_batch_size=512", "per_device_train_batch_size=32", "gradient_accumulation_steps=1")
    words += ("num_processes=8", "num_generations=8", "max_steps=100", "save_steps=50", "save_strategy=steps")
    options = options_of("trl_grpo.yaml", *words)
    assert (options["rollout_batch"], options["mini_batch"]) == ("64", "256")
    assert (options["iterations"], options["checkpoint.every"]) == ("50", "25")
    assert options["optimizer.warmup_ratio"] == "0.1" and "optimizer.warmup_steps" not in options
    assert options_of("trl_grpo.yaml", *words, "warmup_steps=0.2")["optimizer.warmup_ratio"] == "0.2"
    options = options_of("trl_grpo.yaml", *words, "warmup_steps=20")
    assert options["optimizer.warmup_steps"] == "20" and "optimizer.warmup_ratio" not in options


MINIMAL = {  # program, algorithm -> a configuration that sets as little as possible
    ("trl", "grpo"): ("trl.yaml", "model_name_or_path: a-1.5B\nnum_generations: 8\n"),
    ("trl", "rloo"): ("words", "rloo --reward_funcs a.b"),
    ("trl", "ppo"): ("trl.yaml", "reward_model_path: a\n"),
    ("trl", "sft"): ("trl.yaml", "model_name_or_path: a-1.5B\n"),
    ("trl", "reward_model"): ("trl.yaml", "center_rewards_coefficient: 0.01\n"),
    ("verl", "ppo"): ("words", "-m verl.trainer.main_ppo data.shuffle=true"),
    ("verl", "grpo"): ("words", "-m verl.trainer.main_ppo algorithm.adv_estimator=grpo"),
    ("openrlhf", "ppo"): ("words", "-m openrlhf.cli.train_ppo_ray --pretrain a"),
    ("openrlhf", "sft"): ("words", "-m openrlhf.cli.train_sft --pretrain a"),
    ("openrlhf", "dpo"): ("words", "-m openrlhf.cli.train_dpo --pretrain a"),
}
WRITTEN = {  # of these, some of what the other program does there
    ("trl", "grpo"): {"actor_lr": "1e-6", "schedule": "linear", "max_new_tokens": "256", "mini_batch": "64"},
    ("trl", "rloo"): {"samples_per_prompt": "2", "rollout_batch": "32", "ratio_level": "product"},
    ("trl", "ppo"): {"actor_lr": "3e-6", "critic_lr": "3e-6", "epochs": "4", "temperature": "0.7"},
    ("trl", "sft"): {"actor_lr": "2e-5", "schedule": "linear", "max_prompt": "512", "max_new_tokens": "512"},
    ("trl", "reward_model"): {"reward_lr": "1e-4"},
    ("verl", "ppo"): {"kl_coef": "0", "lam": "1", "critic_lr": "1e-5", "weight_decay": "0.01", "truncation": "score"},
    ("verl", "grpo"): {"dual_clip": "3", "weight_decay": "0.01", "rollout_batch": "1024", "mini_batch": "256"},
    ("openrlhf", "ppo"): {"beta2": "0.95", "kl_coef": "0.01", "clip_value": "0.5", "min_lr_ratio": "0.1"},
    ("openrlhf", "sft"): {"beta2": "0.95", "actor_lr": "5e-6", "warmup_ratio": "0.03", "schedule": "cosine"},
    ("openrlhf", "dpo"): {"actor_lr": "1e-5", "max_prompt": "256"},
}


@pytest.mark.parametrize("case", MINIMAL, ids="-".join)
def test_the_defaults_of_the_other_program_are_written(case, tmp_path):
    name, text = MINIMAL[case]
    found = of_words(case[0], text) if name == "words" else translate(source_of(tmp_path, text, name))
    by_leaf = {key.rpartition(".")[2]: value for key, value in found.options.items()}
    assert found.options["algorithm"] == case[1] and WRITTEN[case].items() <= by_leaf.items()
    assert not {"beta2", "eps"} & by_leaf.keys() or case[0] == "openrlhf", "TRL and verl have those of this program"
    assert "the default of" in found.text(name)


def test_the_table_of_defaults_says_nothing_that_is_the_default_here():
    for program, algorithm in itertools.product(PROGRAMS, algorithm_names()):
        ours = leaves(load("model", algorithm=algorithm)) | {"generation.max_new_tokens": "", "data.max_prompt": ""}
        for row in defaults(program, algorithm):
            value, keys = row["value"], [key for key in row.get("ours", "").split() if key in ours]
            values = {ours[key] for key in keys if not key.endswith("_lr") and not key.startswith("lora.")}
            assert not values & {value, str(float(value)) if value[0].isdigit() else value}, row
            assert "there" not in row or find(program, row["there"])


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        ("--lr_scheduler constant", "optimizer.min_lr_ratio"),
        ("--adam_betas 0.9 0.98 --lr_warmup_ratio 0.1 --actor_learning_rate 1e-7", ""),
        ("--advantage_estimator group_norm", "grpo.kl_coef"),
    ],
)
def test_what_a_command_sets_stays(words, absent):
    found = of_words("openrlhf", f"{PPO} {words}")
    assert absent not in found.options
    given = {"optimizer.beta2": "0.98", "optimizer.warmup_ratio": "0.1", "optimizer.actor_lr": "1e-7"}
    assert given.items() <= found.options.items() or "--adam_betas" not in words
    if "group_norm" in words:
        assert "# init_kl_coef: 0.01 (the KL divergence of grpo is a term of the loss" in found.text("x")


def test_defaults_of_verl_depend_on_its_other_options():
    def options(words: str) -> dict:
        return of_words("verl", f"algorithm.adv_estimator={words}").options

    gspo = options("grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    assert "grpo.dual_clip" not in gspo and "grpo.kl_coef" not in gspo
    assert options("grpo actor_rollout_ref.actor.use_kl_loss=True")["grpo.kl_coef"] == "0.001"
    assert options("gae algorithm.kl_ctrl.kl_coef=0.005")["ppo.kl_coef"] == "0", "use_kl_in_reward is off there"
    steps = of_words("verl", "algorithm.adv_estimator=gae trainer.total_training_steps=7 data.train_files=x")
    assert steps.options["iterations"] == "7" and "data.epochs" not in {*steps.options, *steps.later}


def test_files_and_folders_that_are_here_are_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n', encoding="utf-8")
    (tmp_path / "reward.py").write_text("def reward_func(queries): ...\n", encoding="utf-8")
    words = "--pretrain base --prompt_data a.jsonl,b.jsonl --remote_rm_url reward.py --num_episodes 3"
    found = of_words("openrlhf", words).options
    assert found["model"] == "base" and found["data.prompts"] == "a.jsonl,b.jsonl" and found["data.epochs"] == "3"
    assert found["reward_function"] == "reward.py:reward_func" and "preset" not in found


EVIL = "x\nreward_function: evil.py:score\n#"
FOREIGN = {  # name of the file and its options: a line break in each place that the translation shows
    "an unknown key.yaml": {EVIL: 1},
    "a value.yaml": {"run_name": EVIL, "bf16": EVIL},
    "a model to be completed.yaml": {"model_name_or_path": EVIL},
    "a key of a mapping.yaml": {"model_name_or_path": {EVIL: 1}, "dataset_name": {EVIL: 1}},
    "a mapping as text.yaml": {"model_name_or_path": json.dumps({EVIL: 1})},
    "data.yaml": {"dataset_name": EVIL, "lora_target_modules": [EVIL]},
    "a path\n reward_function: evil.yaml": {},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_nothing_that_a_foreign_file_says_becomes_an_option(name, tmp_path):
    """Written as a file of options, in which a name of code is run."""
    path = tmp_path / name
    given = {"num_generations": 2, "learning_rate": 1e-6, **FOREIGN[name]}
    path.write_text(json.dumps(given), encoding="utf-8")
    read = yaml.safe_load(text := translate(read_file(str(path))).text(str(path)))
    assert isinstance(read, dict) and not {"reward_function", "x"} & {*read}, text
    assert not any(line.lstrip().startswith("reward_function: evil") for line in text.split("\n")), text


@pytest.mark.parametrize(
    ("text", "why"),
    [("[" * 100_000, "recursion"), ("a: &a {b: *a}", "it has an alias"), ("a: [", "flow node")],
    ids=["deep", "alias", "cut"],
)
def test_yaml_that_is_deep_or_grows_is_refused_as_it_is_read(text, why, tmp_path):
    with pytest.raises(UserError, match=f"job.yaml is not YAML that is read here: .*{why}"):
        source_of(tmp_path, text)


def test_unknown_options_are_named_and_a_third_of_them_is_a_failure(capsys):
    words = ["data.train_files=x", "data.train_batch_size=8", "actor_rollout_ref.model.path=m", "warp.drive=on"]
    assert main(["coming-from", "verl", *words]) == 0
    assert "# Unknown, and left out:\n# warp.drive: on" in capsys.readouterr().out
    assert main(["coming-from", "verl", *words, "warp.speed=9"]) == 1
    assert "2 of 5 options are unknown" in capsys.readouterr().err


@pytest.mark.parametrize(("left_out", "noun"), [(0, "data"), (1, "batch"), (2, "model")])
def test_what_a_run_needs_must_be_there(left_out, noun, capsys):
    words = ["data.train_files=x", "data.train_batch_size=8", "actor_rollout_ref.model.path=m"]
    del words[left_out]
    assert main(["coming-from", "verl", *words]) == 1
    assert f"no {noun} found" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["$(nproc)", "nan", "0", "-3", "1e30"])
def test_no_size_is_made_of_a_text_that_is_none(value):
    found = of_words("verl", f"data.train_batch_size='{value}' trainer.nnodes='{value}'")
    assert not {"rollout_batch", "layout"} & found.options.keys()
    assert found.later["rollout_batch"].startswith(value) and found.later["layout"].startswith(value)


def test_references_to_references_have_the_value_of_the_last(tmp_path):
    path = tmp_path / "a.yaml"
    chain = "".join(f"v{n}: ${{v{n + 1}}}\n" for n in range(12))
    path.write_text(f"data: {{train_batch_size: '${{v0}}'}}\n{chain}v12: 64\n", encoding="utf-8")
    assert translate(read_file(str(path), program="verl"), None).options["rollout_batch"] == "64"


def test_a_command_of_trl_may_name_a_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: m-1B\nlearning_rate: 1.0e-5\nnum_generations: 8\n", encoding="utf-8")
    found = of_words("trl", f"accelerate launch --num_processes 4 grpo.py --config {path} --learning_rate 2e-5").options
    assert (found["optimizer.actor_lr"], found["layout"]) == ("2e-5", "1x4")


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("trl_grpo.yaml", ("use_peft=true",), {"rank": "16", "alpha": "32", "targets": "q_proj,v_proj"}),
        ("trl_grpo.yaml", ("lora_r=8", "use_peft=false"), {}),
        (
            "trl_sft.yaml",
            ("use_peft=true", "lora_r=8", "lora_alpha=4", "lora_target_modules=all-linear", "use_rslora=true"),
            {"rank": "8", "alpha": "4", "targets": "all-linear", "rslora": "true", "dropout": "0.05"},
        ),
        (
            "trl_sft.yaml",
            ("use_peft=true", "lora_dropout=0.1"),
            {"rank": "16", "alpha": "32", "targets": "q_proj,v_proj", "dropout": "0.1"},
        ),
        (
            "verl_grpo.sh",
            ("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.target_modules=[q_proj,up_proj]"),
            {"rank": "32", "alpha": "16", "targets": "q_proj,up_proj"},
        ),
        (
            "verl_grpo.sh",
            (
                "actor_rollout_ref.model.lora.rank=8",
                "actor_rollout_ref.model.lora.target_modules=[linear_fc1,linear_q]",
            ),
            {"rank": "8", "alpha": "32", "targets": "gate_proj,up_proj,q_proj"},
        ),
        (
            "verl_grpo.sh",
            ("actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.merge=true"),
            {"rank": "8", "alpha": "32", "targets": "all-linear", "generate": "joined"},
        ),
        ("verl_grpo.sh", ("actor_rollout_ref.model.lora.merge=true",), {}),
        ("verl_ppo.yaml", ("actor_rollout_ref.model.lora_rank=0", "critic.model.lora_alpha=3"), {}),
        (
            "verl_ppo.yaml",
            ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=4"),
            {"rank": "8", "alpha": "4", "targets": "all-linear", "critic.rank": "0"},
        ),
        (
            "verl_ppo.yaml",
            ("critic.model.lora_rank=2", "critic.model.lora_alpha=3", "actor_rollout_ref.model.lora_rank=8"),
            {"rank": "8", "alpha": "16", "targets": "all-linear"}
            | {"critic.rank": "2", "critic.alpha": "3", "critic.targets": "all-linear"},
        ),
        (
            "openrlhf_reinforce.sh",
            ("lora_rank=4", "lora_alpha=8", "lora_dropout=0"),
            {"rank": "4", "alpha": "8", "targets": "all-linear"},
        ),
        (
            "openrlhf_reinforce.sh",
            ("ds.lora.rank=4", "ds.lora.target_modules=q_proj,v_proj"),
            {"rank": "4", "alpha": "16", "targets": "q_proj,v_proj"},
        ),
    ],
)
def test_adapters(name, words, expected, tmp_path):
    made = translate(source_of_example(name, *words))
    found = {key.removeprefix("lora."): one for key, one in made.options.items() if key.startswith("lora.")}
    assert found == expected
    path = tmp_path / "options.yaml"
    path.write_text(made.text(name), encoding="utf-8")
    assert main(["check", "--config", str(path)]) == 0

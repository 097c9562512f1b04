"""The verb `coming-from`: three configurations of each other program become files that `check` takes."""

import itertools
import json
from pathlib import Path

import pytest
import yaml

from rlhf_spmd.__main__ import main
from rlhf_spmd.config.options import leaves
from rlhf_spmd.config.presets import load
from rlhf_spmd.errors import UserError
from rlhf_spmd.migration.sources import read_source
from rlhf_spmd.migration.translate import counts, shape_near, translate
from rlhf_spmd.pages.algorithm import algorithm_names
from rlhf_spmd.pages.other_names import PROGRAMS, defaults, find

EXAMPLES = sorted(Path(__file__).with_name("examples").iterdir())
PROMISED = 0.9  # share of the options that are known


def options_of(name: str, *words: str, algorithm: str | None = None) -> dict:
    """Returns the options of an example, with words of a command line."""
    path = Path(__file__).with_name("examples") / name
    return dict(translate(read_source(str(path), words), algorithm).options)


def source_of(tmp_path: Path, text: str, name: str = "job.sh", words: tuple[str, ...] = ()):
    """Writes a file with this text."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_source(str(path), words)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_check_takes_the_file_and_nearly_every_option_is_known(path, tmp_path, capsys):
    assert main(["coming-from", str(path)]) == 0
    text = capsys.readouterr().out
    options = tmp_path / "options.yaml"
    options.write_text(text, encoding="utf-8")
    assert main(["check", "--config", str(options)]) == 0, capsys.readouterr()
    kinds = counts(translate(read_source(str(path))).lines)
    assert kinds["option"] >= 12
    assert sum(kinds.values()) - kinds["unknown"] >= PROMISED * sum(kinds.values())
    named = [line.removeprefix("# ").partition(":")[0] for line in text.splitlines()]
    assert read_source(str(path)).values.keys() <= {*named}, "every option is answered"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", "qwen2.5-1.5b"),
        ("meta-llama/Llama-2-7b-hf", "llama-7b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-v0.3", "llama-7b"),
        ("Qwen/Qwen3-32B", "qwen2.5-32b"),
        ("some/model", "llama-7b"),
    ],
)
def test_a_model_that_is_not_here_has_a_shape_of_its_size(name, preset):
    assert shape_near(name) == preset


def test_values_of_verl():
    options = options_of("verl_grpo.sh")
    assert options["algorithm"] == "grpo" and options["layout"] == "2x8"
    assert options["rollout_batch"] == "256" and options["mini_batch"] == str(64 * 6), "prompts there, sequences here"
    assert options["grpo.kl_coef"] == "0.002" and options["grpo.kl_estimator"] == "k3"
    assert options["data.long_prompts"] == "drop" and options["wandb"] == "math"
    assert (options["strategy"], options["strategy.generation_tp"]) == ("reallocation", "2")


def test_values_of_verl_in_yaml():
    options = options_of("verl_ppo.yaml")
    assert options["ppo.kl_coef"] == "0.001" and options["ppo.clip_ratio"] == "0.2" and options["ppo.epochs"] == "2"
    assert options["runs"] == "checkpoints/examples", "${...} of the same file"
    assert float(options["optimizer.critic_lr"]) == 1e-5 and "data.epochs" not in options


def test_variables_and_products_of_a_script():
    options = options_of("verl_dapo.sh")
    assert options["generation.max_new_tokens"] == str(1024 * 6)
    assert options["grpo.overlong_buffer"] == str(1024 * 2) and options["grpo.overlong"] == "shape"
    assert options["strategy.tokens"] == str(1024 * 7) and options["layout"] == "4x8"
    assert options["optimizer.warmup_steps"] == str(10 * 256 // 32), "iterations there, optimizer steps here"


def test_values_of_trl():
    options = options_of("trl_grpo.yaml")
    assert options["mini_batch"] == str(14 * 8 * 7) and options["rollout_batch"] == str(14 * 8)
    assert options["grpo.kl_coef"] == "0.01" and options["samples_per_prompt"] == "7"
    given = options_of("trl_dpo.yaml")
    assert given["algorithm"] == "dpo" and given["dpo.beta"] == "0.05"
    assert (given["data.max_prompt"], given["generation.max_new_tokens"]) == ("512", "512"), "of 1024 together"
    assert options_of("trl_sft.yaml")["data.turns"] == "all"


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


def test_values_of_openrlhf():
    options = options_of("openrlhf_reinforce.sh")
    assert options["algorithm"] == "reinforce_plus_plus" and options["reinforce_plus_plus.baseline"] == "group"
    assert options["reinforce_plus_plus.kl_in"] == "loss" and options["layout"] == "1x4"
    assert options["reinforce_plus_plus.clip_high"] == "0.27"
    given = options_of("openrlhf_dpo.sh")
    assert given["algorithm"] == "dpo" and float(given["optimizer.actor_lr"]) == 6e-7
    assert given["mini_batch"] == given["rollout_batch"] == "128"


MINIMAL = {  # program, algorithm -> a configuration that sets as little as possible
    ("trl", "grpo"): ("trl.yaml", "model_name_or_path: a-1.5B\nnum_generations: 8\n"),
    ("trl", "rloo"): ("trl.yaml", "output_dir: rloo\nreward_funcs: [a.b]\n"),
    ("trl", "ppo"): ("trl.yaml", "reward_model_path: a\n"),
    ("trl", "sft"): ("trl.yaml", "model_name_or_path: a-1.5B\n"),
    ("trl", "reward_model"): ("trl.yaml", "center_rewards_coefficient: 0.01\n"),
    ("verl", "ppo"): ("job.sh", "python -m verl.trainer.main_ppo data.shuffle=true"),
    ("verl", "grpo"): ("job.sh", "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"),
    ("openrlhf", "ppo"): ("job.sh", "python -m openrlhf.cli.train_ppo_ray --pretrain a"),
    ("openrlhf", "sft"): ("job.sh", "python -m openrlhf.cli.train_sft --pretrain a"),
    ("openrlhf", "dpo"): ("job.sh", "python -m openrlhf.cli.train_dpo --pretrain a"),
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
    found = translate(source_of(tmp_path, text, name))
    by_leaf = {key.rpartition(".")[2]: value for key, value in found.options.items()}
    assert found.algorithm == case[1] and WRITTEN[case].items() <= by_leaf.items()
    assert not {"beta2", "eps"} & by_leaf.keys() or case[0] == "openrlhf", "TRL and verl have those of this program"
    assert "the default of" in found.text(name)


def test_the_table_of_defaults_says_nothing_that_is_the_default_here():
    for program, algorithm in itertools.product(PROGRAMS, algorithm_names()):
        ours = leaves(load("model", algorithm=algorithm)) | {"generation.max_new_tokens": "", "data.max_prompt": ""}
        for row in defaults(program, algorithm):
            value, keys = row["value"], [key for key in row.get("ours", "").split() if key in ours]
            values = {ours[key] for key in keys if not key.endswith("_lr")}
            assert not values & {value, str(float(value)) if value[0].isdigit() else value}, row
            assert "there" not in row or find(program, row["there"]) is not None


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        ("--lr_scheduler constant", "optimizer.min_lr_ratio"),
        ("--adam_betas 0.9 0.98 --lr_warmup_ratio 0.1 --actor_learning_rate 1e-7", ""),
        ("--advantage_estimator group_norm", "grpo.kl_coef"),
    ],
)
def test_what_a_file_sets_stays(words, absent, tmp_path):
    found = translate(source_of(tmp_path, f"python -m openrlhf.cli.train_ppo_ray --pretrain a {words}"))
    assert absent not in found.options
    given = {"optimizer.beta2": "0.98", "optimizer.warmup_ratio": "0.1", "optimizer.actor_lr": "1e-7"}
    assert given.items() <= found.options.items() or "--adam_betas" not in words
    if "group_norm" in words:
        assert "# init_kl_coef: 0.01 (the KL divergence of grpo is a term of the loss" in found.text("x"), "it is told"


def test_defaults_of_verl_depend_on_its_other_options(tmp_path):
    text = "python -m verl.trainer.main_ppo algorithm.adv_estimator="
    gspo = translate(source_of(tmp_path, f"{text}grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo")).options
    assert "grpo.dual_clip" not in gspo and "grpo.kl_coef" not in gspo
    in_loss = translate(source_of(tmp_path, f"{text}grpo actor_rollout_ref.actor.use_kl_loss=True")).options
    assert in_loss["grpo.kl_coef"] == "0.001"
    unused = translate(source_of(tmp_path, f"{text}gae algorithm.kl_ctrl.kl_coef=0.005")).options
    assert unused["ppo.kl_coef"] == "0", "use_kl_in_reward is off there"
    steps = translate(source_of(tmp_path, f"{text}gae trainer.total_training_steps=7 data.train_files=x"))
    assert steps.options["iterations"] == "7" and "data.epochs" not in {*steps.options, *steps.later}


def test_reward_functions_of_modules_are_options(tmp_path):
    text = "num_generations: 4\nreward_funcs: [mine.rewards.right, mine.brief]\n"
    found = translate(source_of(tmp_path, text, "trl.yaml")).options
    assert found["reward_function"] == "mine.rewards:right,mine:brief"


def test_another_algorithm_may_be_named():
    assert options_of("trl_grpo.yaml", algorithm="rloo")["rloo.kl_coef"] == "0.01"


def test_files_and_folders_that_are_here_are_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n', encoding="utf-8")
    (tmp_path / "reward.py").write_text("def reward_func(queries): ...\n", encoding="utf-8")
    text = (
        "python -m openrlhf.cli.train_ppo_ray --pretrain base --prompt_data a.jsonl,b.jsonl --remote_rm_url reward.py"
    )
    found = translate(source_of(tmp_path, f"{text} --num_episodes 3")).options
    assert found["model"] == "base" and found["data.prompts"] == "a.jsonl,b.jsonl" and found["data.epochs"] == "3"
    assert found["reward_function"] == "reward.py:reward_func" and "preset" not in found


@pytest.mark.parametrize(
    ("option", "kind", "says"),
    [
        ("--chosen_key chosen", "no_effect", "the name that is expected"),
        ("--chosen_key better", "unavailable", "rename it to chosen"),
        ("--label_key labels", "no_effect", "the name that is expected"),
    ],
)
def test_columns_of_other_names_are_not_passed_over(option, kind, says, tmp_path):
    source = source_of(tmp_path, f"python -m openrlhf.cli.train_dpo --pretrain x {option}")
    line = translate(source).lines[-1]
    assert line.kind == kind and says in line.why


def test_what_would_be_another_run_is_not_without_effect():
    path = Path(__file__).with_name("examples") / "trl_grpo.yaml"
    words = ("optim=adamw_8bit", "eval_on_start=false", "steps_per_generation=16")
    found = translate(read_source(str(path), words))
    kinds = {line.key: line.kind for line in found.lines}
    assert kinds["optim"] == "unavailable"
    assert found.later["eval.at_start"] == ("false", "with eval.prompts")
    assert found.options["rollout_batch"] == str(14 * 16), "14 x 16 x 7 responses of 7 to a prompt"


def test_weights_of_tokens_are_left_out_where_the_ratio_is_a_response_s():
    words = ("vllm_importance_sampling_correction=true", "importance_sampling_level=")
    assert options_of("trl_grpo.yaml", words[0], f"{words[1]}token")["grpo.importance_weights"] == "token"
    options = options_of("trl_grpo.yaml", words[0], f"{words[1]}sequence")
    assert options["grpo.ratio_level"] == "sequence" and "grpo.importance_weights" not in options


def test_least_learning_rates():
    words = ('lr_scheduler_kwargs={"min_lr_rate": 0.1}', "lr_scheduler_type=cosine_with_min_lr")
    options = options_of("trl_grpo.yaml", *words)
    assert (options["optimizer.schedule"], options["optimizer.min_lr_ratio"]) == ("cosine", "0.1")
    key = "actor_rollout_ref.actor.optim"
    options = options_of("verl_ppo.yaml", f"{key}.min_lr_ratio=0.2", f"{key}.warmup_style=cosine")
    assert options["optimizer.min_lr_ratio"] == "0.2"
    assert "optimizer.min_lr_ratio" not in options_of("verl_ppo.yaml", f"{key}.min_lr_ratio=0.2"), (
        "it is constant there"
    )


def test_a_least_rate_and_trackers_of_openrlhf(tmp_path):
    text = "python -m openrlhf.cli.train_sft --pretrain x --learning_rate 5e-6 --min_lr 1e-6 --use_wandb k "
    found = translate(source_of(tmp_path, text + "--wandb_project p --wandb_group g --wandb_org o")).options
    assert float(found["optimizer.min_lr_ratio"]) == 0.2 and found["optimizer.schedule"] == "cosine"
    assert (found["wandb"], found["logging.group"], found["logging.entity"]) == ("p", "g", "o")
    found = translate(source_of(tmp_path, text + "--wandb_group g"))
    assert found.later["logging.group"] == ("g", "with wandb")


def test_a_folder_and_a_pattern_of_data_are_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    text = "python -m openrlhf.cli.train_sft --pretrain x --dataset "
    assert "data.prompts" in translate(source_of(tmp_path, text + "rows")).later, "it has no data"
    (tmp_path / "rows" / "a.csv").write_text("prompt\nx\n", encoding="utf-8")
    for name in ("rows", "rows/*.csv"):
        assert translate(source_of(tmp_path, text + f"'{name}'")).options["data.prompts"] == name


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
    read = yaml.safe_load(text := translate(read_source(str(path))).text(str(path)))
    assert isinstance(read, dict) and not {"reward_function", "x"} & {*read}, text
    assert not any(line.lstrip().startswith("reward_function: evil") for line in text.split("\n")), text


def test_unknown_options_are_named(tmp_path):
    source = source_of(tmp_path, "python -m verl.trainer.main_ppo data.train_batch_size=8 trainer.warp_drive=on")
    line = next(line for line in translate(source).lines if line.key == "trainer.warp_drive")
    assert line.kind is None
    assert "# Unknown, and left out:\n# trainer.warp_drive: true" in translate(source).text("job.sh")


def test_values_that_refer_to_nothing_are_left_over(tmp_path):
    source = source_of(tmp_path, "data: {train_batch_size: 8, val_files: '${oc.env:HOME}/x'}", "job.yaml")
    assert source.left["data.val_files"] == "${oc.env:HOME}/x is not a value of this file"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "- 1", "holds no options"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "data: {a: '${data.b}', b: '${data.a}'}", "refers to itself"),
        ("a.sh", "echo hello", "has no options of TRL, verl or OpenRLHF"),
        ("a.sh", "python train.py --pretrain 'x", "No closing quotation"),
    ],
)
def test_refusals(name, text, message, tmp_path):
    with pytest.raises(UserError, match=message):
        source_of(tmp_path, text, name)


def test_an_estimator_that_is_not_here_is_refused(tmp_path):
    source = source_of(tmp_path, "python -m verl.trainer.main_ppo algorithm.adv_estimator=opo")
    with pytest.raises(UserError, match="name one with --algorithm"):
        translate(source)


def test_a_missing_file_is_refused(capsys):
    assert main(["coming-from", "nowhere.yaml"]) == 2
    assert "nowhere.yaml: there is no such file" in capsys.readouterr().err


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
            {"rank": "8", "alpha": "32", "targets": "q_proj,gate_proj,up_proj"},
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
    found = {key.removeprefix("lora."): one for key, one in options_of(name, *words).items() if key.startswith("lora.")}
    assert found == expected
    path = tmp_path / "options.yaml"
    made = translate(read_source(str(Path(__file__).with_name("examples") / name), words))
    path.write_text(made.text(name), encoding="utf-8")
    assert main(["check", "--config", str(path)]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("use_peft=true", "lora_dropout=0.05"), "lora_dropout: 0.05 (with it, training has other"),
        (
            ("use_peft=true", "lora_target_modules=lm_head"),
            "use_peft: true (lm_head has no adapters here; give lora.rank",
        ),
        (("use_peft=true", "use_dora=true"), "use_dora: true (of adapters, this program has rank"),
        (("lora_alpha=4",), "lora_alpha: 4 (all weights train)"),
    ],
)
def test_what_of_adapters_is_not_here(words, says):
    path = Path(__file__).with_name("examples") / "trl_grpo.yaml"
    assert f"# {says}" in translate(read_source(str(path), words)).text("x")

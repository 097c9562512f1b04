"""Named configurations, and `load`, which combines one of them with a checkpoint folder and overrides.

Imports neither torch nor MPI, so that `check` starts at once.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_spmd import embedded
from rlhf_spmd.algorithms.page import Options
from rlhf_spmd.config.checks import check_options
from rlhf_spmd.config.file import ConfigFile
from rlhf_spmd.config.options import LR, Config, DataOptions, Episode, Evaluation, Generation, Optimizer, overridden
from rlhf_spmd.config.role_shapes import shape_text, shapes_by_role
from rlhf_spmd.errors import UserError
from rlhf_spmd.model.adapters.uniform import base_folder
from rlhf_spmd.model.config import read_config_json
from rlhf_spmd.pages.algorithm import Algorithm, load_algorithm
from rlhf_spmd.pages.option_suggestions import check_known
from rlhf_spmd.pages.option_tree import keys_of, settings_of
from rlhf_spmd.plan.workload import SHAPES

MOST_TOKENS = 1024  # the largest default of data.max_prompt and of generation.max_new_tokens


# Of preset tiny, for algorithms that learn from given responses: the columns that they read -> the file of rows, the
# folder of the model that trains, and its learning rate by its head.
GIVEN = {
    ("completion",): ("answers", "base", {"lm": 1e-3, "scalar": 1e-3}),
    ("chosen", "rejected"): ("pairs", "actor", {"lm": 1e-4, "scalar": 1e-3}),
}
GENERATED = ("prompts", "actor", {"lm": 3e-4, "scalar": 1.5e-4})  # of algorithms that generate their responses


def tiny(algorithm: Algorithm) -> Config:
    """Returns the embedded default: models of about a million parameters, prompts, answers and pairs, all in the
    package."""
    columns = tuple(algorithm.responses.values())
    rows, first, rates = GIVEN.get(columns, GENERATED)
    folders = {name: first for name in [*algorithm.roles][:1]}
    folders |= {name: "reward" for name, role in algorithm.roles.items() if role.judge}
    held_out = str(embedded.path_of(f"{rows}_held_out.jsonl")) if columns in GIVEN else ""
    return Config(
        preset="tiny",
        algorithm=algorithm,
        options=_options(algorithm, ppo={"epochs": 2, "kl_coef": 0.05}),
        models={role: str(embedded.path_of(name)) for role, name in folders.items()},
        iterations=15,
        products="linear",
        rollout_batch=128,
        mini_batch=32,
        micro_batch=32,
        data=DataOptions(prompts=str(embedded.path_of(f"{rows}.jsonl")), max_prompt=32),
        generation=Generation(max_new_tokens=32 if held_out else 24),  # sampled ones get an end of sequence behind them
        optimizer=_optimizer(_rates(algorithm, **rates)),
        eval=Evaluation(prompts=held_out, every=5 if held_out else 10),
    )


def arithmetic(algorithm: Algorithm) -> Config:
    """Returns sums of two numbers of two digits, with an actor of about a million parameters that often forgets to
    carry, all in the package."""
    config = _of_answers("arithmetic", algorithm, max_prompt=8, max_new_tokens=4)
    return replace(config, iterations=25, rollout_batch=512, mini_batch=256, micro_batch=64)


def tools(algorithm: Algorithm) -> Config:
    """Returns questions whose numbers only a tool can look up, with an actor of about a million parameters that often
    guesses, all in the package."""
    config = _of_answers("tools", algorithm, max_prompt=16, max_new_tokens=64)
    return replace(
        config,
        iterations=20,
        rollout_batch=256,
        mini_batch=128,
        micro_batch=32,
        environment="rlhf_spmd.embedded.table_tools:Table",
        episode=Episode(max_row_tokens=112, max_turns=6),
        eval=replace(config.eval, temperature=1.0),
    )


def _of_answers(name: str, algorithm: Algorithm, *, max_prompt: int, max_new_tokens: int) -> Config:
    """Returns an embedded set of questions. Reward and evaluation: is what the actor says in the end the answer?"""
    rates = {role: 3e-4 for role, about in algorithm.roles.items() if about.lr is not None}
    return Config(
        preset=name,
        algorithm=algorithm,
        models={next(iter(algorithm.roles)): str(embedded.path_of(f"{name}/actor"))},
        products="linear",
        reward_function="rlhf_spmd.rewards:exact_answer",
        data=DataOptions(prompts=str(embedded.path_of(f"{name}/prompts.jsonl")), max_prompt=max_prompt),
        generation=Generation(max_new_tokens=max_new_tokens),
        optimizer=_optimizer(rates),
        eval=Evaluation(prompts=str(embedded.path_of(f"{name}/held_out.jsonl")), every=5),
    )


def smollm2(algorithm: Algorithm) -> Config:
    """Returns SmolLM2-135M with a sentiment reward function, in bfloat16 on a CPU; needs --model."""
    return Config(
        preset="smollm2",
        algorithm=algorithm,
        options=_options(algorithm, ppo={"epochs": 1, "kl_coef": 0.05, "truncation": "score"}),
        iterations=3,
        dtype="bfloat16",
        rollout_batch=16,
        mini_batch=8,
        micro_batch=4,
        reward_function="rlhf_spmd.rewards:vader_positive",
        data=DataOptions(prompts=str(embedded.path_of("sentiment_prompts.txt")), max_prompt=32),
        generation=Generation(max_new_tokens=24),
        optimizer=_optimizer(_rates(algorithm, lm=1e-5, scalar=1e-4)),
    )


def for_model(algorithm: Algorithm, folder: str | None = None, *, on_gpu: bool = False) -> Config:
    """Returns the options for any checkpoint folder: the learning rates of the algorithm's page, the precision that
    suits the device, prompts and responses as long as the context allows. The user names reward and prompts."""
    context = read_config_json(Path(folder) / "config.json").max_position_embeddings if folder else 2 * MOST_TOKENS
    longest = min(context // 2, MOST_TOKENS)
    return Config(
        preset="model",
        algorithm=algorithm,
        options=_options(algorithm, ppo={"epochs": 1}),
        dtype="bfloat16" if on_gpu else "float32",
        deadline_s=300.0,
        rollout_batch=128,
        mini_batch=32,
        micro_batch=4,
        data=DataOptions(max_prompt=longest),
        generation=Generation(max_new_tokens=longest),
    )


def _of_shape(name: str, algorithm: Algorithm) -> Config:
    """Returns models of one shape for all roles, without weights: for check, plan and benches."""
    return Config(
        preset=name,
        algorithm=algorithm,
        options=_options(algorithm, ppo={"epochs": 1}),
        shape=name,
        device_type="a100-80g",
        dtype="bfloat16",
        rollout_batch=512,
        mini_batch=128,
        micro_batch=8,
        data=DataOptions(max_prompt=256),
        generation=Generation(max_new_tokens=256),
    )


def _options(algorithm: Algorithm, **by_algorithm: Mapping[str, Any]) -> Options:
    """Returns the options that a preset has for this algorithm, else its defaults."""
    return algorithm.options(**by_algorithm.get(algorithm.name, {}))


def _rates(algorithm: Algorithm, **by_head: float) -> dict[str, float]:
    """Returns the learning rate of each role, by the head of its model."""
    return {name: by_head[role.head] for name, role in algorithm.roles.items()}


def _optimizer(rates: Mapping[str, float]) -> Optimizer:
    """Returns the optimizer of presets that are tuned: gradients of small models are far larger than its eps."""
    return Optimizer(lr=rates, beta2=0.95, eps=1e-5)


ALGORITHMS = {"arithmetic": "grpo", "tools": "grpo"}  # of presets that are not for PPO, unless another one is named
PRESETS = {"tiny": tiny, "arithmetic": arithmetic, "tools": tools, "model": for_model, "smollm2": smollm2} | {
    name: partial(_of_shape, name) for name in SHAPES
}


def default_algorithm(preset: str | None) -> str:
    """Returns the algorithm of a preset, unless another one is named."""
    return ALGORITHMS.get(preset or "", "ppo")


def load(
    preset: str | None,
    overrides: Iterable[str] = (),
    model: str | None = None,
    *,
    algorithm: str | None = None,
    on_gpu: bool = False,
    file: ConfigFile | None = None,
) -> Config:
    """Loads the config of a preset with dotted overrides. Raises UserError.

    preset: None: `model` if a model is given, else `tiny`.
    model: checkpoint folder of the algorithm's first role.
    algorithm: name or FILE.py (None: that of the preset, most often ppo).
    on_gpu: the run uses GPUs.
    file: its arguments and options stand between the preset and these arguments.
    """
    if model == "":
        raise UserError("--model is empty: give a folder (a variable that is not set?)")
    file, overrides = file or ConfigFile(""), [*overrides]
    preset = preset or file.words.get("preset")
    page, file = _algorithm(algorithm, file, default_algorithm(preset))
    if model:
        file = file.without(f"models.{next(iter(page.roles))}".__eq__)
    model = model or file.words.get("model")
    preset = preset or ("model" if model else "tiny")
    check_known("preset", preset, PRESETS)
    given = {setting.key: setting.value for setting in (*file.given, *settings_of(overrides))}
    if preset == "model":
        before = for_model(page, model and base_folder(model, str(given.get("lora.base", ""))), on_gpu=on_gpu)
    else:
        before = PRESETS[preset](page)
    # as many responses to a prompt as the algorithm needs, to fewer prompts
    prompts = max(1, before.rollout_batch // page.samples)
    config = before = replace(before, samples_per_prompt=page.samples, rollout_batch=prompts)
    if model:
        judges = {role: folder for role, folder in config.models.items() if page.roles[role].judge}
        config = replace(config, models=judges | {config.main_role: model})
    config = _with_adapter_rates(overridden(config, overrides, file.given), given)
    if page.responses and config.data.prompts != before.data.prompts and config.eval.prompts == before.eval.prompts:
        config = replace(config, eval=replace(config.eval, prompts=""))  # of other rows
    if before.eval.prompts and not config.eval.prompts:  # the other options of the preset's evaluation go with it
        values = {part.name: getattr(config.eval, part.name) for part in fields(Evaluation)}
        changed = {name: value for name, value in values.items() if value != getattr(before.eval, name)}
        config = replace(config, eval=Evaluation(**changed))
    if config.main_folder:  # the shape of a checkpoint replaces the preset's
        if config.shape not in (before.shape, ""):
            raise UserError(f"shape={config.shape}: {config.main_folder} has a shape of its own; drop one of the two")
        config = replace(config, shape="")
    elif config.shape:
        for role, folder in config.models.items():
            if folder and f"{role}=" in config.shape:
                raise UserError(
                    f"shape={config.shape}: {role} has the shape of models.{role}={folder}; drop one of the two"
                )
        config = replace(config, shape=shape_text(shapes_by_role(config.shape, page.roles, before.shape)))
    check_options(config)
    return config


def _with_adapter_rates(config: Config, given: Container[str]) -> Config:
    """Multiplies the learning rates of adapters by ten ("LoRA without regret", 2025).

    given: the keys of options that the user gives, whose rates stay.
    """
    rates = dict(config.optimizer.lr)
    for role, rate in rates.items():
        if config.adapters(role) and f"optimizer.{role}{LR}" not in given:
            rates[role] = float(f"{10 * rate:.12g}")  # 0.003 rather than 0.0029999999999999996
    return replace(config, optimizer=replace(config.optimizer, lr=rates))


def _algorithm(name: str | None, file: ConfigFile, default: str) -> tuple[Algorithm, ConfigFile]:
    """Loads the algorithm. If the command line overrides the file's, drops the file's options for it.

    default: of the preset.
    """
    title = file.words.get("algorithm", default)
    before = file.page or title
    if name is None or Path(name).absolute() == Path(before).absolute():
        return load_algorithm(before, title if file.page and "algorithm" in file.words else None), file
    page = load_algorithm(name)

    def is_of_another(key: str) -> bool:
        group, _, option = key.partition(".")
        role, dot, _ = option.partition(".")
        if group == "optimizer":
            role = option.removesuffix(LR) if option.endswith(LR) else ""
        names_role = group == "models" or (group == "optimizer" and role) or (group == "lora" and dot)
        return group == Path(title).stem or bool(names_role and role not in page.roles)

    return page, file.without(is_of_another)


def all_keys(file: ConfigFile | None = None) -> list[str]:
    """Returns every key that an override may set in a run of PPO, or of the algorithm that a file names."""
    file = file or ConfigFile("")
    page, _ = _algorithm(None, file, default_algorithm(file.words.get("preset")))
    return keys_of(Config(preset="", algorithm=page))

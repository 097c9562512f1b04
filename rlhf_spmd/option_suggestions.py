"""Suggestions for unknown option names: names in other systems, parts of names, typing errors."""

import difflib
from collections.abc import Iterable, Sequence

# Names in TRL, verl, OpenRLHF and transformers: the names of this program.
_SYNONYMS = {
    "lr learning_rate": "optimizer.actor_lr optimizer.critic_lr",
    "actor_learning_rate": "optimizer.actor_lr",
    "critic_learning_rate": "optimizer.critic_lr",
    "beta init_kl_coef kl_loss_coef": "ppo.kl_coef",
    "cliprange eps_clip": "ppo.clip_ratio",
    "cliprange_value value_clip": "ppo.clip_value",
    "lambd": "ppo.lam",
    "num_ppo_epochs ppo_epochs": "ppo.epochs",
    "num_train_epochs": "iterations ppo.epochs",
    "max_steps": "iterations",
    "total_episodes": "iterations rollout_batch",
    "batch_size": "rollout_batch mini_batch micro_batch",
    "train_batch_size": "rollout_batch mini_batch",
    "rollout_batch_size": "rollout_batch",
    "mini_batch_size ppo_mini_batch_size": "mini_batch",
    "micro_batch_size micro_train_batch_size per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "mini_batch micro_batch",
    "num_generations n_samples_per_prompt": "samples_per_prompt",
    "max_length": "data.max_prompt generation.max_new_tokens",
    "max_prompt_length prompt_max_len": "data.max_prompt",
    "max_completion_length max_response_length response_length generate_max_len": "generation.max_new_tokens",
    "dataset dataset_name train_files": "data.prompts",
    "input_key prompt_key": "data.key",
    "bf16 torch_dtype": "dtype",
    "gradient_checkpointing": "strategy.recompute",
    "zero_stage": "strategy.zero",
    "save_steps save_freq": "checkpoint.every",
    "eval_steps test_freq": "eval.every",
    "eval_dataset val_files": "eval.prompts",
    "num_generations_eval": "eval.samples_per_prompt",
    "metric_for_best_model load_best_model_at_end": "checkpoint.best",
    "early_stopping_patience": "eval.patience",
    "log_completions rollout_data_dir": "rollouts.every",
    "reward_funcs reward_fn": "reward_function",
    "model_name_or_path": "--model",
    "gpus": "device",
}
ELSEWHERE = {name: tuple(ours.split()) for names, ours in _SYNONYMS.items() for name in names.split()}


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A suggestion of the closest name, with its prefix, for the end of a message; empty if none is close."""
    return _suggestion([prefix + one for one in difflib.get_close_matches(name, list(known), n=1)])


def suggest_option(name: str, group: Sequence[str], every: Sequence[str]) -> str:
    """A suggestion for an unknown option, for the end of a message. group: options with the same prefix; every: all
    options."""
    leaf = name.rpartition(".")[2].lower()
    same_leaf = [key for key in every if key.rpartition(".")[2] == leaf]
    with_word = [key for key in every if f"_{leaf}_" in f"_{key.rpartition('.')[2]}_"]
    # the options of a strategy are no keys of a configuration; they are there if `strategy` is
    ours = [key for key in ELSEWHERE.get(leaf, ()) if key in (*every, "--model") or key.partition(".")[0] in every]
    with_word = [key for key in with_word if key in group] or with_word
    names = same_leaf or ours or (with_word if len(with_word) <= 3 else ())
    if names:
        return _suggestion(names)
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(every)}
    of_leaf = [by_leaf[one] for one in difflib.get_close_matches(leaf, list(by_leaf), n=1)]
    if of_leaf and "." not in name:
        return _suggestion(of_leaf)
    close = difflib.get_close_matches(name, list(group), n=1) or difflib.get_close_matches(name, list(every), n=1)
    return _suggestion(close or of_leaf)


def _suggestion(names: Sequence[str]) -> str:
    return f" (did you mean {' or '.join(repr(name) for name in names)}?)" if names else ""

"""Suggestions for unknown option names: names in other systems, parts of names, typing errors."""

import difflib
from collections.abc import Iterable, Sequence

# Names in TRL, verl, OpenRLHF and transformers: the names of this program.
_SYNONYMS = {
    "lr learning_rate": "optimizer.actor_lr optimizer.critic_lr",
    "actor_learning_rate": "optimizer.actor_lr",
    "critic_learning_rate": "optimizer.critic_lr",
    "lr_warmup_steps lr_warmup_ratio lr_warmup_steps_ratio warmup_ratio": "optimizer.warmup_steps",
    "lr_scheduler lr_scheduler_type warmup_style": "optimizer.schedule",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "grad_clip max_norm": "optimizer.max_grad_norm",
    "adv_estimator advantage_estimator": "--algorithm",
    "init_kl_coef kl_loss_coef": "ppo.kl_coef grpo.kl_coef",
    "beta": "ppo.kl_coef grpo.kl_coef dpo.beta",
    "center_rewards_coefficient": "reward_model.centering_coef",
    "assistant_only_loss multiturn": "data.turns",
    "teacher_model_name_or_path teacher_model": "models.teacher",
    "kl_loss_type kl_penalty": "grpo.kl_estimator",
    "cliprange eps_clip epsilon": "ppo.clip_ratio grpo.clip_low grpo.clip_high",
    "clip_ratio_low": "grpo.clip_low",
    "clip_ratio_high epsilon_high": "grpo.clip_high",
    "eps_clip_low_high": "grpo.clip_low grpo.clip_high",
    "clip_ratio_c delta": "grpo.dual_clip",
    "cliprange_value value_clip": "ppo.clip_value",
    "lambd": "ppo.lam",
    "entropy_coeff entropy_loss_coef": "ppo.entropy_coef grpo.entropy_coef",
    "loss_agg_mode": "grpo.aggregation grpo.surrogate",
    "loss_type": "grpo.aggregation grpo.surrogate dpo.loss",
    "loss_mode policy_loss_type importance_sampling_level": "grpo.ratio_level",
    "norm_adv_by_std_in_grpo no_advantage_std_norm scale_rewards": "grpo.scale",
    "mask_truncated_completions": "grpo.overlong",
    "overlong_buffer_len": "grpo.overlong_buffer",
    "overlong_penalty_factor": "grpo.overlong_penalty",
    "dynamic_filtering filter_groups": "grpo.drop_equal_groups",
    "enable_vllm_is_correction vllm_importance_sampling_correction": "grpo.importance_weights",
    "vllm_is_truncated_threshold vllm_importance_sampling_clip_max": "grpo.importance_cap",
    "num_ppo_epochs ppo_epochs max_epochs num_iterations": "ppo.epochs grpo.epochs",
    "num_train_epochs num_episodes total_epochs": "data.epochs",
    "max_steps total_training_steps": "iterations",
    "total_episodes": "iterations rollout_batch",
    "batch_size": "rollout_batch mini_batch micro_batch",
    "train_batch_size": "rollout_batch mini_batch",
    "generation_batch_size rollout_batch_size": "rollout_batch",
    "mini_batch_size ppo_mini_batch_size": "mini_batch",
    "micro_batch_size micro_train_batch_size per_device_train_batch_size ppo_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "mini_batch micro_batch",
    "n num_generations n_samples_per_prompt": "samples_per_prompt",
    "max_length": "data.max_prompt generation.max_new_tokens",
    "max_prompt_length prompt_max_len": "data.max_prompt",
    "max_completion_length max_response_length response_length generate_max_len": "generation.max_new_tokens",
    "max_num_seqs": "generation.max_sequences",
    "gpu_memory_utilization vllm_gpu_memory_utilization": "generation.cache_fraction",
    "dataset dataset_name prompt_data train_files": "data.prompts",
    "prompt_data_probs": "data.weights",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "shuffle_dataset": "data.shuffle",
    "filter_overlong_prompts": "data.long_prompts",
    "input_key prompt_key": "data.key",
    "bf16 torch_dtype": "dtype",
    "gradient_checkpointing enable_gradient_checkpointing": "strategy.recompute",
    "zero_stage": "strategy.zero",
    "save_steps save_freq": "checkpoint.every",
    "eval_steps test_freq": "eval.every",
    "eval_dataset val_files": "eval.prompts",
    "num_generations_eval": "eval.samples_per_prompt",
    "metric_for_best_model load_best_model_at_end": "checkpoint.best",
    "early_stopping_patience": "eval.patience",
    "log_completions rollout_data_dir": "rollouts.every",
    "save_total_limit max_ckpt_num": "checkpoint.keep",
    "custom_reward_function reward_funcs reward_fn": "reward_function",
    "model_name_or_path pretrain": "--model",
    "reward_pretrain": "models.reward",
    "critic_pretrain": "models.critic",
    "project_name wandb_project": "wandb",
    "experiment_name run_name": "--name",
    "default_local_dir output_dir save_path": "--runs",
    "gpus": "device",
}
DASHED = ("model", "config", "resume", "layout", "cluster", "calibration", "runs", "name")  # --model and so on
ALGORITHMS = ("ppo", "grpo")  # whose options stand for those of all algorithms
ELSEWHERE = {name: tuple(ours.split()) for names, ours in _SYNONYMS.items() for name in names.split()}


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A suggestion of the closest name, with its prefix, for the end of a message; empty if none is close."""
    return _suggestion([prefix + one for one in difflib.get_close_matches(name, list(known), n=1)])


def suggest_option(name: str, group: Sequence[str], every: Sequence[str]) -> str:
    """A suggestion for an unknown option, for the end of a message. group: options with the same prefix; every: all
    options, and in a file the names of options with dashes."""
    if name in DASHED:
        return _suggestion([f"--{name}"], every)
    leaf = name.rpartition(".")[2].lower()
    same_leaf = [key for key in every if key.rpartition(".")[2] == leaf]
    with_word = [key for key in every if f"_{leaf}_" in f"_{key.rpartition('.')[2]}_"]
    with_word = [key for key in with_word if key in group] or with_word
    names = same_leaf or _here(ELSEWHERE.get(leaf, ()), every) or (with_word if len(with_word) <= 3 else ())
    if names:
        return _suggestion(names, every)
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(every)}
    of_leaf = [by_leaf[one] for one in difflib.get_close_matches(leaf, list(by_leaf), n=1)]
    if of_leaf and "." not in name:
        return _suggestion(of_leaf)
    close = difflib.get_close_matches(name, list(group), n=1) or difflib.get_close_matches(name, list(every), n=1)
    return _suggestion(close or of_leaf)


def _here(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Those of the names that this run has; another algorithm than theirs may have an option of that name, too."""
    found = []
    for name in names:
        group, _, leaf = name.rpartition(".")
        # the options of a strategy are no keys of a configuration; they are there if `strategy` is
        if name in every or name.startswith("--") or (group in every and group):
            found.append(name)
        elif group in ALGORITHMS:
            found += [key for key in every if key.rpartition(".")[2] == leaf and key.partition(".")[0] != "optimizer"]
    return list(dict.fromkeys(found))


def _suggestion(names: Sequence[str], every: Sequence[str] = ()) -> str:
    names = [plain if (plain := name.removeprefix("--")) in every else name for name in names]
    return f" (did you mean {' or '.join(repr(name) for name in names)}?)" if names else ""

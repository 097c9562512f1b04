"""How values of other programs' options become values of ours, where they are not copied: the rules of
pages/other_names.toml.

Each function takes `Here` and the value, and returns options with their values. It raises `Differs` for a value without
a counterpart.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlhf_spmd.errors import UserError
from rlhf_spmd.files.data_files import KNOWN, files_of
from rlhf_spmd.migration.sources import Source, Value, number_of, text_of
from rlhf_spmd.pages.algorithm import Algorithm
from rlhf_spmd.pages.other_names import Kind, Name
from rlhf_spmd.plan.adapters import ALL_LINEAR, LINEAR_LAYERS

ALGORITHMS = {  # advantage estimators of verl and OpenRLHF -> algorithm, and its options
    "gae": ("ppo", {}),
    "grpo": ("grpo", {}),
    "group_norm": ("grpo", {}),
    "dr_grpo": ("grpo", {"grpo.scale": "none"}),
    "rloo": ("rloo", {}),
    "remax": ("remax", {}),
    "reinforce": ("reinforce_plus_plus", {}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}),
    "reinforce_baseline": ("reinforce_plus_plus", {"reinforce_plus_plus.baseline": "group"}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus", {"reinforce_plus_plus.baseline": "group"}),
}
LOSSES = {  # of TRL's DPO and GRPO
    "sigmoid": {"dpo.loss": "sigmoid"},
    "ipo": {"dpo.loss": "ipo", "dpo.per_token": "true"},
    "sigmoid_norm": {"dpo.loss": "sigmoid", "dpo.per_token": "true"},
    "grpo": {"*.aggregation": "seq-mean-token-mean"},
    "dapo": {"*.aggregation": "token-mean"},
    "dr_grpo": {"*.aggregation": "seq-mean-token-sum-norm"},
    "cispo": {"*.surrogate": "cispo"},
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "float": "float32"}
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TRL_GENERATIONS = 8  # TRL's default of num_generations
GPUS = 8  # of a node, where nothing says how many (OpenRLHF's default)
MEGATRON_LAYERS = {
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_q": "q_proj",
    "linear_k": "k_proj",
    "linear_v": "v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc1_gate": "gate_proj",
    "linear_fc1_up": "up_proj",
    "linear_fc2": "down_proj",
}
FREE = re.compile(r"[\w.-]+")  # names of run folders
VERL_OPTIMIZER = "actor_rollout_ref.actor.optim"
Options = Mapping[str, Value]


class Differs(Exception):
    """A value that no option here has. kind: what it is then."""

    def __init__(self, kind: Kind, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


@dataclass(frozen=True, slots=True)
class Later:
    """Options that are written as comments, for the user to complete."""

    options: Options
    why: str


@dataclass(frozen=True)
class Here:
    """What a rule reads.

    name: the entry of the option that it translates.
    key: the option's name there.
    """

    source: Source
    algorithm: Algorithm
    name: Name
    key: str

    @cached_property
    def learns_given(self) -> bool:
        """Whether the algorithm learns from responses of the data set."""
        return bool(self.algorithm.responses)

    @cached_property
    def ours(self) -> tuple[str, ...]:
        """The options of the entry that this algorithm has."""
        own = [one.replace("*", self.algorithm.name) for one in self.name.ours]
        return tuple(one for one in own if has_option(self.algorithm, one))

    @property
    def devices(self) -> int:
        """How many devices it is written for."""
        nodes, of_node = layout_of(self.source)
        return nodes * of_node

    @property
    def samples(self) -> int:
        """Responses to a prompt."""
        keys = {"trl": "num_generations", "verl": "actor_rollout_ref.rollout.n", "openrlhf": "n_samples_per_prompt"}
        default = TRL_GENERATIONS if self.source.program == "trl" and self.algorithm.name != "ppo" else 1
        return 1 if self.learns_given else int(self.source.number(keys[self.source.program], default))

    @property
    def mini_batch(self) -> int:
        """Sequences of an optimizer step; 0: not given."""
        number = self.source.number
        if self.source.program == "verl":
            return int(number("actor_rollout_ref.actor.ppo_mini_batch_size")) * self.samples
        if self.source.program == "openrlhf":
            return int(number("train_batch_size", 128))
        return int(number("per_device_train_batch_size", 8) * number("gradient_accumulation_steps", 1)) * self.devices

    @property
    def rollout_batch(self) -> int:
        """Prompts (or rows) of an iteration; 0: not given."""
        if self.learns_given:
            return self.mini_batch
        if self.source.program == "trl":
            steps = self.source.number("steps_per_generation")
            of_steps = steps * self.source.number("per_device_train_batch_size", 8) * self.devices
            generated = self.source.number("generation_batch_size") or of_steps or self.mini_batch
            return max(1, round(generated / self.samples))
        return int(self.source.number("data.train_batch_size") or self.source.number("rollout_batch_size"))

    @property
    def steps(self) -> int:
        """Optimizer steps of an iteration."""
        return max(1, round(self.rollout_batch * self.samples / max(1, self.mini_batch)))


def layout_of(source: Source) -> tuple[int, int]:
    """Translates numbers of nodes, and of devices of a node."""
    if source.program == "verl":
        return int(source.number("trainer.nnodes", 1)), int(source.number("trainer.n_gpus_per_node", 8))
    if source.program == "openrlhf":
        return int(source.number("actor_num_nodes", 1)), int(source.number("actor_num_gpus_per_node", GPUS))
    return 1, int(source.number("num_processes", GPUS))


def has_option(algorithm: Algorithm, key: str) -> bool:
    """Returns whether an option of an algorithm, such as grpo.clip_low, is one of this; true for all other options."""
    group, _, leaf = key.partition(".")
    if group == algorithm.name:
        return leaf in algorithm.options.__dataclass_fields__
    return group not in ("ppo", "grpo", "rloo", "remax", "reinforce_plus_plus", "sft", "dpo", "reward_model", "distill")


def _each(here: Here, value: Value) -> Options:
    return dict.fromkeys(here.ours, value)


def copied(here: Here, value: Value) -> Options:
    """Returns the value as it is."""
    return _each(here, text_of(value))


def number(here: Here, value: Value) -> Options:
    """Copies a number; it is left out where none is set."""
    text = text_of(value)
    if not text:
        raise Differs("no_effect", "it is not set")
    if math.isnan(number_of(text, math.nan)):
        raise Differs("unavailable", f"{text} is not a number")
    return _each(here, text)


def numbers(here: Here, value: Value) -> Options:
    """Translates numbers, separated by commas."""
    if not text_of(value):
        raise Differs("no_effect", "it is not set")
    return _each(here, text_of(value).replace(" ", ","))


def mapping(here: Here, value: Value) -> Options:
    """Translates a mapping."""
    if not isinstance(value, Mapping):
        raise Differs("no_effect" if not text_of(value) else "unavailable", "it is not a mapping")
    return _each(here, value)


# ---- models, data, rewards -------------------------------------------------------------------------------------------


def folder(here: Here, value: Value) -> Options | Later:
    """Translates a model; one of the hub must be downloaded first."""
    text = text_of(value)
    key = here.ours[0].removeprefix("--")
    if key.startswith("models.") and key.removeprefix("models.") not in here.algorithm.roles:
        raise Differs("no_effect", f"{here.algorithm.name} has no such model")
    if Path(text).is_dir():
        return {key: text}
    return Later({key: text}, "give a folder: `hf download NAME --local-dir FOLDER`")


def files(here: Here, value: Value) -> Options | Later:
    """Translates files of prompts; data sets of the hub must be written to files first."""
    texts = [one.strip(" '\"[]") for one in text_of(value).split(",")]
    texts = [one for one in texts if one]
    if not texts:
        raise Differs("no_effect", "it is not set")
    found = {here.ours[0]: ",".join(texts)}
    if all(map(_has_data, texts)):
        return found
    return Later(found, f"give a file: {KNOWN}")


def _has_data(text: str) -> bool:
    """Returns whether this names files of data, a folder of them, or a pattern."""
    try:
        return all(path.is_file() for path in files_of(text))
    except UserError:
        return False


def mixture(here: Here, value: Value) -> Options | Later:
    """Translates several data sets with weights."""
    sets = value.get("datasets", []) if isinstance(value, Mapping) else []
    ids = [text_of(one.get("id")) for one in sets]
    weights = [text_of(one.get("weight", 1)) for one in sets]
    return Later(
        {"data.prompts": ",".join(ids), "data.weights": ",".join(weights)}, "give files, one for each data set"
    )


def truncation(here: Here, value: Value) -> Options:
    """Translates what verl does with prompts that are too long, where they are not filtered."""
    if here.source.text("data.filter_overlong_prompts") == "true" or text_of(value) == "error":
        raise Differs("no_effect", "prompts that are too long are filtered, or an error, as by default")
    if text_of(value) != "left":
        raise Differs("unavailable", f"{text_of(value)}: a prompt that is too long loses its first tokens, or its row")
    return {"data.long_prompts": "truncate"}


def column(here: Here, value: Value) -> Options:
    """Translates a column of the data set, which has a fixed name here."""
    names = {"chosen_key": ["chosen"], "rejected_key": ["rejected"], "output_key": ["completion"]}
    names |= {"label_key": ["label", "labels"], "prompt_key": ["prompt"]}
    if text_of(value) in ("", *names[here.key]):
        raise Differs("no_effect", "the column has the name that is expected")
    raise Differs("unavailable", f"a column of another name: rename it to {names[here.key][0]}")


def reward_function(here: Here, value: Value) -> Options | Later:
    """Translates reward functions: of a file, of modules, or names that another program knows."""
    text = text_of(value)
    if text.startswith("http"):
        return Later({"reward_function": "FILE.py:score"}, f"write `score = rlhf_spmd.rewards.remote({text!r})`")
    if text.endswith(".py"):
        return _function(text, "reward_func")
    if not text:
        raise Differs("no_effect", "it is not set")
    named = [one.strip() for one in text.split(",")]
    if all("." in one for one in named):  # of modules
        return {"reward_function": ",".join(":".join(one.rsplit(".", 1)) for one in named)}
    names = ",".join(f"FILE.py:{one}" for one in named)
    return Later({"reward_function": names}, "write these functions into a file")


def verl_reward_function(here: Here, value: Value) -> Options | Later:
    """Translates the reward function of a file."""
    text = text_of(value)
    if not text:
        raise Differs("no_effect", "it is not set")
    source = here.source
    default = source.text("reward.custom_reward_function.name", "compute_score")
    return _function(text, source.text("custom_reward_function.name", default))


def _function(path: str, name: str) -> Options | Later:
    found = {"reward_function": f"{path}:{name}"}
    return found if Path(path).is_file() else Later(found, "this file is not here")


# ---- lengths and batches ---------------------------------------------------------------------------------------------


def total_length(here: Here, value: Value) -> Options:
    """Splits a limit of prompt and response together: what the prompt leaves, or a half for each."""
    total = int(number_of(value))
    if total < 2:
        raise Differs("no_effect", "it is not set")
    keys = {"trl": "max_prompt_length", "openrlhf": "prompt_max_len"}
    prompt = int(here.source.number(keys.get(here.source.program, ""), total // 2))
    return {"data.max_prompt": str(prompt), "generation.max_new_tokens": str(max(1, total - prompt))}


def openrlhf_epochs(here: Here, value: Value) -> Options:
    """Passes over an iteration's rows, or over the data set where the responses are those of the set."""
    return {"data.epochs" if here.learns_given else f"{here.algorithm.name}.epochs": text_of(value)}


def iterations(here: Here, value: Value) -> Options:
    """Translates a number of steps, each of which is an iteration here."""
    if number_of(value) <= 0:
        raise Differs("no_effect", "no limit")
    return {"iterations": text_of(value)}


def optimizer_steps(here: Here, value: Value) -> Options:
    """Translates a number of optimizer steps, of which an iteration has one or more here."""
    if number_of(value) <= 0:
        raise Differs("no_effect", "no limit")
    return {"iterations": str(max(1, round(number_of(value) / here.steps)))}


def episodes(here: Here, value: Value) -> Options:
    """Translates a number of responses of the whole run."""
    return {"iterations": str(max(1, round(number_of(value) / (here.rollout_batch * here.samples))))}


def rollout_batch(here: Here, value: Value) -> Options:
    """Translates the number of prompts of an iteration."""
    return {"rollout_batch": str(here.rollout_batch)}


def mini_batch(here: Here, value: Value) -> Options:
    """Translates the number of sequences of an optimizer step over all devices."""
    found = {"mini_batch": str(here.mini_batch)}
    alone = here.source.program == "trl" or here.learns_given  # no option there says it
    return {**found, "rollout_batch": str(here.rollout_batch)} if alone else found


def micro_batch(here: Here, value: Value) -> Options:
    """Translates the number of sequences of a forward pass on one device."""
    if here.source.program == "trl":
        return {**mini_batch(here, value), "micro_batch": text_of(value)}
    of_all = "actor_rollout_ref.actor.ppo_micro_batch_size" in here.source.values
    return {"micro_batch": str(max(1, int(number_of(value)) // (here.devices if of_all else 1)))}


def every(here: Here, value: Value) -> Options:
    """Translates an interval in iterations; -1 is never."""
    text = text_of(value)
    what = here.ours[0]
    if here.source.program == "trl":
        strategy = here.source.text("save_strategy" if what == "checkpoint.every" else "eval_strategy", "steps")
        if strategy not in ("steps", ""):
            raise Differs("no_effect", f"it does not count where the strategy is {strategy}")
        if 0 < number_of(text) < 1:
            raise Differs("unavailable", f"a share of the run: set {what} to a number of iterations")
        text = str(max(1, round(number_of(text) / here.steps)))
    if number_of(text) > 0:
        return {what: text}
    if what == "checkpoint.every":
        return {what: "0"}
    raise Differs("no_effect", "no evaluation: leave eval.prompts out")


def before_training(here: Here, value: Value) -> Options:
    """Translates whether a run evaluates before training."""
    if text_of(value) == "true":
        raise Differs("no_effect", "that is the default")
    return {"eval.at_start": "false"}


def each_iteration(here: Here, value: Value) -> Options:
    """Translates a switch for what is written in every iteration."""
    if not text_of(value):
        raise Differs("no_effect", "it is not set")
    return _each(here, "1")


# ---- optimizer -------------------------------------------------------------------------------------------------------


def learning_rate(here: Here, value: Value) -> Options:
    """Translates the learning rate of the model that trains first; TRL's one optimizer trains the critic, too."""
    roles = [name for name, role in here.algorithm.roles.items() if role.lr is not None]
    return {f"optimizer.{role}_lr": text_of(value) for role in roles[: None if here.source.program == "trl" else 1]}


def warmup_steps(here: Here, value: Value) -> Options:
    """Translates a number of optimizer steps; verl counts iterations."""
    if 0 < number_of(value) < 1:  # transformers takes a share, too
        return warmup_ratio(here, value)
    if number_of(value) <= 0:
        raise Differs("no_effect", "it is off")
    factor = here.steps if here.source.program == "verl" else 1
    return {"optimizer.warmup_steps": str(round(number_of(value) * factor))}


def warmup_ratio(here: Here, value: Value) -> Options:
    """Translates a share of the run's optimizer steps."""
    if number_of(value) <= 0:
        raise Differs("no_effect", "it is off")
    steps = [here.source.number(key) for key in ("warmup_steps", "actor_rollout_ref.actor.optim.lr_warmup_steps")]
    if max(steps) >= 1:
        raise Differs("no_effect", "the number of steps counts")
    return {"optimizer.warmup_ratio": text_of(value)}


def schedule(here: Here, value: Value) -> Options:
    """Translates the schedule of the learning rate."""
    text = text_of(value)
    if text not in SCHEDULES:
        raise Differs("unavailable", f"the schedule {text}: constant, linear or cosine")
    return {"optimizer.schedule": SCHEDULES[text]}


def min_lr_ratio(here: Here, value: Value) -> Options:
    """Translates the least learning rate to a share of the largest; where it is a rate itself, that of the model is
    known."""
    source, what, options = here.source, here.key.rpartition(".")[2], value
    if not isinstance(options, Mapping):
        options = {what: value}
    names = (
        "lr_scheduler_type",
        f"{VERL_OPTIMIZER}.warmup_style",
        f"{VERL_OPTIMIZER}.lr_scheduler_type",
        "lr_scheduler",
    )
    default = {"trl": "linear", "verl": "constant", "openrlhf": "cosine_with_min_lr"}[source.program]
    schedule = next(filter(None, map(source.text, names)), default)
    least = next((one for name in ("min_lr_rate", "min_lr_ratio", "min_lr") if (one := options.get(name))), None)
    if least is None or number_of(least) <= 0:
        raise Differs("no_effect", "it is off")
    if not schedule.startswith("cosine"):
        raise Differs("no_effect", f"the schedule {schedule} has no least rate there")
    ratio = number_of(least)
    if "min_lr" in options:
        rate = next(filter(None, map(source.number, ("learning_rate", "actor_learning_rate"))), 0.0)
        if not 0 < ratio < rate:
            raise Differs("unavailable", "set optimizer.min_lr_ratio to its share of the learning rate")
        ratio = ratio / rate
    return {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": f"{ratio:.6g}"}


def adamw(here: Here, value: Value) -> Options:
    """Accepts AdamW with 32-bit states, which is the only optimizer here."""
    if text_of(value).lower() in ("", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "torch.optim"):
        raise Differs("no_effect", "AdamW is the only optimizer")
    raise Differs("unavailable", f"the optimizer {text_of(value)}: it is AdamW")


def betas(here: Here, value: Value) -> Options:
    """Translates the two betas of Adam."""
    texts = re.findall(r"[\d.e-]+", text_of(value))
    if len(texts) != len(here.ours):
        raise Differs("unavailable", "it is not two numbers")
    return dict(zip(here.ours, texts, strict=True))


def weight_decay_of_matrices(here: Here, value: Value) -> Options:
    """Translates the weight decay, which here leaves out norms and biases."""
    if number_of(value) == 0:
        raise Differs("no_effect", "it is 0, as by default")
    return {"optimizer.weight_decay": text_of(value), "optimizer.weight_decay_on": "matrices"}


# ---- the algorithm ---------------------------------------------------------------------------------------------------


def algorithm(here: Here, value: Value) -> Options:
    """Translates the algorithm, with options that its name there stands for."""
    name, options = ALGORITHMS[text_of(value)]
    return {"algorithm": name, **options}


def kl_of(here: Here, value: Value) -> Options:
    """Translates OpenRLHF's init_kl_coef: in the reward, or with use_kl_loss in the loss."""
    name, in_loss = here.algorithm.name, here.source.text("use_kl_loss") == "true"
    found = number(here, value)
    if has_option(here.algorithm, f"{name}.kl_in"):
        return {**found, f"{name}.kl_in": "loss" if in_loss else "reward"}
    if number_of(value) and in_loss != (name == "grpo"):
        where = "a term of the loss" if name == "grpo" else "in the reward"
        raise Differs("unavailable", f"the KL divergence of {name} is {where}: set {name}.kl_coef yourself")
    return found


def verl_kl_loss(here: Here, value: Value) -> Options:
    """Translates verl's KL divergence in the loss."""
    if here.source.text("actor_rollout_ref.actor.use_kl_loss") != "true" or number_of(value) == 0:
        raise Differs("no_effect", "the loss has no KL divergence")
    return _kl(here, value, "loss")


def verl_kl_reward(here: Here, value: Value) -> Options:
    """Translates verl's KL divergence in the reward."""
    in_loss = here.source.text("actor_rollout_ref.actor.use_kl_loss") == "true"
    in_reward = here.source.text("algorithm.use_kl_in_reward", "" if in_loss else "true") == "true"
    if not in_reward or number_of(value) == 0:
        raise Differs("no_effect", "the reward has no KL divergence")
    return _kl(here, value, "reward")


def _kl(here: Here, value: Value, where: str) -> Options:
    """Sets kl_coef, where the algorithm has the KL divergence in the same place."""
    name = here.algorithm.name
    if has_option(here.algorithm, f"{name}.kl_in"):
        return {f"{name}.kl_coef": text_of(value), f"{name}.kl_in": where}
    if (name == "grpo") != (where == "loss"):
        place = "loss" if name == "grpo" else "reward"
        raise Differs("unavailable", f"a KL divergence in the {where}: {name}.kl_coef is one in the {place}")
    return {f"{name}.kl_coef": text_of(value)}


def beta(here: Here, value: Value) -> Options:
    """Translates beta: DPO's own; of the other algorithms the weight of the KL divergence."""
    key = "dpo.beta" if here.algorithm.name == "dpo" else f"{here.algorithm.name}.kl_coef"
    if not has_option(here.algorithm, key):
        raise Differs("no_effect", f"{here.algorithm.name} has no reference")
    return {key: text_of(value)}


def clip(here: Here, value: Value) -> Options:
    """Translates the range of ratios, on both sides unless another option gives the upper one."""
    lower = ("actor_rollout_ref.actor.clip_ratio_low",)
    upper = ("epsilon_high", "actor_rollout_ref.actor.clip_ratio_high")
    given = {"clip_low": lower, "clip_high": upper}
    keys = [key for key in here.ours if not {*given.get(key.partition(".")[2], ())} & here.source.values.keys()]
    if not keys:
        raise Differs("no_effect", "other options give both sides")
    return dict.fromkeys(keys, text_of(value))


def clip_pair(here: Here, value: Value) -> Options:
    """Translates both sides of the range of ratios."""
    texts = re.findall(r"[\d.e-]+", text_of(value))
    if here.algorithm.name == "ppo":
        if len({*texts}) > 1:
            raise Differs("unavailable", "ppo.clip_ratio is the same on both sides")
        return {"ppo.clip_ratio": texts[0]}
    return betas(here, value)


def discount(here: Here, value: Value) -> Options:
    """Translates the discount of PPO; the other algorithms have none."""
    if here.algorithm.name != "ppo":
        raise Differs("no_effect", f"{here.algorithm.name} has no generalised advantage estimation")
    return number(here, value)


def aggregation(here: Here, value: Value) -> Options:
    """Translates verl's loss_agg_mode."""
    text = text_of(value)
    if text not in AGGREGATIONS or not here.ours:
        raise Differs("unavailable", f"{text}: the loss is one of {', '.join(AGGREGATIONS)}")
    return {here.ours[0]: text}


def trl_loss_type(here: Here, value: Value) -> Options:
    """Translates the losses of DPO and GRPO in TRL."""
    text = text_of(value)
    found = {key.replace("*", here.algorithm.name): one for key, one in LOSSES.get(text, {}).items()}
    if not found or not all(has_option(here.algorithm, key) for key in found):
        if here.algorithm.name == "sft" and text in ("nll", ""):
            raise Differs("no_effect", "the likelihood is the only loss")
        raise Differs("unavailable", f"the loss {text}")
    return found


def importance_weights(here: Here, value: Value) -> Options:
    """Translates the weights of the generator's against recomputed logprobs."""
    if text_of(value) != "true":
        raise Differs("no_effect", "it is off")
    if {here.source.text("importance_sampling_level"), here.source.text("policy_loss_type")} & {"sequence", "gspo"}:
        raise Differs(
            "unavailable", "weights of tokens where the ratio is a response's; importance_weights=geometric is"
        )
    name = here.algorithm.name
    return {f"{name}.importance_weights": "token", f"{name}.old_logprobs": "recompute"}


def overlong(here: Here, value: Value) -> Options:
    """Translates the penalty of long responses."""
    _need_overlong(here)
    return {f"{here.algorithm.name}.overlong_buffer": text_of(value), f"{here.algorithm.name}.overlong": "shape"}


def overlong_penalty(here: Here, value: Value) -> Options:
    """Translates the size of the penalty of long responses."""
    _need_overlong(here)
    return number(here, value)


def _need_overlong(here: Here) -> None:
    if not here.ours:
        raise Differs("unavailable", f"{here.algorithm.name} has no penalty of long responses")
    enabled = [text_of(value) for key, value in here.source.values.items() if re.search(r"overlong_\w+\.enable$", key)]
    if enabled and "true" not in enabled:
        raise Differs("no_effect", "it is off")


# ---- sampling, logs, placement ---------------------------------------------------------------------------------------


def top_k(here: Here, value: Value) -> Options:
    """Translates top_k; -1 and 0 are off."""
    if number_of(value) <= 0:
        raise Differs("no_effect", "it is off")
    return {"generation.top_k": text_of(value)}


def eval_temperature(here: Here, value: Value) -> Options:
    """Translates the temperature of evaluations; 0 where nothing is sampled."""
    sampled = here.source.text("actor_rollout_ref.rollout.val_kwargs.do_sample", "false") == "true"
    return {"eval.temperature": text_of(value) if sampled or here.source.program != "verl" else "0"}


def wandb_project(here: Here, value: Value) -> Options | Later:
    """Translates the project that Weights & Biases logs to."""
    used = [here.source.text(key) for key in ("trainer.logger", "report_to", "use_wandb")]
    found = {"wandb": text_of(value)}
    logs = "wandb" in ",".join(used) or here.source.text("use_wandb") not in ("", "false")
    return found if logs else Later(found, "nothing is logged to it there")


def run_name(here: Here, value: Value) -> Options:
    """Translates the name of the run folder."""
    text = text_of(value)
    if not FREE.fullmatch(text):
        raise Differs("unavailable", f"{text!r} is not the name of a folder")
    return {"name": text}


def dtype(here: Here, value: Value) -> Options:
    """Translates the precision: float32 or bfloat16."""
    text = text_of(value)
    if text in ("", "auto"):
        raise Differs("no_effect", "it is not set")
    if text not in DTYPES:
        raise Differs("unavailable", f"{text}: use dtype=bfloat16")
    return {"dtype": DTYPES[text]}


def recompute(here: Here, value: Value) -> Options:
    """Translates whether activations are computed again in the backward pass."""
    if text_of(value) != "true":
        raise Differs("no_effect", "it is off")
    return {"strategy.recompute": "true"}


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapters(here: Here, value: Value) -> Options:
    """Translates the rank of adapters, or TRL's switch: with scale and targets, whose defaults differ there."""
    group, rank, alpha, targets = _adapters(here)
    found = {f"{group}.rank": rank, f"{group}.alpha": alpha, f"{group}.targets": targets}
    of_critic = [here.source.number(f"critic.model.{one}") for one in ("lora_rank", "lora.rank")]
    trains_critic = here.source.program != "openrlhf" and "critic" in here.algorithm.trained_roles
    if here.source.program == "trl" and here.learns_given and "lora_dropout" not in here.source.values:
        found[f"{group}.dropout"] = "0.05"  # TRL's default
    if group == "lora" and trains_critic and not any(of_critic):
        found["lora.critic.rank"] = "0"  # there, critics have adapters of their own or none
    return found


def of_adapters(here: Here, value: Value) -> Options:
    """Translates the scale, the layers, or the rank of adapters beside TRL's switch."""
    group, rank, alpha, targets = _adapters(here)
    of_key = {"alpha": alpha, "modules": targets, "r": rank}
    return {f"{group}.{here.ours[0].rpartition('.')[2]}": of_key[re.split(r"[._]", here.key)[-1]]}


def rslora(here: Here, value: Value) -> Options:
    """Translates TRL's use of rank-stabilised LoRA."""
    group, *_ = _adapters(here)
    if text_of(value) != "true":
        raise Differs("no_effect", "it is off")
    return {f"{group}.rslora": "true"}


def dropout(here: Here, value: Value) -> Options:
    """Translates the dropout of what adapters read, where no responses are generated."""
    group, *_ = _adapters(here)
    if number_of(value, 0) <= 0:
        raise Differs("no_effect", "it is off")
    if not here.learns_given:
        raise Differs("unavailable", "with it, training has other probabilities than generation")
    return {f"{group}.dropout": text_of(value)}


def joined(here: Here, value: Value) -> Options:
    """Translates verl's generation with the adapters in the weights."""
    _adapters(here)
    if text_of(value) != "true":
        raise Differs("no_effect", "it is off")
    return {"lora.generate": "joined"}


def _adapters(here: Here) -> tuple[str, str, str, str]:
    """Returns the options of adapters here: rank, alpha and targets. Raises Differs if there are none."""
    source, program = here.source, here.source.program
    of_critic = here.key.startswith("critic.")
    if of_critic and "critic" not in here.algorithm.trained_roles:
        raise Differs("no_effect", f"{here.algorithm.name} has no critic")
    at = {"trl": "lora_", "verl": f"{'critic' if of_critic else 'actor_rollout_ref'}.model.lora_", "openrlhf": "lora_"}
    of_all = {"trl": "lora_target_modules", "verl": f"{at['verl'].removesuffix('lora_')}target_modules"}
    before, targets = at[program], of_all.get(program, "target_modules")
    rank, alpha = f"{before}{'r' if program == 'trl' else 'rank'}", f"{before}alpha"
    other = {"verl": f"{before[:-1]}.", "openrlhf": "ds.lora."}.get(program, "")
    if other and rank not in source.values:
        rank, alpha, targets = f"{other}rank", f"{other}alpha", f"{other}target_modules"
    default = {"trl": "16"}.get(program, "0")
    is_on = program != "trl" or source.text("use_peft") == "true"
    number = int(source.number(rank, number_of(default)))
    if not is_on or number <= 0:
        raise Differs("no_effect", "all weights train")
    usual = "32" if program == "trl" or rank.endswith("lora.rank") and program == "verl" else "16"
    group = "lora.critic" if of_critic else "lora"
    return group, str(number), source.text(alpha) or usual, _targets(here, source.text(targets))


def _targets(here: Here, text: str) -> str:
    """Returns the names of layers. Raises Differs for one that cannot have adapters here."""
    given = [one.strip(" '\"[]") for one in re.split(r"[,\s]+", text) if one.strip(" '\"[]")]
    if not given:
        return "q_proj,v_proj" if here.source.program == "trl" else "all-linear"
    found = [part for one in given for part in MEGATRON_LAYERS.get(one, one).split(",")]
    if unknown := [one for one in found if one not in (*LINEAR_LAYERS, ALL_LINEAR)]:
        raise Differs("unavailable", f"{unknown[0]} has no adapters here; give lora.rank and lora.targets")
    return ALL_LINEAR if ALL_LINEAR in found else ",".join(one for one in LINEAR_LAYERS if one in found)


def parallel(here: Here, value: Value) -> Options:
    """Translates parallel sizes, which the strategy `reallocation` takes for training and generation apart."""
    if number_of(value, 1) <= 1:
        raise Differs("no_effect", "it is 1")
    if here.learns_given:
        raise Differs("no_effect", f"{here.algorithm.name} generates nothing")
    return {"strategy": "reallocation", here.ours[0]: text_of(value)}


def token_budget(here: Here, value: Value) -> Options:
    """Translates the tokens of a forward pass, an option of every strategy."""
    source = here.source
    used = source.text("actor_rollout_ref.actor.use_dynamic_bsz"), source.text("use_dynamic_batch")
    if "true" not in used:
        raise Differs("no_effect", "micro-batches are counted in sequences")
    return {"strategy.tokens": text_of(value)}


def layout(here: Here, value: Value) -> Options:
    """Translates numbers of nodes and devices."""
    return {"layout": "{}x{}".format(*layout_of(here.source))}


Rule = Callable[[Here, Value], Options | Later]
RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        *(
            copied,
            number,
            numbers,
            mapping,
            folder,
            files,
            mixture,
            truncation,
            importance_weights,
            reward_function,
            verl_reward_function,
        ),
        *(total_length, openrlhf_epochs, iterations, optimizer_steps, episodes, rollout_batch, mini_batch, micro_batch),
        *(every, each_iteration, before_training, column, adamw, learning_rate, warmup_steps, warmup_ratio),
        min_lr_ratio,
        *(schedule, betas),
        *(weight_decay_of_matrices, algorithm, kl_of, verl_kl_loss, verl_kl_reward, beta, clip, clip_pair, discount),
        *(aggregation, trl_loss_type, overlong, overlong_penalty, top_k, eval_temperature, wandb_project, run_name),
        *(dtype, recompute, parallel, token_budget, layout, adapters, of_adapters, rslora, dropout, joined),
    )
}


def from_values(here: Here, value: Value) -> Options:
    """Looks a value up in the table of the entry; an empty one is the default here."""
    text = text_of(value)
    known: Sequence[str] = [*here.name.values]
    if text not in known:
        raise Differs("unavailable", f"{text or 'null'} is not one of {', '.join(known)}")
    if not here.name.values[text]:
        raise Differs("no_effect", "that is the default")
    if not here.ours:
        raise Differs("unavailable", f"{here.algorithm.name} has no such option")
    return _each(here, here.name.values[text])

"""TRL's trainers, models and tokenizers as both kinds of workers use them. Runs in .venv-peers."""

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

GENERATING = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
KINDS = GENERATING | {
    "sft": (SFTTrainer, SFTConfig),
    "reward_model": (RewardTrainer, RewardConfig),
    "dpo": (DPOTrainer, DPOConfig),
}
ON_A_CPU = {  # options of a trainer's config: no files, logs and mixed precision
    **{"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True},
    **{"use_cpu": True, "bf16": False, "lr_scheduler_type": "constant"},
}


def load(kind: str, folder: str, dtype: torch.dtype, reference: str | None = None):
    """Loads a model.

    reference: where a trainer that generates finds its reference: TRL reads it from the folder that the model says it
        comes from.
    """
    if kind == "reward_model":
        return AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, num_labels=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if kind in GENERATING:
        model.config._name_or_path = reference or folder
    return model


def tokenizer_of(folder: str):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer

"""TRL's worker for whole steps on given responses: `.venv-peers/bin/python -m bench.against_trl.trl_given_steps MODEL
WORK [RANK]`. RANK: of peft's adapters of all linear layers; 0: all weights train.

SFTTrainer, RewardTrainer and DPOTrainer as they are, without checkpointing of activations, but that each step waits
for a command. A step accumulates the gradients of all micro-batches of the set.
"""

import sys
import tempfile
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback

from bench.against_trl import given_work, work
from bench.against_trl.given_work import ADAPTED, WORKS, GivenWork
from bench.against_trl.trl_given import KINDS, load
from bench.against_trl.trl_trainers import ON_A_CPU

MOST_STEPS = 10_000


class OnCommand(TrainerCallback):
    """Waits for a command before each step, and answers after it."""

    def __init__(self):
        self.told, self.answers = work.commands()

    def on_step_begin(self, args, state, control, **_):
        if next(self.told, None) is None:
            sys.exit(0)
        self.started, self.began = time.process_time(), time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        step_s, wall_s = time.process_time() - self.started, time.perf_counter() - self.began
        work.answer(self.answers, step_s=step_s, wall_s=wall_s, peak_bytes=given_work.peak_bytes())


def trainer_of(of: GivenWork, model: str, scratch: str, rank: int):
    trainer_class, config_class = KINDS[of.page]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = given_work.rows_of(of)
    micro_batch = 1 if of.packs else given_work.MICRO_BATCH // of.sequences_per_row
    more = {"ref_model": load("dpo", model, torch.float32)} if of.page == "dpo" else {}
    if rank:  # the reference is the base
        more = {"peft_config": LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")}
    options = {"learning_rate": given_work.LR, "max_steps": MOST_STEPS, "gradient_checkpointing": False}
    options |= {"max_length": given_work.MOST_TOKENS, "per_device_train_batch_size": micro_batch} | of.theirs

    def made(num_micro_batches: int, callbacks: list[TrainerCallback]):
        return trainer_class(
            load(of.page, model, torch.float32),
            args=config_class(output_dir=scratch, gradient_accumulation_steps=num_micro_batches, **ON_A_CPU, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=callbacks,
            **more,
        )

    # only a trainer knows how many rows packing leaves
    num_rows = len(made(1, []).train_dataset) if of.packs else len(rows)
    return made(num_rows // micro_batch, [OnCommand()])


def main(model: str, name: str, rank: str = "0") -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        trainer_of((WORKS | ADAPTED)[name], model, scratch, int(rank)).train()


if __name__ == "__main__":
    main(*sys.argv[1:])

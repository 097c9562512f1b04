"""TRL's worker for whole steps: `.venv-peers/bin/python -m bench.against_trl.trl_steps MODEL WORK [RANK]`.

TRL's trainers as they are, but that each step waits for a command. GRPOTrainer's responses end at the lengths that the
command gives: a logits processor of transformers allows the end token there and nowhere else. SFTTrainer, RewardTrainer
and DPOTrainer take a step over all micro-batches of the set. RANK: of peft's adapters of all linear layers; 0: all
weights train.
"""

import functools
import sys
import tempfile
import time
from contextlib import contextmanager

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.against_trl import work
from bench.against_trl.trl_trainers import KINDS, ON_A_CPU, load, tokenizer_of
from bench.against_trl.work import ADAPTED, GRPO, WORKS, Told, Work

ENDLESS = {"max_steps": 10_000, "learning_rate": work.LR} | ON_A_CPU


class OnCommand(TrainerCallback):
    """Waits for a command before each step, and answers after it."""

    def __init__(self):
        self.told, self.answers = work.commands()

    def on_step_begin(self, args, state, control, model=None, **_):
        told = next(self.told, None)
        if told is None:
            sys.exit(0)
        self.begin(told, model)
        self.step = work.Step()

    def on_step_end(self, args, state, control, **_):
        work.answer(self.answers, **self.step.took(), **self.phases())

    def begin(self, told: Told, model) -> None:
        """Prepares a step before its clock starts."""

    def phases(self) -> dict[str, float]:
        """Returns seconds of some phases of the step."""
        return {}


# ---- GRPO -----------------------------------------------------------------------------------------------------------


class EndAt(LogitsProcessor):
    """Each row draws the end token as its last token, and not before."""

    def __init__(self, eos: int):
        self.eos, self.start, self.lengths = eos, 0, torch.zeros(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.eos] = -torch.inf
        last = self.lengths == input_ids.shape[1] - self.start + 1
        if last.any():
            scores[last] = -torch.inf
            scores[last, self.eos] = 0.0
        return scores


class Timed(GRPOTrainer):
    """Notes the seconds of generation and of the reference's pass."""

    def __init__(self, *args, ends: EndAt, **kwargs):
        super().__init__(*args, **kwargs)
        self.ends, self.phases = ends, {}

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.ends.start = max(map(len, prompt_ids))
        with self._noted("generation"):
            found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        assert sorted(map(len, found[0])) == sorted(self.ends.lengths.tolist()), "responses of other lengths"
        return found

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        assert model is self.ref_model, "old logprobs are those of the update"
        with self._noted("reference"):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    @contextmanager
    def _noted(self, name: str):
        started = time.process_time()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.process_time() - started


class GrpoOnCommand(OnCommand):
    trainer: Timed

    def begin(self, told: Told, model) -> None:
        if told.checkpointing:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()
        self.trainer.ends.lengths = torch.tensor(told.lengths)
        self.trainer.phases.clear()

    def phases(self) -> dict[str, float]:
        return self.trainer.phases


def grpo_trainer(folder: str, scratch: str) -> Timed:
    model, tokenizer = load("grpo", folder, torch.float32), tokenizer_of(folder)
    ends, on_command = EndAt(tokenizer.eos_token_id), GrpoOnCommand()
    model.generate = functools.partial(model.generate, logits_processor=LogitsProcessorList([ends]))
    config = GRPOConfig(
        output_dir=scratch,
        num_generations=work.SAMPLES,
        per_device_train_batch_size=work.MICRO_BATCH,
        gradient_accumulation_steps=work.PROMPTS * work.SAMPLES // work.MICRO_BATCH,
        max_completion_length=work.LIMIT,
        beta=work.KL,
        **ENDLESS,
    )
    on_command.trainer = Timed(
        model,
        reward_funcs=lambda completions, **_: [work.reward(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": work.prompts()}),
        processing_class=tokenizer,
        callbacks=[on_command],
        ends=ends,
    )
    return on_command.trainer


# ---- given responses ------------------------------------------------------------------------------------------------


def given_trainer(of: Work, model: str, scratch: str, rank: int):
    """Makes a trainer without checkpointing of activations."""
    trainer_class, config_class = KINDS[of.page]
    rows = work.rows_of(of)
    micro_batch = 1 if of.packs else work.GIVEN_MICRO_BATCH // of.sequences_per_row
    more = {"ref_model": load("dpo", model, torch.float32)} if of.page == "dpo" else {}
    if rank:  # the reference is the base
        more = {"peft_config": LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")}
    options = {"gradient_checkpointing": False, "max_length": work.MOST_TOKENS}
    options |= {"per_device_train_batch_size": micro_batch} | ENDLESS | of.theirs

    def made(num_micro_batches: int, callbacks: list[TrainerCallback]):
        return trainer_class(
            load(of.page, model, torch.float32),
            args=config_class(output_dir=scratch, gradient_accumulation_steps=num_micro_batches, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer_of(model),
            callbacks=callbacks,
            **more,
        )

    # only a trainer knows how many rows packing leaves
    num_rows = len(made(1, []).train_dataset) if of.packs else len(rows)
    return made(num_rows // micro_batch, [OnCommand()])


def main(model: str, name: str, rank: str = "0") -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if name == GRPO:
            grpo_trainer(model, scratch).train()
        else:
            given_trainer((WORKS | ADAPTED)[name], model, scratch, int(rank)).train()


if __name__ == "__main__":
    main(*sys.argv[1:])

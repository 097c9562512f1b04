"""TRL's worker for whole steps: `.venv-peers/bin/python -m bench.against_trl.trl_steps MODEL PROMPT...`.

`GRPOTrainer.train` as it is, but that each step waits for a command, and that a response ends at the length that the
command gives: a logits processor of transformers allows its end token there and nowhere else.
"""

import functools
import sys
import tempfile
import time

import torch
from datasets import Dataset
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOTrainer

from bench.against_trl import work
from bench.against_trl.trl_trainers import load, options_of

MOST_STEPS = 10_000


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

    def _noted(self, name: str) -> "Clock":
        return Clock(self.phases, name)


class Clock:
    def __init__(self, into: dict[str, float], name: str):
        self.into, self.name = into, name

    def __enter__(self):
        self.started = time.process_time()

    def __exit__(self, *_):
        self.into[self.name] = self.into.get(self.name, 0.0) + time.process_time() - self.started


class OnCommand(TrainerCallback):
    """Waits for a command before each step, and answers after it."""

    def __init__(self, ends: EndAt):
        self.told, self.answers = work.commands()
        self.ends, self.trainer = ends, None

    def on_step_begin(self, args, state, control, model=None, **_):
        told = next(self.told, None)
        if told is None:
            sys.exit(0)
        if told.checkpointing:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()
        self.ends.lengths = torch.tensor(told.lengths)
        self.trainer.phases.clear()
        self.started, self.began = time.process_time(), time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        step_s, wall_s = time.process_time() - self.started, time.perf_counter() - self.began
        work.answer(self.answers, step_s=step_s, wall_s=wall_s, **self.trainer.phases)


def main(folder: str, *prompts: str) -> None:
    torch.set_num_threads(1)
    model, tokenizer = load(folder, folder, torch.float32)
    ends = EndAt(tokenizer.eos_token_id)
    model.generate = functools.partial(model.generate, logits_processor=LogitsProcessorList([ends]))
    on_command = OnCommand(ends)
    with tempfile.TemporaryDirectory() as scratch:
        config = options_of(
            "grpo",
            scratch,
            num_generations=work.SAMPLES,
            per_device_train_batch_size=work.MICRO_BATCH,
            gradient_accumulation_steps=work.PROMPTS * work.SAMPLES // work.MICRO_BATCH,
            max_completion_length=work.LIMIT,
            max_steps=MOST_STEPS,
            learning_rate=work.LR,
            beta=work.KL,
        )
        on_command.trainer = Timed(
            model,
            reward_funcs=lambda completions, **_: [work.reward(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
            processing_class=tokenizer,
            callbacks=[on_command],
            ends=ends,
        )
        on_command.trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])

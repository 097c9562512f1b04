"""Rounds of drawing on one rank, against an obvious twin: which prompts an iteration uses, and what it draws."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch

from rlhf_spmd.algorithms.training_order import epoch_order
from rlhf_spmd.config import presets
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.runtime.data.prompt_order import permutation
from rlhf_spmd.runtime.execute.rounds import SAMPLES_OF_ROUND
from rlhf_spmd.runtime.generation.rollout import generate_rows
from rlhf_spmd.runtime.run import recorded
from tests.folders import write_all
from tests.runs import RunOf

REWARD = """
def few(prompts, responses):
    return [float(len(response.split()) > 4) + 0.5 * float("ba" in response) for response in responses]
"""
CASES = {
    "three rounds": ("grpo.rounds=3",),
    "ten rounds": ("grpo.rounds=10", "seed=2"),
    "groups across mini-batches": ("grpo.rounds=3", "mini_batch=8", "rollout_batch=8"),
    "truncated ones do not count": ("grpo.rounds=3", "grpo.overlong=mask", "samples_per_prompt=4", "mini_batch=12"),
    "a set that is used up": ("grpo.rounds=4", "data.weights=1,2", "{first}"),
}

IN_PLAIN = "groups across mini-batches"


def config_of(folder: Path, case: str):
    words = [word for word in write_all(folder, eos_token_ids=(1, 2, 3, 4)) if not word.startswith("ppo.")]
    words = [word for word in words if "reward" not in word and "critic" not in word]
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:7]), encoding="utf-8")
    sizes = ("rollout_batch=6", "samples_per_prompt=3", "mini_batch=9", "micro_batch=3", "iterations=3")
    own = f"reward_function={folder / 'reward.py'}:few", "grpo.drop_equal_groups=true"
    more = (
        word.replace("{first}", f"data.prompts={folder / 'few.jsonl'},{folder / 'prompts.jsonl'}")
        for word in CASES[case]
    )
    return presets.load("tiny", [*words, *sizes, *own, *more], algorithm="grpo")


class Twin:
    """Draws the batch of an iteration group by group, and a failed group again at once where its turn is."""

    def __init__(self, run: RunOf):
        self.run, self.config, self.used = run, run.config, 0

    def prompt(self, place: int) -> int:
        """Returns the prompt at a place of the order in which a run uses them."""
        if self.config.data.weights:
            return self.run.job.prompts.batch(place, 1)[0]
        epoch, place = divmod(place, len(self.run.job.prompts))
        return int(permutation(self.config.seed, epoch, len(self.run.job.prompts))[place])

    def draws(self, iteration: int, keys: list[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
        """Draws the responses of a group, by prompt and sample."""
        config, job, longest = self.config, self.run.job, self.config.generation.max_new_tokens
        (prompts, samples), model = zip(*keys, strict=True), job.models.engines["actor"].model
        bits = torch.from_numpy(random_bits(config.seed, 0, iteration, prompts, samples, longest))
        rows = torch.tensor([job.prompts.prompts[prompt] for prompt in prompts])
        with torch.no_grad():
            responses, *_ = generate_rows(model, rows, bits, **job.drawing, max_new_tokens=longest)
        drawn = [[token for token in response if token >= 0] for response in responses.tolist()]
        return dict(zip(keys, drawn, strict=True))

    def fails(self, responses: list[list[int]]) -> bool:
        texts = [self.run.job.tokenizer.decode(tokens).split() for tokens in responses]
        scores = [(len(words) > 4) + 0.5 * any("ba" in word for word in words) for words in texts]
        if self.config.options.overlong == "mask":
            scores = [score for score, one in zip(scores, responses, strict=True) if one[-1] in self.run.job.eos_ids]
        return len(set(scores)) < 2

    def batch(self, iteration: int) -> dict[tuple[int, int], list[int]]:
        config, size = self.config, self.config.samples_per_prompt
        num = config.rollout_batch
        order = epoch_order(config.seed, iteration, 0, num * size, config.mini_batch, group=size)
        slots = [row // size for row in order.flatten().tolist()][::size]  # groups as they train
        prompts = [self.prompt(self.used + slot) for slot in range(num)]
        self.used += num
        groups, todo = [{} for _ in range(num)], slots
        for number in range(config.options.rounds):
            if not todo:
                break
            if number:
                for slot in todo:
                    prompts[slot] = self.prompt(self.used)
                    self.used += 1
            seen: dict[int, count] = {}
            for slot in sorted(todo) if number == 0 else todo:
                counted = seen.setdefault(prompts[slot], count(number * SAMPLES_OF_ROUND))
                keys = [(prompts[slot], next(counted)) for _ in range(size)]
                groups[slot] = self.draws(iteration, keys)
            todo = [slot for slot in todo if self.fails([*groups[slot].values()])]
        self.num_failed = len(todo)
        return {key: tokens for group in groups for key, tokens in group.items()}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case == IN_PLAIN else pytest.mark.slow) for case in CASES],
)
def test_an_iteration_draws_what_the_twin_draws(case, tmp_path):
    run = RunOf(config_of(tmp_path, case))
    twin, again = Twin(run), []
    for number in range(2 if case == IN_PLAIN else 3):
        expected = twin.batch(number)
        metrics = run.iteration()
        assert run.responses[-1] == expected
        assert run.state.prompts_used == twin.used
        assert metrics["equal_groups"] == pytest.approx(twin.num_failed / run.config.rollout_batch)
        again.append(len(run.data.rounds.failed))
    assert max(again) > 1 and (case != "ten rounds" or min(again) < 9)  # some batches are full before the last round


def test_the_prompts_used_are_state(tmp_path):
    """A run that is restored after an iteration goes on where it was; an evaluation would change nothing of it."""
    config = config_of(tmp_path, "three rounds")
    run, again = RunOf(config), RunOf(config)
    run.iteration()
    state = json.loads(json.dumps(recorded.run_state(run.state)))
    assert state["prompts_used"] == run.state.prompts_used > config.rollout_batch
    weights = {name: weight.clone() for name, weight in run.weights("actor").items()}
    recorded.restore_state(again.job, 1, state)
    with torch.no_grad():
        for name, weight in again.job.models.engines["actor"].model.named_parameters():
            weight.copy_(weights[name])
    again.number = 1
    run.iteration(), again.iteration()
    assert again.responses[-1] == run.responses[-1] and again.state.prompts_used == run.state.prompts_used

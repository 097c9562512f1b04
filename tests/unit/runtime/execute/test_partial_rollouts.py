"""Responses that take several iterations, on one rank, against an obvious twin: what each iteration draws and trains,
with the logprobs of the weights that drew each token."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from rlhf_spmd.algorithms.controllers import next_kl_coef
from rlhf_spmd.algorithms.training_order import epoch_order
from rlhf_spmd.config import presets
from rlhf_spmd.kernels.philox import random_bits
from rlhf_spmd.runtime.data.prompt_order import permutation
from rlhf_spmd.runtime.execute.iteration import ALL
from rlhf_spmd.runtime.generation.rollout import generate_rows
from tests.folders import write_all
from tests.runs import RunOf

REWARD = """
def few(prompts, responses):
    return [float(len(response.split()) > 4) + 0.5 * float("ba" in response) for response in responses]
"""
CASES = {
    "groups": ("partial_steps=3", "samples_per_prompt=3", "generation.min_new_tokens=4", "rollout_batch=6"),
    "stop texts": ("partial_steps=4", "generation.stop=ba", "samples_per_prompt=2", "seed=3", "generation.top_k=15"),
}


def config_of(folder: Path, *words: str):
    models = [word for word in write_all(folder, eos_token_ids=(1, 2, 3, 4)) if not word.startswith("ppo.")]
    models = [word for word in models if "reward" not in word and "critic" not in word]
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    own = ["rollout_batch=9", "mini_batch=6", "micro_batch=3", "iterations=5", "optimizer.actor_lr=1e-3"]
    words = [*models, *own, f"reward_function={folder / 'reward.py'}:few", *words]
    return presets.load("tiny", words, algorithm="grpo")


def synchronous(config) -> RunOf:
    """Returns a run of one rank, which has no ranks to sample ahead, and so no gate that leaves out older tokens."""
    with patch("rlhf_spmd.plan.program.compile.validate"):
        return RunOf(replace(config, parity_tolerance=100.0))


class Row:
    """A response and the logprobs of its tokens by the weights that drew them."""

    def __init__(self, prompt: int, sample: int, began: int):
        self.prompt, self.sample, self.began = prompt, sample, began
        self.tokens, self.logprobs, self.is_over = [], [], False


class Twin:
    """Goes on with every group one row at a time, with its prompt and tokens as a longer prompt."""

    def __init__(self, run: RunOf):
        self.run, self.config, self.used = run, run.config, 0
        self.at: dict[int, list[Row]] = {}  # place of a group in the batch -> its rows

    def go_on(self, row: Row) -> None:
        config, job = self.config, self.run.job
        longest, num = config.generation.max_new_tokens, len(row.tokens)
        bits_1G = random_bits(config.seed, 0, row.began, [row.prompt], [row.sample], longest)[:, num:]
        prompt = torch.tensor([[*job.prompts.prompts[row.prompt], *row.tokens]])
        most = min(config.partial_steps, longest - num)
        options = {**job.drawing, "min_new_tokens": min(max(config.generation.min_new_tokens - num, 0), most)}
        model = job.models.engines["actor"].model
        with torch.no_grad():
            responses, logprobs, _ = generate_rows(
                model, prompt, torch.from_numpy(bits_1G[:, :most]), **options, max_new_tokens=most
            )
        new = [token for token in responses[0].tolist() if token >= 0]
        row.tokens += new
        row.logprobs += logprobs[0, : len(new)].tolist()
        text = job.tokenizer.decode(row.tokens)
        ended = row.tokens[-1] in job.eos_ids or any(stop in text for stop in config.generation.stop)
        row.is_over = ended or len(row.tokens) == longest

    def batch(self, iteration: int) -> list[Row]:
        """Returns the rows that train."""
        config, size, num = self.config, self.config.samples_per_prompt, self.config.rollout_batch
        order = epoch_order(config.seed, iteration, 0, num * size, config.mini_batch, group=size).flatten()
        slots = {place: int(row) // size for place, row in enumerate(order[::size])}
        for place in sorted(slots, key=slots.get):
            if place not in self.at:
                epoch, at = divmod(self.used, len(self.run.job.prompts))
                prompt = int(permutation(config.seed, epoch, len(self.run.job.prompts))[at])
                self.at[place] = [Row(prompt, sample, iteration) for sample in range(size)]
                self.used += 1
        for rows in self.at.values():
            for row in rows:
                if not row.is_over:
                    self.go_on(row)
        over = [place for place, rows in self.at.items() if all(row.is_over for row in rows)]
        return [row for place in over for row in self.at.pop(place)]


@pytest.mark.parametrize("case", CASES)
def test_an_iteration_trains_what_the_twin_trains(case, tmp_path):
    config = config_of(tmp_path, *CASES[case])
    run = synchronous(config)
    twin, lags, steps = Twin(run), [], config.partial_steps
    for number in range(4):
        expected = twin.batch(number)
        metrics = run.iteration()
        trained = {key: tokens for key, tokens in run.responses[-1].items() if tokens}
        assert trained == {(row.prompt, row.sample): row.tokens for row in expected}
        assert metrics["held_groups"] == pytest.approx(len(twin.at) / config.rollout_batch)
        assert run.state.prompts_used == twin.used
        columns = slice(0, config.mini_batch)
        logprobs_MCG = run.data.store.at("logprobs", (ALL, columns))
        found = {}
        for m, c in torch.nonzero(run.data.store.at("responses", (ALL, columns))[..., 0] >= 0).tolist():
            key = int(run.data.prompt_MC[m, c]), int(run.data.sample_MC[m, c])
            found[key] = logprobs_MCG[m, c, : len(trained[key])].tolist()
        assert found.keys() == trained.keys()
        for row in expected:
            assert found[row.prompt, row.sample] == pytest.approx(row.logprobs, abs=1e-5)
        ages = [number - row.began - t // steps for row in expected for t in range(len(row.tokens))]
        assert metrics.get("lag") == max(ages, default=None)
        assert metrics.get("lag_tokens") == (pytest.approx(sum(ages) / len(ages)) if ages else None)
        lags += ages
    assert max(lags) == -(-config.generation.max_new_tokens // steps) - 1


def test_without_rows_that_go_on_all_is_as_ever(tmp_path):
    """As many steps as a response may have tokens."""
    histories = []
    for words in ((), ("partial_steps=10",), ("partial_steps=64",)):
        run = synchronous(config_of(tmp_path, "iterations=2", "samples_per_prompt=2", *words))
        histories.append([{key: one for key, one in row.items() if "_s" not in key} for row in run.iterations()])
        histories[-1].append([weight.tolist() for weight in run.weights("actor").values()])
    assert histories[0] == histories[1] == histories[2]


def test_an_iteration_in_which_no_response_ends_keeps_the_state(tmp_path):
    """The adaptive controller has no KL divergence there, and counts the rows that have trained elsewhere."""
    words = ["partial_steps=5", "generation.min_new_tokens=6", "ppo.kl_controller=adaptive", "ppo.kl_horizon=50"]
    with patch("rlhf_spmd.plan.program.compile.validate"):
        run = RunOf(replace(presets.load("tiny", [*write_all(tmp_path), *words]), parity_tolerance=100.0))
    before = run.state.of_algorithm.kl_coef
    assert run.iteration()["held_groups"] == 1.0 and run.state.of_algorithm.kl_coef == before
    metrics = run.iteration()
    num = round((1 - metrics["held_groups"]) * 24)
    assert num and run.state.of_algorithm.kl_coef == next_kl_coef(before, metrics["kl"], num, horizon=50)

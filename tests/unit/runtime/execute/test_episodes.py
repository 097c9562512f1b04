"""Training on episodes of several turns in the real runtime, with a scripted environment: no number depends on when
answers come, and what training reads of a row is what the environment and the model made."""

import dataclasses
import json

import pytest
import torch

from rlhf_spmd.config.options import evaluated
from rlhf_spmd.plan.program.evaluation import evaluation_program
from rlhf_spmd.runtime.execute.iteration import ALL
from rlhf_spmd.runtime.generation.episodes import LAST
from rlhf_spmd.runtime.run.evaluation import Evaluation
from rlhf_spmd.runtime.run.prepare import prepare
from rlhf_spmd.runtime.run.rollouts import Rollouts
from tests.folders import write_all
from tests.runs import RunOf, compiled, load
from tests.unit.runtime.generation.test_episodes import Scripted

EVERY = ALL, slice(0, 3)  # columns
EVALUATED = ALL, slice(0, 11)
EOS_IDS = tuple(range(1, 8))
OPTIONS = [
    "environment=scripted:Tools",
    "episode.max_row_tokens=22",
    "generation.max_new_tokens=14",
    "data.max_prompt=8",
    "rollout_batch=3",
    "mini_batch=3",
    "iterations=2",
    "micro_batch=2",
]


def a_run(overrides, *, seed: int, latest: int, options: tuple = (), **how) -> RunOf:
    config = load([*overrides, *OPTIONS, *options])
    with pytest.MonkeyPatch.context() as patch:  # `attach` stands for the environment
        patch.setattr("rlhf_spmd.runtime.run.prepare.run_environments", lambda *_, **__: None)
        run = RunOf(config, **how)
    attach(run, seed, latest)
    return run


def attach(run: RunOf, seed: int, latest: int) -> None:
    """Gives a run its scripted environment, which answers by prompt and sample, whichever row of a rank that is."""

    def episodes(job, call, data, columns):
        prompts, samples = (x[:, columns].flatten().tolist() for x in (data.prompt_MC, data.sample_MC))
        names = [5 * p + s for p, s in zip(prompts, samples, strict=True)]
        made = OfPrompts(seed + data.number, latest, names)
        made.prompts = [[7, *job.prompts.prompts[p]][:8] for p in prompts]  # a token more than the data set has
        return made

    run.job.episodes = episodes


class OfPrompts(Scripted):
    """Answers that depend on the prompt and sample of a row, not on its number."""

    def __init__(self, seed: int, latest: int, names: list[int]):
        super().__init__(seed, latest)
        self.names = names
        self.prompts: list[list[int]] = []
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1

    def openings(self) -> list[list[int]]:
        return self.prompts

    def answer(self, row: int, turn: int, token_ids: list[int]):
        return dataclasses.replace(super().answer(self.names[row], turn, token_ids), row=row)

    def rewards(self, row: int, reason: str) -> list[float]:
        return [(self.names[row] % 7 - 3) / 3 + turn / 10 for turn in range(self.turns.get(row, 0))]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("folders"), eos_token_ids=EOS_IDS)


def test_weights_do_not_depend_on_when_answers_come(overrides):
    """Three rows, whose float32 products have other bits than those of more: the sampler's logprobs may differ in
    their last digits, tokens and weights may not."""
    runs = [a_run(overrides, seed=seed, latest=latest) for seed, latest in ((0, 0), (1, 5), (2, 10**6))]
    metrics = [run.iterations() for run in runs]
    assert runs[0].config.options.old_logprobs == "recompute"
    first, *others = runs
    for number, run in enumerate(others, start=1):
        assert run.responses == first.responses
        for model in ("actor", "critic"):
            for name, weight in first.weights(model).items():
                assert torch.equal(weight, run.weights(model)[name]), (model, name)
        for one, other in zip(metrics[0], metrics[number], strict=True):
            assert all(one[name] == other[name] for name in ("policy_loss", "kl", "turns", "reward"))
    assert max(one["turns"] for one in metrics[0]) > 1.2
    assert 0 < max(one["parity_max_abs"] for one in metrics[0]) < 1e-4


def test_episodes_of_each_call_are_closed_once(overrides):
    """Their journals are open files, of which a process has a limited number."""
    run = a_run(overrides, seed=0, latest=2)
    made, episodes = [], run.job.episodes
    run.job.episodes = lambda *call: made.append(episodes(*call)) or made[-1]
    run.iterations()
    assert [one.num_closed for one in made] == [1, 1]


def test_what_training_reads_of_episodes(overrides, tmp_path):
    """Actions are what was drawn, the score is the sum of the turns' rewards, and lengths count drawn tokens."""
    run = a_run(overrides, seed=3, latest=4, options=("rollout_batch=6", "rollouts.every=1"))
    metrics = run.iteration()
    store = run.data.store
    responses_MCG, actions_MCG = store.at("responses", EVERY), store.at("responses.actions", EVERY)
    assert ((actions_MCG > 0) <= (responses_MCG >= 0)).all() and (actions_MCG > 0).any(-1).all()
    assert ((actions_MCG == 0) & (responses_MCG >= 0)).any()  # observations
    assert metrics["response_length"] == pytest.approx(float((actions_MCG > 0).sum(-1).float().mean()))
    prompts_MCP, opened_MCP = store.at("prompts", EVERY), store.at("responses.prompts", EVERY)
    assert (opened_MCP[..., 0] == 7).all() and torch.equal(opened_MCP[..., 1:], prompts_MCP[..., :-1])
    assert all(call.prompts == "responses.prompts" for call in run.program.workload.workflow.placed_calls[1:])
    ended_MC = (actions_MCG == LAST).any(-1)
    assert metrics["ended_fraction"] == pytest.approx(float(ended_MC.float().mean()))
    reasons = {name: value for name, value in metrics.items() if name.startswith("end_")}
    assert sum(reasons.values()) == pytest.approx(1.0)
    assert reasons["end_tool_stopped"] + reasons["end_completed"] == pytest.approx(metrics["ended_fraction"])
    rewards_MCG, scores_MC = store.at("responses.rewards", EVERY), store.at("scores", EVERY)
    assert torch.equal(scores_MC, rewards_MCG.sum(-1)) and scores_MC.any()
    Rollouts(run.job, tmp_path).write(run.data)
    (path,) = tmp_path.rglob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    counted = [sum(row["end"] == name.removeprefix("end_") for row in rows) / len(rows) for name in reasons]
    assert counted == pytest.approx(list(reasons.values()))
    for row, actions_G, opened_P in zip(rows, actions_MCG.flatten(0, 1), opened_MCP.flatten(0, 1), strict=True):
        assert row["drawn"] == (actions_G > 0).int().tolist()[: len(row["response_tokens"])]
        assert row["prompt_tokens"] == [token for token in opened_P.tolist() if token >= 0]
    for key in ("advantages", "returns"):
        values_MCG = store.at(key, EVERY)
        assert not values_MCG[actions_MCG == 0].any() and values_MCG[actions_MCG > 0].any()


def test_evaluations_run_episodes(overrides, monkeypatch):
    """With a limit of drawn tokens of their own, by the same environment on prompts of their own."""
    config = load([*overrides, *OPTIONS, "eval.prompts=held_out", "eval.max_new_tokens=9"])
    program, prompts = compiled(config), load(overrides).data.prompts
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, prompts=prompts))
    options = {"num_prompts": 11, "samples_per_prompt": 1, "temperature": 0.0, "by_function": True}
    evaluation = evaluation_program(program, **options, max_response=evaluated(config).row_tokens)
    monkeypatch.setattr("rlhf_spmd.runtime.run.prepare.run_environments", lambda *_, **__: None)
    run = RunOf(config, program=program)
    run.job = prepare(config, program, run.world, evaluation)
    attach(run, 0, 3)
    run.job.evaluation.episodes = run.job.episodes
    metrics, data = Evaluation(run.job.evaluation).run(0)
    responses_CG, actions_CG = (data.store.at(key, EVALUATED)[0] for key in ("responses", "responses.actions"))
    assert responses_CG.shape == (11, 22) and 1 < (actions_CG > 0).sum(1).max() <= 9
    assert metrics["turns"] > 1 and "mean@1" in metrics


@pytest.mark.parametrize("more", [["generation.top_k=9", "generation.top_p=0.9"], ["generation.min_new_tokens=3"]])
def test_restricted_sampling_and_minimum_lengths(overrides, more):
    """Observations, which no sampling support holds and which may hold banned tokens, make no NaN of any gradient."""
    run = a_run(overrides, seed=0, latest=3, options=tuple(more))
    for metrics in run.iterations():
        assert metrics["parity_max_abs"] < 1e-4
    assert all(torch.isfinite(weight).all() for weight in run.weights("actor").values())

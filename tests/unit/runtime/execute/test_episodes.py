"""Training on episodes of several turns in the real runtime, with a scripted environment: no number depends on when
answers come, and what training reads of a row is what the environment and the model made."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from rlhf_spmd.config import presets
from rlhf_spmd.config.options import RolloutFiles, evaluated
from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.program.evaluation import evaluation_program
from rlhf_spmd.runtime.execute.iteration import ALL
from rlhf_spmd.runtime.generation.episodes import LAST
from rlhf_spmd.runtime.run.evaluation import Evaluation
from rlhf_spmd.runtime.run.prepare import _check_groups, prepare
from rlhf_spmd.runtime.run.rollouts import Rollouts
from tests.folders import write_all
from tests.runs import RunOf, compiled, load
from tests.unit.runtime.generation.test_episodes import Scripted

MIXTURE = {"model_type": "qwen3_moe", "qk_norm": True, "num_layers": 3, "num_dense_layers": 1, "norm_topk": True}
MIXTURE |= {"num_experts": 4, "experts_per_token": 2, "expert_size": 12}
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


def a_run(overrides, *, seed: int, latest: int, options: tuple = (), algorithm: str = "ppo", **how) -> RunOf:
    config = presets.load("tiny", [*overrides, *OPTIONS, *options], algorithm=algorithm)
    with pytest.MonkeyPatch.context() as patch:  # `attach` stands for the environment
        patch.setattr("rlhf_spmd.runtime.run.prepare.RunEnvironments", lambda *_, **__: None)
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

    run.use(dataclasses.replace(run.job, environments=SimpleNamespace(of_call=episodes, transcript=lambda *_: [])))


class OfPrompts(Scripted):
    """Answers that depend on the prompt and sample of a row, not on its number."""

    def __init__(self, seed: int, latest: int, names: list[int]):
        super().__init__(seed, latest)
        self.names = names
        self.prompts: list[list[int]] = []

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


def test_answers_have_routes_too(tmp_path):
    """Training takes the experts of answers, which the sampler read, as those of what it drew."""
    words = write_all(tmp_path, eos_token_ids=EOS_IDS, **MIXTURE)
    runs = [a_run(words, seed=seed, latest=latest) for seed, latest in ((0, 0), (1, 5))]
    for metrics in (one for run in runs for one in run.iterations()):
        assert metrics["turns"] > 1.2 and metrics["route_disagreement"] == 0 and metrics["parity_max_abs"] < 1e-4
    first, second = (run.data.store for run in runs)
    routes, actions = "responses.routes", first.at("responses.actions", EVERY)
    assert ((actions == 0) & (first.at("responses", EVERY) >= 0)).any()  # answers
    length_MC = sum((first.at(key, EVERY) >= 0).sum(-1) for key in ("responses.prompts", "responses"))
    assert ((first.at(routes, EVERY) > 0).any(-1).all(-1).sum(-1) == length_MC - 1).all()
    assert torch.equal(first.at(routes, EVERY), second.at(routes, EVERY))


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


def attach_breaking(run: RunOf, worth: float, *, breaks: bool = True) -> None:
    """Gives a run an environment in which all episodes of an iteration's first prompt have one score, and break."""

    class Breaking(OfPrompts):
        first = -1

        def is_dropped(self, row: int) -> bool:
            return breaks and self.names[row] // 5 == self.first

        def rewards(self, row: int, reason: str) -> list[float]:
            found = super().rewards(row, reason)
            return [worth, *([0.0] * (len(found) - 1))] if self.names[row] // 5 == self.first else found

    def episodes(job, call, data, columns):
        prompts, samples = (x[:, columns].flatten().tolist() for x in (data.prompt_MC, data.sample_MC))
        made = Breaking(data.number, 3, [5 * p + s for p, s in zip(prompts, samples, strict=True)])
        made.prompts, made.first = [job.prompts.prompts[p] for p in prompts], int(data.prompt_MC[0, 0])
        return made

    run.use(dataclasses.replace(run.job, environments=SimpleNamespace(of_call=episodes, transcript=lambda *_: [])))


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("ppo", ("ppo.whiten=batch", "ppo.normalize_scores=true", "parity_tolerance=0.1")),
        ("grpo", ("grpo.scale=batch", "samples_per_prompt=2", "mini_batch=6", "iterations=1")),
        ("grpo", ("grpo.scale=none", "grpo.turn_rewards=true", "samples_per_prompt=2", "mini_batch=2", "iterations=1")),
        ("rloo", ("rloo.kl_coef=0.1", "samples_per_prompt=2", "mini_batch=6", "iterations=1")),
        ("reinforce_plus_plus", ("reinforce_plus_plus.kl_coef=0.1", "iterations=1")),
    ],
)
def test_rows_that_are_dropped_count_nowhere(overrides, algorithm, options, tmp_path):
    """Whatever their scores would have been: in no weight and no metric, also where a step has no other rows."""
    ours = [one for one in overrides if not one.startswith("ppo.") and "critic" not in one]
    ours = overrides if algorithm == "ppo" else ours
    found = []
    for worth in (0.0, 1000.0):
        run = a_run(ours, seed=0, latest=3, options=options, algorithm=algorithm)
        attach_breaking(run, worth)
        found.append((run.iterations(), run))
    (metrics, run), (again, other) = found
    drop = ("generate_s", "iteration_s", "gen_tokens_per_s")
    assert [{k: v for k, v in one.items() if k not in drop} for one in metrics] == [
        {k: v for k, v in one.items() if k not in drop} for one in again
    ]
    for name, weight in run.weights("actor").items():
        assert torch.equal(weight, other.weights("actor")[name]), name
    every = ALL, slice(0, run.config.mini_batch)
    scores_MC, actions_MCG = (run.data.store.at(key, every) for key in ("scores", "responses.actions"))
    kept_MC = (actions_MCG > 0).any(-1)
    assert not scores_MC[~kept_MC].any() and (~kept_MC).any()
    score = next(metrics[-1][name] for name in ("score", "reward") if name in metrics[-1])
    assert score == pytest.approx(float(scores_MC[kept_MC].mean()), abs=1e-6) or algorithm == "ppo"
    assert metrics[-1]["response_length"] == pytest.approx(float((actions_MCG > 0).sum() / kept_MC.sum()))
    run.use(dataclasses.replace(run.job, config=dataclasses.replace(run.config, rollouts=RolloutFiles(every=1))))
    Rollouts(run.job, tmp_path).write(run.data)
    (path,) = tmp_path.rglob("*.jsonl")
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    for name in ("scores", "advantages") if algorithm == "grpo" else ("scores",):
        missing = [one[name] is None for one in samples]
        assert missing == [not any(one["drawn"]) for one in samples] == (~kept_MC).flatten().tolist()


def test_a_group_that_is_dropped_is_like_one_that_is_left_out(overrides):
    """As one with equal rewards under drop_equal_groups is, which the page itself leaves out."""
    ours = [one for one in overrides if not one.startswith("ppo.") and "critic" not in one]
    options = ("samples_per_prompt=2", "mini_batch=6", "grpo.drop_equal_groups=true", "micro_batch=6", "iterations=1")
    weights = []
    for breaks in (True, False):
        run = a_run(ours, seed=0, latest=3, options=options, algorithm="grpo")
        attach_breaking(run, 0.5, breaks=breaks)
        (metrics,) = run.iterations()
        assert metrics["used"] == pytest.approx(1.0 if breaks else 2 / 3)
        weights.append(run.weights("actor"))
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_an_iteration_of_which_all_is_dropped(overrides, tmp_path, monkeypatch):
    """It is written like others."""
    run = a_run(overrides, seed=0, latest=3, options=("rollouts.every=1",))
    monkeypatch.setattr(OfPrompts, "is_dropped", lambda *_: True)
    run.iteration()
    Rollouts(run.job, tmp_path).write(run.data)
    (path,) = tmp_path.rglob("*.jsonl")
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(samples) == 3 and all(one["end"] and not any(one["drawn"]) for one in samples)


def test_groups_that_no_rank_has_as_a_whole_cannot_be_dropped(overrides):
    ours = [one for one in overrides if not one.startswith("ppo.") and "critic" not in one]
    options = [*OPTIONS, "samples_per_prompt=4", "mini_batch=12", "episode.on_failure=drop_group"]
    config = presets.load("tiny", [*ours, *options], algorithm="grpo")
    _check_groups(compiled(config, 3), drops=True)
    with pytest.raises(UserError, match="spreads mini_batch=12 rows over 2 ranks .* mini_batch as a multiple of 8"):
        _check_groups(compiled(config, 2), drops=True)


def test_evaluations_run_episodes(overrides, monkeypatch):
    """With a limit of drawn tokens of their own, by the same environment on prompts of their own."""
    config = load([*overrides, *OPTIONS, "eval.prompts=held_out", "eval.max_new_tokens=9"])
    program, prompts = compiled(config), load(overrides).data.prompts
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, prompts=prompts))
    options = {"num_prompts": 11, "samples_per_prompt": 1, "temperature": 0.0, "by_function": True}
    evaluation = evaluation_program(program, **options, max_response=evaluated(config).row_tokens)
    monkeypatch.setattr("rlhf_spmd.runtime.run.prepare.RunEnvironments", lambda *_, **__: None)
    run = RunOf(config, program=program)
    run.job = prepare(config, program, run.world, evaluation).evaluation
    attach(run, 0, 3)
    metrics, data = Evaluation(run.job).run(0)
    responses_CG, actions_CG = (data.store.at(key, EVALUATED)[0] for key in ("responses", "responses.actions"))
    assert responses_CG.shape == (11, 22) and 1 < (actions_CG > 0).sum(1).max() <= 9
    assert metrics["turns"] > 1 and "mean@1" in metrics
    scores_C = data.store.at("scores", EVALUATED)[0]
    attach_breaking(run, 9.0)
    again, data = Evaluation(run.job).run(0)  # without the first prompt, whose score is not a 0
    again_C = data.store.at("scores", EVALUATED)[0]
    assert metrics["mean@1"] == pytest.approx(float(scores_C.mean()))
    assert again_C[0] == 0 and again["mean@1"] == pytest.approx(float(again_C[1:].mean()))
    monkeypatch.setattr(OfPrompts, "is_dropped", lambda *_: True)
    attach(run, 0, 3)
    with pytest.raises(UserError, match="no prompt all of whose episodes count: repair the environment"):
        Evaluation(run.job).run(0)


@pytest.mark.parametrize("more", [["generation.top_k=9", "generation.top_p=0.9"], ["generation.min_new_tokens=3"]])
def test_restricted_sampling_and_minimum_lengths(overrides, more):
    """Observations, which no sampling support holds and which may hold banned tokens, make no NaN of any gradient."""
    run = a_run(overrides, seed=0, latest=3, options=tuple(more))
    for metrics in run.iterations():
        assert metrics["parity_max_abs"] < 1e-4
    assert all(torch.isfinite(weight).all() for weight in run.weights("actor").values())

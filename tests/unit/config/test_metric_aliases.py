"""Names of metrics in other programs: the table names metrics that exist, and only under options that make them the
same quantity."""

import pytest

from rlhf_spmd.config import options as configs
from rlhf_spmd.config import presets
from rlhf_spmd.config.metric_aliases import FUNCTION, TABLE, aliases_of
from rlhf_spmd.pages.algorithm import algorithm_names, load_algorithm
from rlhf_spmd.runtime.run.metrics import metrics_of


def known(algorithm: str, *words: str) -> set[str]:
    config = presets.load("tiny", words, algorithm=algorithm)
    workflow = config.algorithm.workflow(config.options)
    return set(metrics_of(config.algorithm, workflow, configs.function_labels(config)))


def named(system: str, algorithm: str, *words: str) -> dict[str, tuple[str, ...]]:
    config = presets.load("tiny", words, algorithm=algorithm)
    found = aliases_of(system, config.algorithm.name, config.options, configs.function_names(config))
    assert len({alias.name for alias in found}) == len(found)  # one meaning for each name
    return {alias.name: alias.ours for alias in found}


def having(algorithm: str, word: str) -> list[str]:
    """Returns an option of an algorithm, if it has that option."""
    return [f"{algorithm}.{word}"] if hasattr(load_algorithm(algorithm).options(), word.partition("=")[0]) else []


@pytest.mark.parametrize("system", TABLE)
def test_every_row_names_metrics_and_options_that_exist(system):
    for alias in TABLE[system]:
        algorithms = alias.get("algorithms") or algorithm_names()
        assert set(algorithms) <= set(algorithm_names())
        with_kl = {name: having(name, "kl_coef=0.1") for name in algorithms}
        every = {name: known(name, *with_kl[name], "reward_function=m:f,m:g") for name in algorithms}
        ours = [one.replace(FUNCTION, "f") for one in alias["ours"]]
        assert any(set(ours) <= metrics for metrics in every.values()), alias
        for name in algorithms:
            assert all(
                hasattr(presets.load("tiny", algorithm=name).options, option) for option in alias.get("when", {})
            ), alias


def test_what_is_another_quantity_under_some_options_has_no_alias():
    assert "actor/pg_loss" in named("verl", "grpo") and "actor/pg_loss" not in named("verl", "grpo", "grpo.kl_coef=0.1")
    assert "actor/pg_loss" in named("verl", "ppo", "ppo.entropy_coef=0.1")  # its metric is the policy's loss alone
    assert named("trl", "grpo")["train/kl"] == ("kl_loss",) and named("trl", "rloo")["train/kl"] == ("kl_per_token",)
    assert "train/kl" not in named("trl", "grpo", "grpo.kl_estimator=k1")
    assert "train/clip_ratio/low_mean" not in named("trl", "grpo", "grpo.ratio_level=sequence")
    assert "train/reward" not in named("trl", "ppo") and named("none", "grpo") == {}

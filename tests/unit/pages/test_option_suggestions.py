"""A wrong name of an option is answered with its neighbours, one of another system with ours."""

import pytest

from rlhf_spmd.__main__ import main
from rlhf_spmd.config import presets
from rlhf_spmd.pages.algorithm import algorithm_names
from rlhf_spmd.pages.option_tree import keys_of
from rlhf_spmd.pages.other_names import names
from rlhf_spmd.pages.strategy import load_strategy


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("learning_rate=1e-5", "did you mean 'optimizer.actor_lr' or 'optimizer.critic_lr'?"),
        ("model=folder", "did you mean '--model'?"),
        ("kl_coef=0.1", "did you mean 'ppo.kl_coef'?"),
        ("actor_rollout_ref.rollout.n=8", "did you mean 'samples_per_prompt'?"),
        ("algorithm.adv_estimator=grpo", "did you mean '--algorithm'?"),
        ("ppo.klcoef=0.1", "did you mean 'ppo.kl_coef'?"),
        ("ppo_max_token_len_per_gpu=4096", "did you mean 'strategy.tokens'?"),
        ("peft_config.task_type=CAUSAL_LM", "(of adapters, this program has rank, alpha"),
        ("--ranks=2", "did you mean '--layout'?"),
        ("vllm_num_engines=4", "(one generation engine runs in the same processes)"),
        ("temprature=0.7", "did you mean 'generation.temperature'?"),
        ("--device=cpu", "did you mean device=VALUE, without dashes?"),
        ("--learning-rate", "did you mean 'optimizer.actor_lr' or 'optimizer.critic_lr'?"),
    ],
)
def test_a_wrong_name_has_its_true_neighbours(word, hint, capsys):
    assert main(["check", "flattening", word]) == 2
    assert hint in capsys.readouterr().err


def test_names_of_other_systems_stand_for_options_that_there_are():
    ours = {key for name in algorithm_names() for key in keys_of(presets.load("tiny", algorithm=name))}
    ours |= {"--model", "--algorithm", "--name", "--runs", "--layout"}
    ours |= {f"strategy.{key}" for key in load_strategy("separation").parameters}
    ours |= {f"*.{key.rpartition('.')[2]}" for key in ours}
    assert {one for name in names() for one in name.ours} <= ours

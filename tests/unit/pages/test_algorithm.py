"""Pages of algorithms: those that come with the package, and those that a user writes, with all that can be wrong."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from rlhf_spmd.algorithms import page, surrogates
from rlhf_spmd.config import options as configs
from rlhf_spmd.config import presets
from rlhf_spmd.config.options import make_workload
from rlhf_spmd.errors import UserError
from rlhf_spmd.pages.algorithm import algorithm_names, check_functions, load_algorithm
from rlhf_spmd.pages.functions import bound
from rlhf_spmd.runtime.checkpoint.resume import config_of as resumed_config
from tests.pages import checked, write_page


def refused(path: Path | str, **options) -> str:
    with pytest.raises(UserError) as error:
        checked(path, **options)
    return str(error.value)


# ---- the pages of the package ---------------------------------------------------------------------------------------


def variants(options: type[page.Options]) -> list[dict]:
    """Returns every value of options that have a choice, one changed at a time; of other options one that is not the
    default, and a few of both together."""
    choices = {}
    hints = get_type_hints(options)
    for part in dataclasses.fields(options):
        hint = hints[part.name]
        if get_origin(hint) is Literal:
            choices[part.name] = list(get_args(hint))
        elif hint is bool:
            choices[part.name] = [False, True]
        elif part.default is None or part.default == 0:
            choices[part.name] = [part.default, 0.5]
    single = [{name: value} for name, values in choices.items() for value in values]
    pairs = [one | other for one, other in itertools.combinations(single, 2) if not one.keys() & other.keys()]
    return [{}, *single, *pairs]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", algorithm_names())
def test_every_page_gives_its_functions_what_they_ask_for(name, replay):
    """The page compared with the signatures, under all options that may change its workflow."""
    algorithm = load_algorithm(name)
    found = variants(algorithm.options)
    assert len(found) > 1
    for changes in found:
        options = algorithm.options(**changes)
        episodes = changes.get("turn_rewards", False)  # which only an environment gives
        check_functions(algorithm, algorithm.workflow(options, replay=replay, episodes=episodes), options)
    assert algorithm.name == name and algorithm.title and not algorithm.from_file
    assert algorithm.trained_roles and algorithm.source == Path(algorithm.module.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", algorithm_names())
def test_a_page_survives_its_options_and_its_state(name):
    algorithm = load_algorithm(name)
    config = configs.Config(preset="none", algorithm=algorithm)
    assert resumed_config(json.loads(json.dumps(configs.resolved(config))), "x.json") == config
    state = algorithm.initial_state(config.options)
    if algorithm.has_state:
        assert algorithm.read_state(json.loads(json.dumps(dataclasses.asdict(state)))) == state
    else:
        assert state is None and algorithm.read_state({}) is None


# ---- what functions get ---------------------------------------------------------------------------------------------


def test_arguments_are_bound_by_name():
    def function(scores_B, mask, *, scale, eps=1e-8):
        """Returns a function of four things."""

    assert bound(function, {"scores": 1, "mask": 2, "scale": 3, "other": 4}) == {"scores_B": 1, "mask": 2, "scale": 3}
    with pytest.raises(
        UserError, match=r"function\(\): no value for parameter 'scale' \(available: mask, scores\); pass scale="
    ):
        bound(function, {"scores": 1, "mask": 2})


# ---- a page of a user -----------------------------------------------------------------------------------------------


OWN_LOSS = '''
def policy_loss(logprobs_BG, advantages_BG, mask_BG):
    """Called like that of PPO, which has its advantages whitened before."""
    return -(logprobs_BG * advantages_BG)[mask_BG].sum(), {}
'''


def test_a_function_called_like_one_of_the_package_has_only_its_own_companions(tmp_path):
    changes = ('"surrogate", prompts, responses, weights=', '"policy_loss", prompts, responses, advantages=')
    path = write_page(tmp_path, changes, ('TITLE = "REINFORCE"\n', 'TITLE = "REINFORCE"\n' + OWN_LOSS))
    algorithm = checked(path)
    assert algorithm.function("policy_loss").function is not surrogates.policy_loss
    assert algorithm.function("policy_loss").sums is None is algorithm.function("policy_loss").prepare
    theirs = load_algorithm("ppo")
    assert theirs.function("policy_loss").prepare is surrogates.policy_loss_prepare
    importing = (
        'TITLE = "REINFORCE"\n',
        'TITLE = "REINFORCE"\nfrom rlhf_spmd.algorithms.surrogates import policy_loss\n',
    )
    again = load_algorithm(str(write_page(tmp_path, importing)))
    assert again.function("policy_loss").sums is surrogates.policy_loss_sums


# ---- on the command line --------------------------------------------------------------------------------------------


def test_options_of_a_page_are_typed(tmp_path):
    path = str(write_page(tmp_path))
    config = presets.load("tiny", ["mine.scale=0.25", "mine.sign=down", "mine.epochs=3"], algorithm=path)
    assert dataclasses.asdict(config.options) == {"epochs": 3, "scale": 0.25, "sign": "down"}
    assert config.optimizer.lr == {"policy": 3e-4} and list(config.models) == ["policy", "judge"]
    assert presets.load("tiny", ["optimizer.policy_lr=0.5"], algorithm=path).optimizer.lr == {"policy": 0.5}
    for override, words in (
        ("mine.scale=much", ["mine.scale=much", "valid number"]),
        ("mine.sign=left", ["mine.sign=left", "'up' or 'down'"]),
        ("mine.epochs=0", ["mine.epochs=0", "greater than 0"]),
        ("mine.scal=1", ["'mine.scal'", "did you mean 'mine.scale'"]),
        ("mine=3", ["'mine' is a group of options", "mine.scale"]),
        ("ppo.kl_coef=1", ["unknown option 'ppo.kl_coef'"]),
        ("optimizer.critic_lr=1", ["unknown option 'optimizer.critic_lr'", "optimizer.policy_lr"]),
        ("models.actor=x", ["unknown option 'models.actor'", "models.policy"]),
        ("beta=1", ["unknown option 'beta'"]),
        ("algorithm=ppo", ["--algorithm ppo"]),
    ):
        with pytest.raises(UserError) as error:
            presets.load("tiny", [override], algorithm=path)
        assert all(word in str(error.value) for word in words), str(error.value)
        assert override.startswith("ppo.") or "ppo." not in str(error.value), "options of another algorithm are no help"


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_the_options_of_every_variant_make_a_workflow(name):
    for one in load_algorithm(name).module.VARIANTS:
        words = [f"{name}.{word.replace('TOKENS', '2')}" for word in one.words.split()]
        sizes = ["rollout_batch=16", "mini_batch=32"] if name == "grpo" else []
        config = presets.load("tiny", [*words, *sizes], algorithm=name)
        wants = name == "dpo" and one.name not in ("SimPO", "ORPO") or getattr(config.options, "kl_coef", 0) > 0
        assert ("reference" in make_workload(config).workflow.models) == wants, one.name


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("grpo", ["kl_in=reward"], "set kl_coef"),
        ("grpo", ["gate_temperatures=1,2"], "belongs to surrogate=sapo"),
        ("grpo", ["surrogate=gmpo", "ratio_level=sequence"], "no use for ratio_level"),
        ("grpo", ["surrogate=sapo", "dual_clip=3"], "dual_clip belongs to surrogate=clip"),
        ("dpo", ["loss=orpo"], "set nll_coef=1"),
        ("dpo", ["loss=robust"], "needs label_smoothing"),
        ("dpo", ["loss=hinge", "label_smoothing=0.1"], "sigmoid or robust"),
        ("dpo", ["target_margin=1"], "belongs to loss=simpo"),
    ],
)
def test_options_that_contradict_each_other_are_refused(name, words, text):
    with pytest.raises(UserError, match=text):
        presets.load("tiny", [f"{name}.{word}" for word in words], algorithm=name)

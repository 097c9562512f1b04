"""What can be wrong with a user's page of an algorithm: one message that names the mend, before the first iteration."""

import pytest

from tests.pages import checked, write_page
from tests.unit.pages.test_algorithm import refused

LOSS = "def surrogate(logprobs_BG, weights_BG, mask_BG):\n"
TRAIN = '    policy.train("surrogate", prompts, responses, weights=weights)\n'
STATEFUL = """

@dataclass(frozen=True)
class State:
    seen: object = 0


def initial_state(options):
    return State()


def read_state(values):
    return State(values["seen"])


def after_iteration(state, options, means, weights, num_sequences):
    return State(state.seen + num_sequences)
"""


def stateful(*change: str) -> tuple[str, str]:
    """Returns a page with a state, in which a piece of text is replaced."""
    assert not change or change[0] in STATEFUL
    return LOSS, STATEFUL.replace(*change) + "\n\n" + LOSS if change else STATEFUL + "\n\n" + LOSS


WRONG = {
    "a function lacks an argument": (
        (LOSS, "def surrogate(logprobs_BG, mask_BG, weights_BG=None, *, rate):\n"),
        ["surrogate(): no value for parameter 'rate'", "pass rate=", "Options"],
    ),
    "a function whose parameters cannot be read": (
        (LOSS, "surrogate = max\n\n\ndef other(logprobs_BG, weights_BG, mask_BG):\n"),
        ["bound by name, and no signature found for builtin", "max", "write a function around it"],
    ),
    "current weights of a model that does not train": (
        ('judge.infer("scores", prompts, responses', 'judge.infer("scores", prompts, responses, current=True'),
        ["judge.infer('scores', current=True): judge does not train; drop current"],
    ),
    "a role that is no name": (
        ('"judge": Role', '"../judge": Role'),
        ["ROLES.../judge", "String should match pattern"],
    ),
    "a negative learning rate": (("lr=1e-3", "lr=-1.0"), ["the role policy has lr=-1.0", "positive number"]),
    "a metric that is none": (
        ('"surrogate": page.Metric("policy", "loss", "{:+8.4f}")', '"surrogate": "loss"'),
        ["METRICS.surrogate: ", "an instance of Metric", "it is 'loss'"],
    ),
    "a part of a state": (
        stateful("def read_state(", "def read_states("),
        ["it has some of State, initial_state, read_state, after_iteration and not all of them"],
    ),
    "two responses for one reward": (
        ('judge.infer("scores", prompts, responses', 'judge.infer("scores", prompts, responses, responses'),
        ["judge.infer('scores') reads prompts and one key of responses"],
    ),
    "a negative temperature": (
        ("policy.generate(prompts", "policy.generate(prompts, temperature=-1.0"),
        ["policy.generate(temperature=-1.0): give a number of at least 0, or None"],
    ),
    "a stop without a limit": (
        ("weights=weights)", "weights=weights, stop='loss')"),
        ["policy.train(stop='loss'): give the name of a logged sum and a limit, or None"],
    ),
    "a module without functions": (
        ('compute("token_weights"', 'compute("nosuch.token_weights"'),
        ["nosuch.token_weights: functions are in advantages, group_advantages, surrogates"],
    ),
    "a result that nothing reads": (
        (
            "    policy.train(",
            '    compute("token_weights", responses=responses, scores=scores, makes={"x": "token"})\n    policy.train(',
        ),
        ["nothing reads the results of token_weights_token_weights", "drop the call"],
    ),
    "no such function": (
        ("def surrogate(", "def surrogates("),
        ["no function surrogate is in the algorithm file or in advantages, group_advantages, surrogates"],
    ),
    "sums without the functions of it": (
        ('makes={"weights": "token"})', 'makes={"weights": "token"}, sums=True)'),
        ["token_weights has sums=True, but its file has no function token_weights_sums", "add it"],
    ),
    "a key twice": (
        ('makes={"weights": "token"}', 'makes={"scores": "token"}'),
        ["makes scores twice", "another name (output=)"],
    ),
    "nothing trains": ((TRAIN, ""), ["the workflow trains no model"]),
    "a number where data belong": (
        ("weights=weights)", "weights=0.5)"),
        ["surrogate(weights=0.5)", "numbers are options of the algorithm"],
    ),
    "a function in the place of a shared one": (
        (TRAIN, TRAIN.replace("surrogate", "surrogates.policy_loss") + "\n\ndef policy_loss():\n    pass\n"),
        ["names surrogates.policy_loss, so the policy_loss of this file would not be called", "rename the function"],
    ),
    "data by the name of an output": (
        (TRAIN, TRAIN.replace("weights=", "logprobs=logprobs, weights=")),
        ["surrogate(logprobs=...): a parameter logprobs gets what", "another name"],
    ),
    "an error in the workflow": (
        (TRAIN, TRAIN + "    1 / 0\n"),
        ["workflow() raised ZeroDivisionError: division by zero"],
    ),
    "a state that JSON cannot hold": (
        stateful("object = 0", "object = b'0'"),
        ["the state cannot be kept in a checkpoint, as JSON", "TypeError"],
    ),
    "a state that is read otherwise": (
        stateful('values["seen"]', '[values["seen"]]'),
        ["read_state() makes another State of its values"],
    ),
    "too few parameters after an iteration": (
        stateful("means, weights, num_sequences", "num_sequences"),
        ["take state, options, means, weights, num_sequences by these names", "'means'"],
    ),
    "other parameters of the workflow": (
        ("def workflow(options, model, compute, prompts)", "def workflow(options, roles, compute, prompts)"),
        ["workflow() is called with options, model, compute, prompts by their names", "'roles'"],
    ),
    "a form that writes no number": (
        ('"return", "{:+8.4f}", headline', '"return", "{:+8.4q}", headline'),
        ["each form of METRICS writes a number", "'q'"],
    ),
    "no options": (("class Options(page.Options)", "class Choices(page.Options)"), ["Options: Field required"]),
    "an option without a default": (
        (
            "slots=True)\nclass Options(page.Options):\n",
            "kw_only=True)\nclass Options(page.Options):\n    rate: float\n",
        ),
        ["each option needs a default", "'rate'"],
    ),
    "a start that is no role": (
        ('Role("scalar", judge=True)', 'Role("scalar", judge=True, starts_from=("critic",))'),
        ["the role judge has lr=None and starts from critic: give", "roles of this file"],
    ),
    "an import of nothing": (
        ("from typing import Literal\n", "from typing import Literal\nimport nothing_of_that_name\n"),
        ["cannot be imported: ModuleNotFoundError", "nothing_of_that_name"],
    ),
    "an exit": (('TITLE = "REINFORCE"\n', "raise SystemExit(3)\n"), ["cannot be imported: SystemExit: 3"]),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_page_is_one_error_that_names_the_mend(change, words, tmp_path):
    text = refused(write_page(tmp_path, change))
    assert text.startswith(("algorithm mine", f"algorithm {tmp_path}", f"algorithm file {tmp_path}")), text
    assert all(word in text for word in words), text
    assert text.count("algorithm mine: ") <= 1, text


def test_the_order_of_parameters_means_nothing(tmp_path):
    """A page whose change of the state has weights before means got each in the place of the other."""
    change = stateful("state, options, means, weights, num_sequences", "num_sequences, *, weights, means, state, **_")
    change = change[0], change[1].replace("state.seen + num_sequences", "means")
    order = ("workflow(options, model, compute, prompts)", "workflow(prompts, compute, model, options)")
    algorithm = checked(write_page(tmp_path, change, order))
    assert algorithm.after_iteration(None, None, {"kl": 1.0}, {"kl": 2.0}, 3).seen == {"kl": 1.0}

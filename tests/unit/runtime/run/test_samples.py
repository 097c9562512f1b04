"""The samples of a run: what is shown of a prompt."""

from types import SimpleNamespace

import pytest

from rlhf_spmd.config.options import DataOptions
from rlhf_spmd.runtime.run.samples import asked
from tests.unit.runtime.data.test_row_tokens import load

QUESTION = "What is\n2 + 3 \u00f6?"
BEFORE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ([{"role": "system", "content": "You are terse."}, *BEFORE, {"role": "user", "content": QUESTION}], QUESTION),
        ([*BEFORE, {"role": "user", "content": [{"type": "text", "text": QUESTION}]}], QUESTION),
        ([{"from": "human", "value": QUESTION}], QUESTION),
        (QUESTION, QUESTION),
    ],
)
def test_the_last_words_of_the_user_are_shown(prompt, shown, tmp_path):
    prompts = load(tmp_path, [{"prompt": prompt}])
    config = SimpleNamespace(data=DataOptions(), algorithm=SimpleNamespace(prompts="prompt"))
    assert asked(SimpleNamespace(prompts=prompts, config=config), 0) == shown

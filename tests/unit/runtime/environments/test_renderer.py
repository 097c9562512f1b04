"""What a turn calls depends on whether the chat template has begun it inside a thought."""

import pytest

from rlhf_spmd.model.hf import ChatTemplate, load_tokenizer
from rlhf_spmd.model.texts.tool_calls import Call
from rlhf_spmd.runtime.environments.adapters import load_environments
from rlhf_spmd.runtime.environments.renderer import renderer_of, transcript
from tests.templates import ENDS, HERE, STARTED, write_bytes_tokenizer
from tests.unit.runtime.environments.test_episodes import FILES

OPENS = "{{- '<|im_start|>assistant\\n' }}"  # how the template begins the model's turn
THINKS, FIRST_THINKS = (
    OPENS + f"{{% if {condition} %}}{{{{ '<think>\\n' }}}}{{% endif %}}"
    for condition in ("true", "messages[-1].role == 'user'")
)


@pytest.mark.parametrize(("opens", "thinks"), [(OPENS, "00"), (THINKS, "11"), (FIRST_THINKS, "10")])
def test_a_thought_that_the_template_opened_calls_nothing(opens, thinks, tmp_path):
    """As in the templates of DeepSeek-R1, some of which open none behind the answer of a tool."""
    template = (HERE / "chatml.jinja").read_text(encoding="utf-8")
    assert template.count(OPENS) == 1
    (tmp_path / "t.jinja").write_text(template.replace(OPENS, opens), encoding="utf-8")
    folder = write_bytes_tokenizer(tmp_path / "tokenizer")
    tokenizer, render = load_tokenizer(folder), ChatTemplate(folder, str(tmp_path / "t.jinja"), started=STARTED).render
    stop = tokenizer.vocabulary()[ENDS["chatml"]]
    environment = load_environments(f"{FILES}/functions.py:TOOLS", ["prompt"])[""]
    renderer = renderer_of(environment, tokenizer, render, [stop], template="t")
    call = renderer.joins.call_text([Call("add", {"a": 1, "b": 2}).message]).rpartition("assistant\n")[2]

    def num_calls(text: str, *, is_first: bool) -> int:
        return len(renderer.parse([*tokenizer.encode(text, special=False), stop], is_first=is_first)[1])

    for is_first, has_thought in zip((True, False), thinks, strict=True):
        assert num_calls(call, is_first=is_first) == (has_thought == "0")
        assert num_calls(f"hm\n</think>\n{call}", is_first=is_first) == 1
    said = [*tokenizer.encode(f"{call} no", special=False), stop]
    (turn,) = transcript(renderer, said, [True] * len(said))
    assert bool(turn["calls"]) == (thinks[0] == "0") and turn["model"].endswith("no")

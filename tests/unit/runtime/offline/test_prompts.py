"""The prompts of offline generation: their own sampling, their templates and their room."""

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.hf import ChatTemplate
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.offline import options
from rlhf_spmd.runtime.offline.options import load_options
from rlhf_spmd.runtime.offline.prompts import read_offline_prompts, sampling_of
from tests.folders import write_tokenizer
from tests.unit.runtime.offline.test_generate_file import config, prompts_of


def test_a_chat_template_gets_what_options_and_rows_say(tokenizer, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "ba"}], "tools": [{}]}\n'
        '{"messages": [{"role": "user", "content": "ba"}], "chat_template_kwargs": {"x": "bo"}}\n{"prompt": "bi"}\n',
        encoding="utf-8",
    )
    (tmp_path / "t.jinja").write_text("{{ x }} {% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    write_tokenizer(tmp_path)

    def read(kwargs: str) -> list[str]:
        words = ["generation.max_new_tokens=8", f"data.chat_template_kwargs={kwargs}"]
        template = ChatTemplate(tmp_path, str(tmp_path / "t.jinja"), started="2026-02-03T00:00:00")
        given = load_options(words), None, template
        return [one.text for one in read_offline_prompts(tmp_path / "p.jsonl", tokenizer, config(), *given)]

    assert read('{"x": "be"}') == ["be ba", "bo ba", "bi"]
    assert capsys.readouterr().err.split("\n")[:-1] == [
        f"rlhf_spmd: note: {tmp_path / 'p.jsonl'}: 1 of text, which no chat template renders, so that "
        "nothing reads chat_template_kwargs",
        f"rlhf_spmd: note: {tmp_path / 'p.jsonl'}: the chat template does not read 'tools'",
    ]
    with pytest.raises(
        UserError, match=r"data.chat_template_kwargs has 'y', which the chat template .* \(it reads x\)"
    ):
        read('{"y": "be"}')
    with pytest.raises(UserError, match="data.chat_template_kwargs has 'tools', which every chat template is given by"):
        options.check_options(load_options(['data.chat_template_kwargs={"tools": []}']))
    for wrong in ("1", "[1]", '{"x": False}', "x=1"):
        with pytest.raises(UserError, match=r"it should be a valid dictionary"):
            load_options([f"data.chat_template_kwargs={wrong}"])
    assert load_options(["data.chat_template_kwargs=none"]).data.chat_template_kwargs == {}


def test_a_prompts_own_sampling(tmp_path, tokenizer):
    own = {"max_new_tokens": 3, "min_new_tokens": 1, "temperature": 0, "top_k": 4, "top_p": 0.5, "min_p": 0.1}
    lines = [{"prompt": "ba"}, {"prompt": "be", "id": 7} | own | {"stop": [" bi,"]}, {"prompt": "bi", "top_k": None}]
    first, second, third = prompts_of(tmp_path, lines, tokenizer, "generation.temperature=0.5")
    assert first.sampling == third.sampling == Sampling(8, temperature=0.5)
    assert second.sampling == Sampling(3, 1, 0.0, 4, 0.5, 0.1, (" bi,",))
    assert sampling_of(options.OfflineGeneration(), {"stop": "a,b"}).stop == ("a,b",)


@pytest.mark.parametrize(
    ("action", "told"), [("drop", "1 too long and dropped"), ("truncate", "1 cut at data.max_prompt")]
)
def test_prompts_that_are_cut_or_dropped_are_told(action, told, tmp_path, tokenizer, capsys):
    lines = [{"prompt": "ba"}, {"prompt": "be bi bo"}]
    words = ["data.max_prompt=2", f"data.long_prompts={action}"]
    assert len(prompts_of(tmp_path, lines, tokenizer, *words)) == (1 if action == "drop" else 2)
    assert capsys.readouterr().err.rstrip().endswith(f"jsonl: {told}")

"""The parts of offline generation: options, prompts with sampling of their own, dealing, and lines of the file."""

import json
from pathlib import Path

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.model.config import ModelConfig
from rlhf_spmd.model.hf import ChatTemplate
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.offline import generate_file, options
from rlhf_spmd.runtime.offline.generate_file import OutputFile, deal, line_of, merge_in_order
from rlhf_spmd.runtime.offline.options import load_options
from rlhf_spmd.runtime.offline.prompts import Prompt, read_offline_prompts, sampling_of
from tests.folders import write_model, write_tokenizer

CONTEXT = 32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_json(folder)


def config(**changes) -> ModelConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    shape = {"model_type": "llama", "vocab_size": 63, "head_dim": 16, "max_position_embeddings": CONTEXT}
    return ModelConfig(**(sizes | shape | changes))


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
        "chat_template_kwargs have no effect",
        f"rlhf_spmd: note: {tmp_path / 'p.jsonl'}: the chat template does not read 'tools'",
    ]
    with pytest.raises(
        UserError, match=r"data.chat_template_kwargs has 'y', which the chat template .* \(it reads x\)"
    ):
        read('{"y": "be"}')
    with pytest.raises(UserError, match="data.chat_template_kwargs has 'tools', which every chat template is given by"):
        options.check_options(load_options(['data.chat_template_kwargs={"tools": []}']))
    for wrong in ("1", "[1]", '{"x": False}', "x=1"):
        with pytest.raises(UserError, match=r'write an object of JSON, such as {"enable_thinking": false}'):
            load_options([f"data.chat_template_kwargs={wrong}"])
    assert load_options(["data.chat_template_kwargs=none"]).data.chat_template_kwargs == {}


def prompts_of(folder: Path, lines: list[dict], tokenizer: Tokenizer, *words: str, **model) -> list[Prompt]:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = load_options(["generation.max_new_tokens=8", *words])
    return read_offline_prompts(path, tokenizer, config(**model), options)


# ---- options --------------------------------------------------------------------------------------------------------


def test_words_set_options():
    words = ["seed=5", "dtype=bfloat16", "generation.temperature=0", "generation.top_p=0.5", "data.long_prompts=drop"]
    options = load_options([*words, "samples_per_prompt=3", "generation.stop=a,b", "seed=6"])
    assert (options.seed, options.dtype, options.samples_per_prompt, options.tp) == (6, "bfloat16", 3, 1)
    assert sampling_of(options.generation) == Sampling(128, temperature=0.0, top_p=0.5, stop=("a", "b"))
    assert options.data.long_prompts == "drop"


@pytest.mark.parametrize("key", options.types())
def test_every_key_can_be_set(key):
    words = {
        "dtype": "bfloat16",
        "products": "onednn",
        "device": "shared",
        "data.key": "text",
        "data.long_prompts": "drop",
    }
    if key == "data.chat_template_kwargs":
        assert load_options([f'{key}={{"a": [1]}}']).data.chat_template_kwargs == {"a": [1]}
        return
    value = (words | {"generation.stop": "x"}).get(key, "1")
    options = load_options([f"{key}={value}"])
    for part in key.split("."):
        options = getattr(options, part)
    assert str(options) == {"generation.stop": "('x',)"}.get(key, value) or float(options) == 1.0


WRONG = {
    "generation.temperature=-1": "generation.temperature=-1",
    "generation.stop=a,,b": "generation.stop=a,,b",
    "generation.top_k=x": "generation.top_k=x",
    "tp=0": "tp=0",
    "seed=-1": "seed=-1",
    "dtype=float16": "dtype=float16",
    "temprature=1": "unknown key 'temprature' .did you mean 'generation.temperature'",
    "generation.topp=1": "unknown key 'generation.topp' .did you mean 'generation.top_p'",
    "top_k=3": "unknown key 'top_k' .did you mean 'generation.top_k'",
    "ppo.kl_coef=1": "unknown key 'ppo.kl_coef'; known: seed, ",
    "generation=1": "unknown key 'generation'",
    "top_k": "not of the form",
}


@pytest.mark.parametrize("word", WRONG)
def test_wrong_words_are_refused(word):
    with pytest.raises(UserError, match=WRONG[word]):
        load_options([word])


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_a_prompts_own_sampling(tmp_path, tokenizer):
    own = {"max_new_tokens": 3, "min_new_tokens": 1, "temperature": 0, "top_k": 4, "top_p": 0.5, "min_p": 0.1}
    lines = [{"prompt": "ba"}, {"prompt": "be", "id": 7} | own | {"stop": [" bi,"]}, {"prompt": "bi", "top_k": None}]
    first, second, third = prompts_of(tmp_path, lines, tokenizer, "generation.temperature=0.5")
    assert first.sampling == third.sampling == Sampling(8, temperature=0.5)
    assert second.sampling == Sampling(3, 1, 0.0, 4, 0.5, 0.1, (" bi,",))
    assert sampling_of(options.OfflineGeneration(), {"stop": "a,b"}).stop == ("a,b",)


BAD = {
    "temperature": ({"temperature": -1}, "line 2: temperature=-1"),
    "text": ({"temperature": "1"}, 'line 2: temperature="1" is not a number'),
    "bool": ({"top_k": True}, "line 2: top_k=true is not a number"),
    "list": ({"top_p": [1]}, r"line 2: top_p=\[1\] is not a number"),
    "fraction": ({"max_new_tokens": 2.5}, "line 2: max_new_tokens=2.5"),
    "none": ({"max_new_tokens": 0}, "line 2: max_new_tokens=0"),
    "top_p": ({"top_p": 0}, "line 2: top_p=0"),
    "least": ({"min_new_tokens": 9}, "line 2: min_new_tokens=9, max_new_tokens=8"),
    "stop": ({"stop": [1]}, "line 2: stop="),
    "empty stop": ({"stop": ["a", ""]}, "line 2: stop="),
    "too many": ({"max_new_tokens": 31}, "line 2: the prompt has 2 tokens and may get 31 new ones, .* context of 32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused(name, tmp_path, tokenizer):
    own, message = BAD[name]
    with pytest.raises(UserError, match=r"p\.jsonl, " + message):
        prompts_of(tmp_path, [{"prompt": "ba"}, {"prompt": "be bi"} | own], tokenizer)


def test_room_for_a_prompt(tmp_path, tokenizer):
    """As long as the context leaves; what happens beyond that, or beyond data.max_prompt, long_prompts says."""
    just, over = {"prompt": "ba " * (CONTEXT - 8)}, {"prompt": "be " * (CONTEXT - 7)}
    lines = [{"prompt": "bi"}, over, just]
    assert len(prompts_of(tmp_path, [just], tokenizer)) == 1
    with pytest.raises(UserError, match="line 2: the prompt has 25 tokens .* data.max_prompt=24"):
        prompts_of(tmp_path, lines, tokenizer)
    with pytest.raises(UserError, match="line 2: .* the limit is 9"):
        prompts_of(tmp_path, lines, tokenizer, "data.max_prompt=9")
    dropped = prompts_of(tmp_path, lines, tokenizer, "data.long_prompts=drop")
    assert [prompt.index for prompt in dropped] == [0, 2]
    assert [len(prompt.tokens) for prompt in dropped] == [1, 24]
    cut = prompts_of(tmp_path, lines, tokenizer, "data.long_prompts=truncate", "data.max_prompt=9")
    assert [len(prompt.tokens) for prompt in cut] == [1, 9, 9]
    with pytest.raises(UserError, match="data.long_prompts=drop leaves no prompt"):
        prompts_of(tmp_path, [over], tokenizer, "data.long_prompts=drop")
    with pytest.raises(UserError, match="max_new_tokens=32 leaves no room"):
        prompts_of(tmp_path, lines, tokenizer, "generation.max_new_tokens=32")
    with pytest.raises(UserError, match="line 1: the prompt has token 5, but the model has 5"):
        prompts_of(tmp_path, lines, tokenizer, vocab_size=5)


# ---- dealing and writing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 7, 12, 13, 30])
@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize(("samples", "window"), [(1, 3), (3, 2), (2, 50)])
def test_what_is_dealt_comes_back_in_order(num, copies, samples, window):
    prompts = list(range(num))
    hands = [deal(prompts, copy, copies, window) for copy in range(copies)]
    found = []
    for _ in range(0, num, window * copies):
        lines = [[(p, s) for p in next(hand, []) for s in range(samples)] for hand in hands]
        assert max(map(len, lines)) <= window * samples
        found += merge_in_order(lines, samples)
    assert found == [(p, s) for p in prompts for s in range(samples)]
    assert all(next(hand, None) is None for hand in hands)


@pytest.mark.parametrize(
    ("response", "stop", "finish"),
    [
        ([5, 6, 1], (), "eos"),
        ([5, 6, 7, 1], (), "eos"),
        ([5, 6, 7, 8], (), "length"),
        ([5, 6, 7, 8], ("du",), "length"),
        ([5, 6, 7], ("bu",), "stop"),
        ([5, 6, 7, 8], ("da",), "stop"),
        ([5, 6, 7, 0], ("<s>",), "stop"),  # a special token, which the text does not show
        ([5, 6, 7, 0], ("bu <s>",), "stop"),
        ([5, 6, 7, 0], ("s>",), "length"),
    ],
)
def test_how_a_response_ended(tokenizer, response, stop, finish):
    prompt = Prompt(0, "ba", [3], Sampling(4, stop=stop))
    line = line_of(prompt, response, -1.23456789, tokenizer, (1,))
    assert (line["finish"], line["num_tokens"], line["logprob"]) == (finish, len(response), -1.2346)
    assert (line["prompt"], line["response"].split()) == (
        "ba",
        ["bi", "bo", "bu", "da"][: len(response) - (response[-1] < 2)],
    )


def test_the_file_gets_its_name_at_the_end(tmp_path):
    with pytest.raises(ZeroDivisionError), OutputFile(tmp_path / "out.jsonl"):
        raise ZeroDivisionError  # nothing was written yet
    with OutputFile(tmp_path / "out.jsonl") as file:
        for number in range(2):
            file.write([{"a": number, "b": "é"}])
            assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.part"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == '{"a": 0, "b": "é"}\n{"a": 1, "b": "é"}\n'
    with pytest.raises(ZeroDivisionError), OutputFile(tmp_path / "other.jsonl") as file:
        file.write([{}])
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_file_of_a_broken_run_is_begun_anew(tmp_path):
    (tmp_path / "out.jsonl.part").write_text("half\n", encoding="utf-8")
    with OutputFile(tmp_path / "out.jsonl") as file:
        file.write([{"a": 1}])
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == '{"a": 1}\n'


def test_where_the_file_must_not_go(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("", encoding="utf-8")
    (tmp_path / "link.jsonl").symlink_to(prompts)
    for name, overwrite, message in (
        ("p.jsonl", False, "is the prompt file"),
        ("link.jsonl", True, "is the prompt file"),
        (".", True, "is a folder"),
        ("no/out.jsonl", True, "there is no folder"),
    ):
        with pytest.raises(UserError, match=message):
            OutputFile.check(tmp_path / name, prompts, overwrite=overwrite)
    (tmp_path / "old.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="exists.*--overwrite"):
        OutputFile.check(tmp_path / "old.jsonl", prompts, overwrite=False)
    OutputFile.check(tmp_path / "old.jsonl", prompts, overwrite=True)
    OutputFile.check(tmp_path / "new.jsonl", prompts, overwrite=False)


class OneRank:
    """As much of a world as a copy of a model needs to know of it."""

    def __init__(self):
        import torch

        from rlhf_spmd.runtime.world.devices import RankDevice

        self.rank, self.size, self.device = 0, 1, torch.device("cpu")
        self.computes = RankDevice("cpu", None, 1, 1)

    def together(self, what):
        from contextlib import nullcontext

        return nullcontext()


def test_places_stay_filled_between_windows(tmp_path, tokenizer):
    """A copy begins with the next window before the last sequence of this one has ended, and forgets what it gave."""
    from rlhf_spmd.plan.layout import Layout

    folder = write_model(tmp_path / "actor")
    lines = [{"prompt": "ba be", "max_new_tokens": 20 if i % 8 == 0 else 2} for i in range(64)]
    words = ["generation.max_sequences=2", "generation.max_new_tokens=20"]
    prompts = prompts_of(tmp_path, lines, tokenizer, *words, max_position_embeddings=64)
    options = load_options(words)
    copy = generate_file.make_replica(
        str(folder), prompts, tokenizer, Layout.data_parallel([0]), OneRank(), options, "2026-02-03T00:00:00"
    )
    rounds, counts = [], []
    while found := copy.next_window(lambda *told: rounds.append(told)):
        counts.append(len(found))
        assert len(copy.engine.requests.prompts) <= 2 * generate_file.WINDOW * 2, "finished requests are kept"
    assert counts == [16] * 4
    assert sum(ended for ended, _ in rounds) == 64
    tokens = sum(tokens for _, tokens in rounds)
    assert len(rounds) < 0.75 * tokens, "one sequence at a time: places were empty"

"""The options of offline generation, as words."""

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.generation.requests import Sampling
from rlhf_spmd.runtime.offline import options
from rlhf_spmd.runtime.offline.options import load_options
from rlhf_spmd.runtime.offline.prompts import sampling_of


def test_words_set_options():
    words = ["seed=5", "dtype=bfloat16", "generation.temperature=0", "generation.top_p=0.5", "data.long_prompts=drop"]
    options = load_options([*words, "samples_per_prompt=3", "generation.stop=a,b", "seed=6"])
    assert (options.seed, options.dtype, options.samples_per_prompt, options.tp) == (6, "bfloat16", 3, 1)
    assert sampling_of(options.generation) == Sampling(128, temperature=0.0, top_p=0.5, stop=("a", "b"))
    assert options.data.long_prompts == "drop"


@pytest.mark.parametrize("key", options.OPTIONS)
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
    "temprature=1": "unknown option 'temprature' .did you mean 'generation.temperature'",
    "generation.topp=1": "unknown option 'generation.topp' .did you mean 'generation.top_p'",
    "top_k=3": "unknown option 'top_k' .did you mean 'generation.top_k'",
    "ppo.kl_coef=1": "unknown option 'ppo.kl_coef'; known here: seed, ",
    "generation=1": "'generation' is a group of options; set one of generation.max_new_tokens",
    "top_k": "not of the form",
}


@pytest.mark.parametrize("word", WRONG)
def test_wrong_words_are_refused(word):
    with pytest.raises(UserError, match=WRONG[word]):
        load_options([word])

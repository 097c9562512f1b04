"""Fixtures of the tests of offline generation."""

import pytest

from rlhf_spmd.model.hf import load_tokenizer
from rlhf_spmd.model.texts.tokenizer import Tokenizer
from tests.folders import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)

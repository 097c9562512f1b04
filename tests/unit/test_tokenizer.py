"""The special tokens that a tokenizer adds to a text."""

import pytest

from rlhf_spmd.model import hf
from tests.unit.test_hf import make_tokenizer


@pytest.fixture
def folder(tmp_path):
    make_tokenizer(tmp_path)
    return tmp_path


def test_a_rendered_prompt_gets_no_second_beginning(folder):
    """Chat templates write the beginning of sequence into the text."""
    tokenizer = hf.load_tokenizer(folder)
    assert tokenizer.encode("<s> w7 w8") == tokenizer.encode("w7 w8") == [1, 7, 8]
    assert tokenizer.encode("<s> w7 w8", special=False) == [1, 7, 8]
    assert tokenizer.encode("w7 <s> <s> w8") == [1, 7, 1, 1, 8]  # elsewhere it is what the text says
    assert tokenizer.encode("") == [1] and tokenizer.encode("", special=False) == []

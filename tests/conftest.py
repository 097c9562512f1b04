"""Without a GPU, Triton kernels run under the interpreter, which must be chosen before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> str:
    """Returns where kernel tests put their tensors."""
    return "cuda" if torch.cuda.is_available() else "cpu"

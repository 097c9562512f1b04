"""The names by which hang detection knows foreign threads are those that the installed libraries give."""

import mmap
from pathlib import Path

import pytest
import torch

from rlhf_spmd.runtime.failure.processes import SPINNING
from rlhf_spmd.runtime.world.devices import set_defaults

TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
NCCL = Path(torch.__file__).parents[1] / "nvidia" / "nccl" / "lib" / "libnccl.so.2"


@pytest.mark.parametrize(
    ("library", "name"), [(NCCL, b"NCCL Progress"), (NCCL, b"NCCL Service"), (TORCH, b"pt_nccl_watchdg")]
)
def test_a_thread_is_called_so(library, name):
    assert has(library, name) and name.startswith(SPINNING)


def test_the_variable_that_makes_nccl_name_its_threads():
    found: dict[str, str] = {}
    set_defaults(found)
    assert found["NCCL_SET_THREAD_NAME"] == "1" and has(NCCL, b"SET_THREAD_NAME")


def has(library: Path, text: bytes) -> bool:
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return memory.find(text) >= 0

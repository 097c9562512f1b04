"""Which devices a process sees, and what hints at more."""

from fnmatch import fnmatch

import pytest
import torch

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.world import visible_devices


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, [], []),
        ({}, ["/dev/nvidia0"], ["/dev/nvidia0"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ["/dev/nvidia0"], ["CUDA_VISIBLE_DEVICES=0,1", "/dev/nvidia0"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["/dev/nvidia0"], []),
        ({"ROCR_VISIBLE_DEVICES": "-1", "SLURM_JOB_GPUS": "3"}, ["/dev/kfd"], []),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0"}, [], ["CUDA_VISIBLE_DEVICES=0"]),
        ({"GPU_DEVICE_ORDINAL": ""}, ["/dev/nvidia3"], ["/dev/nvidia3"]),
        ({"ROCR_VISIBLE_DEVICES": "2"}, [], ["ROCR_VISIBLE_DEVICES=2"]),
        ({"SLURM_JOB_GPUS": "0,1"}, [], ["SLURM_JOB_GPUS=0,1"]),
        ({"PBS_NGPUS": "0"}, [], []),
    ],
)
def test_what_hints_at_devices(environ, files, expected, monkeypatch):
    monkeypatch.setattr(
        visible_devices.glob, "glob", lambda pattern: [path for path in files if fnmatch(path, pattern)]
    )
    assert visible_devices.hints(environ) == expected


@pytest.mark.parametrize(
    ("text", "threads"), [("4", 4), ("2,1", 2), (" 3 , 1 ,1", 3), ("4096", 4096), ("", None), (" \t", None)]
)
def test_threads_are_the_first_number(text, threads):
    assert visible_devices.threads_wanted({"OMP_NUM_THREADS": text}) == threads
    assert visible_devices.threads_wanted({}) is None


@pytest.mark.parametrize(
    "text", ["0", "-1", "+", "abc", "2,", ",2", "2,0", "2,x", "1e3", "1_0", "\uff12", "4097", "9" * 99]
)
def test_other_threads_are_refused_by_name(text):
    with pytest.raises(
        UserError, match="^OMP_NUM_THREADS='.*': give the number of threads of each rank, from 1 to 4096"
    ):
        visible_devices.threads_wanted({"OMP_NUM_THREADS": text})


def test_who_asks_for_devices_gets_torchs_answer_without_any_hint(monkeypatch):
    monkeypatch.setattr(visible_devices, "hints", lambda environ: [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert visible_devices.find_devices("auto", "node7", 1) == {"seen": [], "unseen": ""}
    found = visible_devices.find_devices("shared", "node7", torch.get_num_threads())
    assert found["unseen"].startswith("torch sees no device on node7 (torch ")

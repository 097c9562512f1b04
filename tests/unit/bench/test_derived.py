"""Derived seconds of a GPU: rows and calibrations are those of the terms, and no term is below its roofline."""

import pytest

from bench.columns import COLUMNS
from bench.forecast import derived
from bench.forecast.derived import DEVICE, GPUS, LLAMA_7B, QWEN2_7B
from bench.rows import ABOUT, RESULTS, read_rows
from rlhf_spmd.machines.calibration_file import load_calibration, read_calibration, write_calibration
from tools.calibrations.derive import calibration

H100 = GPUS[DEVICE]


def test_the_rows_are_those_of_the_terms():
    kept = [
        {name: one for name, one in row.items() if name not in ABOUT} for row in read_rows(RESULTS / "derived.jsonl")
    ]
    assert kept == derived.make_rows()
    assert all(cell(row) for row in kept for cell in COLUMNS["derived"].values())


@pytest.mark.parametrize("kind", GPUS)
def test_the_shipped_calibrations_are_those_of_the_terms(tmp_path, kind):
    found = calibration(kind)
    path = tmp_path / f"{found.name}.json"
    write_calibration(found, str(path))
    assert read_calibration(str(path)) == load_calibration(found.name)


def test_rooflines_by_hand():
    weights = 2 * (QWEN2_7B.num_params - 152064 * 3584)  # 14.1 GB; a token's cache is 2 x 4 heads x 128 x 28 layers
    read_s = (weights + 2 * 64 * 1024 * 2 * 4 * 128 * 28) / 3.35e12
    assert derived.decode(H100, QWEN2_7B, 64, 1024).roofline_s == pytest.approx(read_s)
    assert derived.sample(H100, 64, 131072).roofline_s == pytest.approx(64 * 131072 * 2 / 3.35e12)
    flops = 6 * 8192 * (32 * (4 * 4096**2 + 3 * 4096 * 11008)) + 6 * 8 * 896 * 4096 * 32000
    flops += 3 * 32 * 8192 * 4 * 4096 * 512  # to half of 1,024 tokens
    assert derived.train(H100, LLAMA_7B, 8, 128, 896, update=False).roofline_s == pytest.approx(flops / 989e12)

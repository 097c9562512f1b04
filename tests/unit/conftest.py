"""Fixtures of several unit tests."""

import pytest


@pytest.fixture
def float64(monkeypatch) -> None:
    """Lets a config of dtype float64 run, and makes the store float64 too (rollouts come rounded to float32 anyway)."""
    import torch

    from rlhf_spmd.runtime.execute import parity_gate
    from rlhf_spmd.runtime.execute.iteration import Store
    from rlhf_spmd.runtime.weights import rank_models

    monkeypatch.setitem(rank_models.DTYPES, "float64", torch.float64)
    monkeypatch.setitem(parity_gate.PARITY_TOLERANCE, "float64", 1e-4)
    make = Store.make

    def wide(self, key: str) -> torch.Tensor:
        made = make(self, key)
        return made.double() if made.is_floating_point() else made

    monkeypatch.setattr(Store, "make", wide)

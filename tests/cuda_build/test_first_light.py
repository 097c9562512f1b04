"""What first-light times on a GPU only, on fake CUDA tensors: each call is made, with its real shapes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from bench.forecast.derived import LLAMA_7B
from bench.speed import kernel_cases, kernels
from bench.speed.gpu_decode import DecodeBench
from rlhf_spmd.model.sequences import forward, response_logprobs
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.runtime.engines.flat_engine import Groups
from rlhf_spmd.runtime.engines.train_engine import EngineOptions, make_engine
from tests.cuda_build.fake_gpu import gpu, launches
from tests.cuda_build.test_launches import TOKENS, batch_of, load, model_of

CUDA = torch.device("cuda", 0)


@pytest.fixture
def numbers(monkeypatch):
    """Fake tensors have no generators, nor numbers for the host, nor a backward pass."""
    monkeypatch.setattr(kernel_cases, "generator", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "__int__", lambda x: 1)
    monkeypatch.setattr(FakeTensor, "tolist", lambda x: [1.0] * x.numel())
    monkeypatch.setattr(torch.Tensor, "backward", lambda x: None)
    monkeypatch.setattr(torch.autograd, "backward", lambda x, gradient: None)


def test_every_case_of_a_kernel(numbers):
    with gpu():
        for case in kernels.gpu_cases(CUDA):
            for name, call in case.calls.items():
                with torch.no_grad(), launches() as counts:
                    call()
                assert counts, (case.kernel, case.shape, name)


def test_a_decode_step_of_7b_shape(numbers):
    with gpu():
        step = DecodeBench(CUDA, LLAMA_7B, rows=64, context=1024).step
        with launches() as counts:
            step()
    assert counts["decode_attention._split_kernel"] == LLAMA_7B.num_layers


def test_an_optimizer_step_but_for_its_backward_pass(numbers):
    model = model_of("llama", 2)
    with gpu():
        load(model)
        engine = make_engine(model.train(), groups=Groups(), options=EngineOptions(0, torch.bfloat16))
        batch = batch_of(TOKENS)

        def loss(model: Transformer) -> torch.Tensor:
            output = forward(model, batch)
            return response_logprobs(model, batch, output, temperature=1.0, eos_ids=(), min_new_tokens=0).mean()

        with launches() as counts:
            engine.begin()
            engine.backward(engine.forward(loss), last=True)
            assert engine.update(lr=1e-6) == 1.0
    assert counts["_fused_adamw_"] > 0, counts

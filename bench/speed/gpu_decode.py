"""A decode step of a model of 7B shape out of matrix products and the kernels, in one CUDA graph: what share of the
measured memory bandwidth does it reach? Weights are random; every layer has its own, so that no cache helps."""

# B rows, D hidden, I intermediate, H heads (no grouping, as Llama 7B), d head dim, V vocabulary

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rlhf_spmd.kernels.decode_attention import Decode, decode_attention
from rlhf_spmd.kernels.kv_write import kv_write
from rlhf_spmd.kernels.rmsnorm import rmsnorm
from rlhf_spmd.kernels.rope import rope
from rlhf_spmd.kernels.sample import sample
from rlhf_spmd.kernels.silu_mul import silu_mul
from rlhf_spmd.plan.workload import ModelShape

BLOCK_SIZE = 16


class DecodeBench:
    """`step()` decodes one token of every row; `num_bytes` is what any implementation must read."""

    def __init__(self, device: torch.device, shape: ModelShape, *, rows: int, context: int, dtype=torch.bfloat16):
        self.shape, self.rows, self.device, self.dtype = shape, rows, device, dtype
        hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
        sizes = {
            "qkv": (3 * heads, hidden),
            "o": (hidden, heads),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        self.layers = [
            {name: self._weight(*size) for name, size in sizes.items()} | {"norms": self._ones(2, hidden)}
            for _ in range(shape.num_layers)
        ]
        self.embed, self.unembed = (self._weight(shape.vocab_size, hidden) for _ in range(2))
        self.norm = self._ones(hidden)
        per_row = -(-context // BLOCK_SIZE)
        blocks = (shape.num_layers, 2, rows * per_row, shape.num_heads, BLOCK_SIZE, shape.head_dim)
        self.cache = torch.randn(blocks, dtype=dtype, device=device)
        self.tables = torch.randperm(rows * per_row, device=device).view(rows, per_row).int()
        self.lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
        last = context - 1
        self.slots = self.tables[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.bits = torch.empty(rows, dtype=torch.int64, device=device).random_()
        angles = torch.rand(rows, shape.head_dim // 2, device=device)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        used = sum(weight.nbytes for layer in self.layers for weight in layer.values()) + self.unembed.nbytes
        self.num_bytes = used + 2 * shape.num_layers * rows * context * heads * self.cache.element_size()

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=self.device, dtype=self.dtype).mul_(columns**-0.5)

    def _ones(self, *size: int) -> torch.Tensor:
        return torch.ones(size, device=self.device, dtype=self.dtype)

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """Makes one step and returns the drawn tokens [B]."""
        num_heads, head_dim = self.shape.num_heads, self.shape.head_dim
        decode = Decode.prepare(self.tables, self.lengths, BLOCK_SIZE, self.dtype)
        added, x = F.embedding(self.tokens, self.embed), None
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            y, x = rmsnorm(added, layer["norms"][0], 1e-5, x)
            q, k, v = F.linear(y, layer["qkv"]).view(self.rows, 3 * num_heads, head_dim).split(num_heads, dim=1)
            q, k = rope(q, k, self.cos, self.sin)
            kv_write(k, v, keys, values, self.slots)
            mixed = decode_attention(q, keys, values, decode)
            y, x = rmsnorm(F.linear(mixed.flatten(1), layer["o"]), layer["norms"][1], 1e-5, x)
            added = F.linear(silu_mul(F.linear(y, layer["gate_up"])), layer["down"])
        y, x = rmsnorm(added, self.norm, 1e-5, x)
        return sample(F.linear(y, self.unembed), self.bits, temperature=1.0).tokens_B

    def captured(self) -> Callable[[], object]:
        """Captures the step as a CUDA graph; on a CPU returns the step itself."""
        return captured(self.step, self.device)


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Captures a call as a CUDA graph, without the time that launching takes; on a CPU returns the call itself."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # compiles kernels and fills caches, which a capture must not do
        call()
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads may ask for events meanwhile
        call()
    return graph.replay

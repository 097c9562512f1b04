"""What a GPU should take for this engine's work, derived term by term from data sheets and counted kernels.

No number here is measured. A constant comes from a data sheet, from a count of what the code launches or moves, or it
is an assumed efficiency, which says what step of `bench first-light` measures it. The table of bench/RESULTS.md, what
first-light prints beside its measurements, and the derived calibrations (`python -m tools derive`) are computed from
the same terms.

Cost: none. Command: python -m bench derived
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from bench.rows import Arguments, write
from bench.tables import ended
from rlhf_spmd.plan.cost.seconds import STATE_BYTES, head_flops, layer_flops
from rlhf_spmd.plan.workload import SHAPES, ModelShape


@dataclass(frozen=True, slots=True)
class GPU:
    """A data sheet and two assumptions.

    Of the data sheet, in numbers per second: matrix_flops of dense bfloat16 products; memory_bytes of device memory;
    link_bytes of NVLink in one direction; host_bytes of PCIe x16 in one direction; network_bytes of one GPU's adapter.
    Assumed, of matrix_flops: matrix_share that large products reach (step train-step), attention_share that flash
    attention reaches (published by its authors, arXiv 2307.08691).
    """

    matrix_flops: float
    memory_bytes: float
    link_bytes: float
    host_bytes: float
    network_bytes: float
    matrix_share: float
    attention_share: float


GPUS = {
    "a100-40g": GPU(312e12, 1.555e12, 300e9, 32e9, 25e9, matrix_share=0.80, attention_share=0.60),
    "a100-80g": GPU(312e12, 2.039e12, 300e9, 32e9, 25e9, matrix_share=0.80, attention_share=0.60),
    "h100-80g": GPU(989e12, 3.35e12, 450e9, 64e9, 50e9, matrix_share=0.65, attention_share=0.40),
}
DEVICE = "h100-80g"  # of the table

# Assumed efficiencies
MEMORY_SHARE = 0.85  # of memory_bytes, in a long read (kernel-step, sample)
KERNEL_S = 2.5e-6  # from the end of a small kernel to the end of the next one, inside a CUDA graph (decode-profile)
ROUND_S = 70e-6  # between two replays: the graph's start 20 us, 20 small kernels; the host is a round ahead

# Counted in model/transformer.py and runtime/generation/, for each layer
DECODE_KERNELS = 11  # products: q k v, o, gate up, down; norm twice, rope, cache write, attention 2, SwiGLU
DRAW_KERNELS = 3  # of kernels/sample.py without top-p
FORWARD_KERNELS = 9  # products 4, norm twice, rope, attention, SwiGLU
BACKWARD_KERNELS = 29  # products 8, norm twice 3, rope 2, attention 3, SwiGLU, sums of the gradients of weights 9
NUMBER_BYTES = 2  # of a weight and of an activation
GRADIENT_BYTES = 10  # read and written for each weight to add a bfloat16 gradient to its float32 sum
CLIP_BYTES = 16  # for each weight: zero 4, norm 4, clip 8

LLAMA_7B, QWEN2_7B = SHAPES["llama-7b"], SHAPES["qwen2.5-7b"]


@dataclass(frozen=True, slots=True)
class Derived:
    """Seconds of some work. roofline_s: at the rates of the data sheet, with nothing else. terms: what it should take,
    one after the other. formula: of the terms, in words."""

    roofline_s: float
    terms: Mapping[str, float]
    formula: str

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())


# ---- terms -----------------------------------------------------------------------------------------------------------


def product_s(gpu: GPU, flops: float) -> float:
    """Returns the seconds of large matrix products."""
    return flops / (gpu.matrix_share * gpu.matrix_flops)


def attention_s(gpu: GPU, flops: float) -> float:
    """Returns the seconds of flash attention."""
    return flops / (gpu.attention_share * gpu.matrix_flops)


def memory_s(gpu: GPU, num_bytes: float) -> float:
    """Returns the seconds of reading and writing device memory."""
    return num_bytes / (MEMORY_SHARE * gpu.memory_bytes)


def attention_flops(shape: ModelShape, tokens: float, length: float) -> float:
    """Counts the FLOPs of causal attention in all layers, forward; a token attends to half of a sequence."""
    return shape.num_layers * (layer_flops(shape, tokens, length / 2) - layer_flops(shape, tokens, 0))


def moved_when_training(shape: ModelShape) -> tuple[int, int]:
    """Counts the numbers that the kernels between the products move for a token and layer, forward and backward: two
    norms with the residual, rope, SwiGLU; backward also copies the gradient of v."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    h, i, rope = shape.hidden_size, shape.intermediate_size, 2 * (q + kv)
    return 2 * 4 * h + rope + 3 * i, 2 * 4 * h + rope + 2 * kv + 5 * i


# ---- work ------------------------------------------------------------------------------------------------------------


def decode(gpu: GPU, shape: ModelShape, rows: int, context: int) -> Derived:
    """Computes the time of one token for each of some rows of so many tokens, from a CUDA graph."""
    embedding = 0 if shape.tied else shape.vocab_size * shape.hidden_size  # of which a row per token is read
    weights_bytes = NUMBER_BYTES * (shape.num_params - embedding)
    flops = shape.num_layers * layer_flops(shape, rows, 0) + head_flops(shape, rows)
    cached = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * rows * context
    terms = {
        "products": max(memory_s(gpu, weights_bytes), product_s(gpu, flops)),
        "keys and values": memory_s(gpu, NUMBER_BYTES * cached),
        "between kernels": shape.num_layers * DECODE_KERNELS * KERNEL_S,
        "draw": sample(gpu, rows, shape.vocab_size).seconds,
        "host": ROUND_S,
    }
    read_s = (weights_bytes + NUMBER_BYTES * cached) / gpu.memory_bytes
    formula = (
        f"max(weights read, products) + keys and values + {DECODE_KERNELS} kernels a layer + draw + pause between "
    )
    formula += "replays"
    return Derived(max(read_s, flops / gpu.matrix_flops), terms, formula)


def train(gpu: GPU, shape: ModelShape, sequences: int, prompt: int, response: int, *, update: bool) -> Derived:
    """Computes the time of a micro-batch, forward and backward, without recomputation, and of summing gradients;
    `update` adds an optimizer step of all weights on this GPU."""
    tokens = sequences * (prompt + response)
    layers, head = shape.num_layers * layer_flops(shape, tokens, 0), head_flops(shape, sequences * response)
    attention, moved = attention_flops(shape, tokens, prompt + response), sum(moved_when_training(shape))
    terms = {
        "products": product_s(gpu, 3 * layers + 4 * head),  # the logits are computed twice, in chunks
        "attention": attention_s(gpu, 3.5 * attention),  # backward computes the scores again
        "other kernels": memory_s(gpu, NUMBER_BYTES * moved * shape.num_layers * tokens),
        "between kernels": shape.num_layers * (FORWARD_KERNELS + BACKWARD_KERNELS) * KERNEL_S,
        "gradient sums": memory_s(gpu, GRADIENT_BYTES * shape.num_params),
    }
    formula = "3 passes of products + 3.5 of attention + kernels between + starts + float32 sums of gradients"
    if update:
        terms["update"] = memory_s(gpu, (STATE_BYTES + CLIP_BYTES) * shape.num_params)
        formula += " + AdamW"
    return Derived(3 * (layers + head + attention) / gpu.matrix_flops, terms, formula)


def sample(gpu: GPU, rows: int, vocab: int, number_bytes: int = NUMBER_BYTES) -> Derived:
    """Draws a token for each row, without top-p."""
    num_bytes = rows * vocab * number_bytes
    terms = {"logits": memory_s(gpu, num_bytes), "between kernels": DRAW_KERNELS * KERNEL_S}
    return Derived(num_bytes / gpu.memory_bytes, terms, "logits read once + 3 kernels")


# ---- the table -------------------------------------------------------------------------------------------------------


def table() -> Iterator[tuple[str, Callable[[GPU], Derived]]]:
    """Yields what one H100 does: (in words, its terms)."""
    yield "decode Llama 7B, 64 rows of 1,024", lambda gpu: decode(gpu, LLAMA_7B, 64, 1024)
    yield "decode Qwen2.5-7B, 64 rows of 1,024", lambda gpu: decode(gpu, QWEN2_7B, 64, 1024)
    yield "decode Qwen2.5-7B, 256 rows of 1,024", lambda gpu: decode(gpu, QWEN2_7B, 256, 1024)
    yield "train Llama 7B, 8 of 1,024, a micro-batch", lambda gpu: train(gpu, LLAMA_7B, 8, 128, 896, update=False)
    yield "sample 64 of 131,072", lambda gpu: sample(gpu, 64, 131072)
    yield "sample 256 of 131,072", lambda gpu: sample(gpu, 256, 131072)


def make_rows() -> list[dict]:
    """Returns the table's rows."""
    rows = []
    for what, work in table():
        found = work(GPUS[DEVICE])
        about = {"bench": "derived", "device": DEVICE, "what": what, "kind": "derived"}
        rows.append(about | {"derived_s": found.seconds} | asdict(found))
    return rows


def main(arguments: list[str]) -> int:
    Arguments("derived", __doc__).parse_args(arguments)
    rows = make_rows()
    write("derived", rows)
    return ended("derived", rows, ok=True)

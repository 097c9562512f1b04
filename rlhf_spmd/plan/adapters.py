"""Low-rank adapters (LoRA, arXiv 2106.09685): which linear layers of a frozen base have them, and their scale.

    y = W x + s B (A x),    A [rank, inputs], B [outputs, rank], s = alpha / rank, or alpha / sqrt(rank) with rslora

Tensor parallelism splits what it splits of W: of a layer whose outputs it splits (q, k, v, gate, up) the rows of B, of
one whose inputs it splits (o, down) the columns of A. The other factor is whole on every slice.
"""

import math
from dataclasses import dataclass

A, B = "lora_A", "lora_B"  # the names of the factors in their layer
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_INPUTS = ("o_proj", "down_proj")
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WITH_ONE_INPUT = (BY_OUTPUTS[:3], BY_OUTPUTS[3:], *((one,) for one in BY_INPUTS))  # whose copies are joined
ALL_LINEAR = "all-linear"  # of targets: all of these, but not the output layer
NUMBER_BYTES = 4  # adapters are float32 in any precision of the base


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model.

    targets: the names of layers that have them, of LINEAR_LAYERS.
    dropout: the share of their inputs that training sets to 0 at random.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = LINEAR_LAYERS
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """s in the formula above."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def has(self, layer: str) -> bool:
        """Returns whether a linear layer, by its name or path, has adapters."""
        return layer.rpartition(".")[2] in self.targets

    def copies(self, layer: str) -> bool:
        """Returns whether a copy of the weights with adapters in them has a linear layer: it, or one with its input,
        has adapters."""
        name = layer.rpartition(".")[2]
        return any(name in some and any(map(self.has, some)) for some in WITH_ONE_INPUT)


def site(layer: int, name: str) -> int:
    """Returns the number of a linear layer in counters of random numbers: a change changes the masks of a run."""
    return layer * 8 + LINEAR_LAYERS.index(name)


def is_factor(name: str) -> bool:
    """Returns whether a parameter is a factor of an adapter."""
    return name.endswith((f".{A}", f".{B}"))

"""The shape of a model, and its translation from and to Hugging Face's config.json. Plain Python: no torch, no files.

The supported families (Llama 2/3, Qwen2/2.5, Qwen3, Mistral) differ only in the few switches of `ModelConfig`; all that
a family implies (Qwen2 always has biases on q, k and v; Qwen3 always normalises q and k) is decided here, once.
"""

from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one transformer. Raises UserError for sizes that cannot be a model."""

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)  # Hugging Face's keys; None: plain rope
    max_position_embeddings: int = 2048
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 before it
    sliding_layers: tuple[int, ...] = ()  # the layers that have that window
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        if self.model_type not in FAMILIES:
            raise UserError(f"model_type {self.model_type!r} is not supported; choose one of {', '.join(FAMILIES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"model config: {name} is {getattr(self, name)}, but must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model config: {self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads "
                "evenly; num_heads must be a multiple of num_kv_heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"model config: head_dim is {self.head_dim}, but rotary positions need an even number >= 2")
        if self.rope_type not in ROPE_TYPES:
            raise UserError(
                f"model config: rope type {self.rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
            )

    @property
    def rope_type(self) -> str:
        scaling = self.rope_scaling or {}
        return scaling.get("rope_type") or scaling.get("type") or "default"

    def window(self, layer: int) -> int | None:
        """How many tokens layer `layer` looks back, itself included; None: all of them."""
        return self.sliding_window if layer in self.sliding_layers else None

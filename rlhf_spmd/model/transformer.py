"""The transformer: one definition for training, scoring and generation, covering Llama, Qwen2, Qwen3 and Mistral.

Training, log-probabilities and decoding run the same code, so that generation and training agree to rounding. Parameter
names are Hugging Face's without the leading `model.`; heads are `lm_head` (absent when tied) and `score`. Sequences are
left-aligned with padding on the right, so plain causal attention needs no mask: padding never reaches a real token.
"""

# B sequences, T tokens at hand, S tokens to attend to, V vocabulary, D hidden, H heads, K key-value heads, d head_dim

import math
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_spmd.errors import UserError
from rlhf_spmd.model import rope
from rlhf_spmd.model.config import ModelConfig

Head = Literal["lm", "scalar"]


class Cache(Protocol):
    """What attention asks of a KV cache (runtime/kvcache.py)."""

    def update(self, layer: int, keys_BKTd: Tensor, values_BKTd: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store the new tokens of a layer -> (keys_BKSd, values_BKSd, mask_B1TS or None).

        The slots of a row are in the order of its positions. mask: True = may attend. None: all S slots of every row
        are real and the T new ones come last (so a prefill of an empty cache, or a decode of equal lengths).
        """


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467); half precisions are computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(nn.Module):
    """Token vectors; also the output layer of a model with tied embeddings.

    Both uses go through forward(), because engines that shard weights (ZeRO 3) gather them around module calls.
    """

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, x: Tensor, *, unembed: bool = False) -> Tensor:
        """tokens_BT -> hidden_BTD; with unembed, hidden_...D -> logits_...V."""
        return F.linear(x, self.weight) if unembed else F.embedding(x, self.weight)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.window(layer)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor, cos_BTf: Tensor, sin_BTf: Tensor, cache: Cache | None) -> Tensor:
        q_BTHd = self.q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        k_BTKd = self.k_norm(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        v_BTKd = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BHTd = rope.rotate(q_BTHd, cos_BTf, sin_BTf).transpose(1, 2)
        k_BKSd = rope.rotate(k_BTKd, cos_BTf, sin_BTf).transpose(1, 2)
        v_BKSd, mask_B1TS = v_BTKd.transpose(1, 2), None
        if cache is not None:
            k_BKSd, v_BKSd, mask_B1TS = cache.update(self.layer, k_BKSd, v_BKSd)
        if self.window is not None and k_BKSd.shape[2] > self.window:
            mask_B1TS = windowed(mask_B1TS, self.window, q_BHTd.shape[2], k_BKSd)
        return self.o_proj(attend(q_BHTd, k_BKSd, v_BKSd, mask_B1TS).transpose(1, 2).flatten(-2))


def attend(q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v -> out_BHTd; H is a multiple of K, and query head h reads key-value head h // (H / K).

    Without a mask the T queries are the last of the S tokens and attention is causal.
    """
    batch, num_heads, num_new, head_dim = q_BHTd.shape
    num_kv_heads, num_keys = k_BKSd.shape[1:3]
    group = num_heads // num_kv_heads
    causal = mask_B1TS is None and num_new > 1
    if causal and num_new != num_keys:
        mask_B1TS, causal = causal_mask(num_new, num_keys, q_BHTd.device), False
    if group == 1 or reads_groups(q_BHTd, masked=mask_B1TS is not None):
        return F.scaled_dot_product_attention(
            q_BHTd, k_BKSd, v_BKSd, attn_mask=mask_B1TS, is_causal=causal, enable_gqa=group > 1
        )
    if num_new == 1:  # decoding: the heads of a group become queries of one head, and the cache is not copied
        q_BKgd = q_BHTd.reshape(batch, num_kv_heads, group, head_dim)
        return F.scaled_dot_product_attention(q_BKgd, k_BKSd, v_BKSd, attn_mask=mask_B1TS).reshape(q_BHTd.shape)
    k_BHSd, v_BHSd = k_BKSd.repeat_interleave(group, 1), v_BKSd.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q_BHTd, k_BHSd, v_BHSd, attn_mask=mask_B1TS, is_causal=causal)


def reads_groups(q_BHTd: Tensor, *, masked: bool) -> bool:
    """Whether a kernel reads grouped heads in place: the CPU's, and the GPU's flash kernel (half precision, no mask).
    Elsewhere torch would fall back to writing out the T x S matrix, which repeating keys and values avoids."""
    return q_BHTd.device.type == "cpu" or (q_BHTd.dtype.itemsize == 2 and not masked)


def causal_mask(num_new: int, num_keys: int, device: torch.device) -> Tensor:
    """mask_11TS: the T queries are the last of S tokens; each sees itself and all before."""
    mask_TS = torch.ones(num_new, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_new)
    return mask_TS[None, None]


def windowed(mask_B1TS: Tensor | None, window: int, num_new: int, k_BKSd: Tensor) -> Tensor:
    """Keep the last `window` of the tokens that each query may see; mask_B1TS as in `attend`."""
    num_keys = k_BKSd.shape[2]
    if mask_B1TS is None:
        return causal_mask(num_new, num_keys, k_BKSd.device).triu(num_keys - num_new - window + 1)
    seen_B1TS = mask_B1TS.cumsum(-1)  # by count, not by slot, so that a cache may leave empty slots between
    return mask_B1TS & (seen_B1TS > seen_B1TS[..., -1:] - window)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    """One pre-norm block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, cos_BTf: Tensor, sin_BTf: Tensor, cache: Cache | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_BTf, sin_BTf, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Transformer(nn.Module):
    """A causal language model (head "lm") or a critic / reward model (head "scalar", one number per token).

    Made with device="meta" it holds no memory and waits for weights (`load_state_dict(..., assign=True)`); otherwise
    it starts from `init_weights(seed)`. It never reads torch's global random state.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        head: Head,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ):
        super().__init__()
        assert head in ("lm", "scalar"), head
        self.config, self.head = config, head
        self._frequencies: dict[tuple, tuple[Tensor, float]] = {}  # not a buffer: .bfloat16() would round it
        with torch.device("meta"):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            if head == "scalar":
                self.score = nn.Linear(config.hidden_size, 1, bias=False)
            elif not config.tie_embeddings:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(dtype)
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int, *, std: float = 0.02, score_std: float = 0.0) -> None:
        """GPT-2's start: normal(0, std), what writes into the residual stream smaller by sqrt(2 * layers), norms 1,
        biases 0, the score head normal(0, score_std). The same seed gives the same weights on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
                continue
            if name.endswith(".bias"):
                weight.zero_()
                continue
            scale = std
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale = std / math.sqrt(2 * self.config.num_layers)
            elif name == "score.weight":
                scale = score_std
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)

    def forward(self, tokens_BT: Tensor, *, positions_BT: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """tokens_BT int64 (negative: padding, right of all real tokens) -> hidden_BTD after the final norm.

        positions_BT: int64, broadcast over B; None: 0, 1, 2, ... (a decode step must give them).
        Raises UserError where `dynamic` rope meets a cache beyond the trained length: its stored keys would be stale.
        """
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        x_BTD = self.embed_tokens(tokens_BT.clamp_min(0))
        frequencies_f, factor = self._rope(positions_BT, x_BTD.dtype, decoding=cache is not None)
        cos_BTf, sin_BTf = rope.cos_sin(positions_BT, frequencies_f, factor, x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_BTf, sin_BTf, cache)
        return self.norm(x_BTD)

    def logits(self, hidden_D: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V] of the next token."""
        assert self.head == "lm", self.head
        if self.config.tie_embeddings:
            return self.embed_tokens(hidden_D, unembed=True)
        return self.lm_head(hidden_D)

    def scalar(self, hidden_D: Tensor) -> Tensor:
        """hidden [..., D] -> one number per token [...]."""
        assert self.head == "scalar", self.head
        return self.score(hidden_D).squeeze(-1)

    def _rope(self, positions_BT: Tensor, dtype: torch.dtype, *, decoding: bool) -> tuple[Tensor, float]:
        """The frequencies on the right device and in the right precision, computed once."""
        length = 0
        if self.config.rope_type == "dynamic":
            trained = self.config.max_position_embeddings
            length = max(int(positions_BT.max()) + 1, trained)
            if decoding and length > trained:
                raise UserError(
                    f"a model with dynamic rope cannot generate past its trained length of {trained} tokens: every "
                    "further token changes the frequencies of the keys already stored; shorten prompt + response"
                )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        key = (positions_BT.device, wide, length)
        if key not in self._frequencies:
            frequencies_f, factor = rope.frequencies(self.config, length=length, dtype=wide)
            self._frequencies[key] = frequencies_f.to(positions_BT.device), factor
        return self._frequencies[key]

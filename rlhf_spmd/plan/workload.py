"""What has to be computed in one iteration: the workflow, the shapes of its models and the sizes of its batches."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, exp, fsum, prod
from statistics import NormalDist

from rlhf_spmd.plan.adapters import NUMBER_BYTES, Adapters
from rlhf_spmd.plan.calls import Call, Compute, Generate, Workflow, is_current
from rlhf_spmd.plan.cluster import Cluster
from rlhf_spmd.plan.layout import exact_div
from rlhf_spmd.plan.norms import num_norms
from rlhf_spmd.plan.shard import split

HOST_BYTES = 16 * 2**20  # between GPUs: larger messages of rows go from device to device
WORD_BYTES = 4
LARGE_MATRIX = 2**16  # weights; products of smaller ones are bound by their launches
P95 = NormalDist().inv_cdf(0.95)
ROUNDED = 1e-9
MOST_P95 = exp(P95**2 / 2)  # 95th percentile of a lognormal / its mean, at most: 3.868


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama-family model, from which seconds and bytes follow.

    num_experts, experts_per_token, expert_size, num_dense_layers: of a mixture of experts, whose first layers are
        dense.
    adapters: those that train on its frozen weights; None: all weights train, or none.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    scalar_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_of_all: bool = False
    norms: str = "before"
    layer_norm: bool = False
    plain_mlp: bool = False
    num_positions: int = 0
    adapters: Adapters | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    num_dense_layers: int = 0

    def slice_sizes(self, tp: int, index: int) -> tuple[int, int, int]:
        """Returns attention heads, key-value heads and intermediate size of the MLP in slice `index` of tp. The last
        slice is the largest."""
        kv_heads = len(split(self.num_kv_heads, tp, index))
        heads = kv_heads * (self.num_heads // self.num_kv_heads)
        return heads, kv_heads, len(split(self.intermediate_size, tp, index))

    def most_tp(self, most: int) -> int:
        """Returns the largest tp of at most so many slices that this model allows: slices have whole experts."""
        return next(tp for tp in range(most, 0, -1) if self.num_experts % tp == 0)

    def sparse_in(self, layers: range) -> int:
        """Returns how many of these layers have experts."""
        return len(range(max(layers.start, self.num_dense_layers), layers.stop)) if self.num_experts else 0

    def experts_hit(self, rows: float) -> float:
        """Returns how many experts of a layer so many rows are expected to hit, if each chooses evenly."""
        missed: float = (1 - self.experts_per_token / self.num_experts) ** rows
        return self.num_experts * (1 - missed)

    @property
    def mlp_matrices(self) -> int:
        """The matrices of an MLP without experts: gate, up and down, or without a gate."""
        return 3 - self.plain_mlp

    @property
    def has_large_matrices(self) -> bool:
        """Whether products of a layer take long enough that the library that computes them matters."""
        inner = self.expert_size if self.num_experts and not self.num_dense_layers else self.intermediate_size
        return self.hidden_size * max(inner, self.num_heads * self.head_dim) >= LARGE_MATRIX

    @property
    def num_params(self) -> int:
        """Parameters, counted exactly as model/transformer.py makes them (a unit test compares)."""
        return self._num_params(self.num_experts)

    @property
    def num_active_params(self) -> int:
        """Parameters that a token is multiplied with or looked up in: of a mixture only those of the token's experts
        (A3B of Qwen3-30B-A3B)."""
        return self._num_params(self.experts_per_token)

    def _num_params(self, experts: int) -> int:
        h, d = self.hidden_size, self.head_dim
        q, kv = self.num_heads * d, self.num_kv_heads * d
        attention = h * q + 2 * h * kv + q * h + self.qkv_bias * (q + 2 * kv) + self.output_bias * h
        normed = 0 if not self.qk_norm else q + kv if self.qk_norm_of_all else 2 * d
        mlp = self.mlp_matrices * h * self.intermediate_size
        mlp += self.mlp_bias * ((self.mlp_matrices - 1) * self.intermediate_size + h)
        norm = (1 + self.layer_norm) * h
        mixture = h * self.num_experts + experts * 3 * h * self.expert_size
        layers = self.num_layers * (attention + num_norms(self.norms) * norm + normed)
        layers += (self.num_layers - self.num_sparse_layers) * mlp + self.num_sparse_layers * mixture
        head = h if self.scalar_head else 0 if self.tied else self.vocab_size * h
        return (self.vocab_size + self.num_positions) * h + layers + norm + head

    @property
    def num_sparse_layers(self) -> int:
        """Layers whose MLPs have experts."""
        return self.sparse_in(range(self.num_layers))


def _llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> ModelShape:
    return ModelShape(layers, hidden, intermediate, heads, kv_heads, hidden // heads, 32000)


def _qwen(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int = 152064, *, tied: bool = False
) -> ModelShape:
    sizes = (layers, hidden, intermediate, heads, kv_heads, hidden // heads, vocab)
    return ModelShape(*sizes, tied=tied, qkv_bias=True)


SHAPES = {  # Llama 1 and 2 (arXiv 2302.13971, 2307.09288); Qwen2.5 (arXiv 2412.15115, and config.json of each model)
    "llama-15m": _llama(6, 288, 768, 6, 6),  # of llama2.c, for runs on CPUs with random weights
    "llama-7b": _llama(32, 4096, 11008, 32, 32),
    "llama-13b": _llama(40, 5120, 13824, 40, 40),
    "llama-33b": _llama(60, 6656, 17920, 52, 52),
    "llama-65b": _llama(80, 8192, 22016, 64, 64),
    "llama-70b": _llama(80, 8192, 28672, 64, 8),
    "qwen2.5-0.5b": _qwen(24, 896, 4864, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _qwen(28, 1536, 8960, 12, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen(28, 3584, 18944, 28, 4),
    "qwen2.5-14b": _qwen(48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _qwen(64, 5120, 27648, 40, 8),
}


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """How long responses are forecast to be: lognormal with a mean and the standard deviation of the logarithm, cut at
    the limit; or, with `rows`, as long as some responses were.

    prompts: tokens of the prompts of these; empty: all have the most.
    """

    mean: float
    sigma: float = 0.0
    rows: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()

    @property
    def differ(self) -> bool:
        """Whether there may be two lengths; if not, forecasts are those of that number of tokens, to the bit."""
        return self.sigma > 0 or bool(self.rows)

    @classmethod
    def of(cls, rows: Iterable[int], prompts: Iterable[int] = ()) -> "ResponseLengths":
        """Forecasts lengths as those of these responses, to these prompts."""
        rows = tuple(rows)
        return cls(fsum(rows) / len(rows), rows=rows, prompts=tuple(prompts))


@dataclass(frozen=True, slots=True)
class Answers:
    """What episodes are forecast to be answered.

    turns: of an episode.
    tokens: of all answers of an episode, which are a part of its response.
    mean_s, p95_s: mean and 95th percentile of the seconds between two turns, which are lognormal.
    """

    turns: float
    tokens: float
    mean_s: float
    p95_s: float

    @property
    def problem(self) -> str:
        """What is wrong if there is no lognormal with this mean and 95th percentile; empty if there is one."""
        if (1 - ROUNDED) * self.mean_s <= self.p95_s <= (MOST_P95 + ROUNDED) * self.mean_s:
            return ""
        return (
            f"no lognormal has a mean of {self.mean_s:g} s and a 95th percentile of {self.p95_s:g} s, which is between "
            f"the mean and 3.868 means ({3.868 * self.mean_s:g} s)"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes of one iteration, the same under every placement.

    models: shape per model name; None for a model that is a Python function (a reward function) and has no weights.
    rollout_batch: prompts per iteration.
    samples_per_prompt: sequences of each; episode_rows neighbouring ones are one episode.
    mini_batch: sequences per optimizer step; both global.
    micro_batch: sequences per forward on one data-parallel shard.
    max_prompt, max_response: tokens.
    param_bytes: bytes per weight while computing (2 for bfloat16, 4 for float32).
    """

    workflow: Workflow
    models: Mapping[str, ModelShape | None]
    rollout_batch: int
    samples_per_prompt: int
    mini_batch: int
    micro_batch: int
    epochs: int
    max_prompt: int
    max_response: int
    param_bytes: int
    max_kept: int = 0  # tokens in the largest sampling support, if sampling is restricted
    host_bytes: int = field(default=HOST_BYTES, repr=False)  # of a message of rows; larger ones go by NCCL
    max_sequences: int = 256  # decoded at the same time by one copy of a model
    forecast_lengths: ResponseLengths | None = field(default=None, repr=False)  # None: all have max_response tokens
    bases: Mapping[str, str] = field(default_factory=dict)
    adds_adapters: bool = False  # whether models with adapters generate with copies of their weights that have them
    answers: Answers | None = field(default=None, repr=False)  # forecast ones; None: responses have one turn
    sums_each_pass: bool = True  # ZeRO 2 sums the gradients of each micro-batch over ranks, instead of a step's
    may_chain: bool = True  # whether some iteration ends with nothing that needs all ranks, such as a checkpoint
    counted: frozenset[str] = frozenset()  # train calls of mixtures that begin a step with passes that count experts
    state_sums: tuple[str, ...] = ()  # of computes, from which the state of the next iteration follows
    failed_groups: float = field(default=0.5, repr=False)  # forecast share of the groups that are drawn again
    partial_steps: int = 0  # tokens of a response in an iteration (proof/token_lags.py), below max_response; 0: all
    episode_rows: int = 1

    @property
    def num_sequences(self) -> int:
        """Sequences per iteration."""
        return self.rollout_batch * self.samples_per_prompt

    @property
    def group_size(self) -> int:
        """Rows that are neighbours in the matrix: the samples of a prompt if a compute has scope "group", else the rows
        of an episode."""
        is_whole = any(call.scope == "group" for call in self.workflow.computes)
        return self.samples_per_prompt if is_whole else self.episode_rows

    @property
    def rounds(self) -> int:
        """How often rows are sampled, at most (program/rounds.py)."""
        return max((call.rounds for call in self.workflow.computes), default=1)

    @property
    def num_parts(self) -> int:
        """In how many iterations a response is sampled, at most."""
        return ceil(self.max_response / self.partial_steps) if self.partial_steps else 1

    @property
    def may_be_blank(self) -> tuple[str, ...]:
        """Keys of responses that have no token in an iteration where they go on in the next one."""
        return tuple(call.outputs[0] for call in self.workflow.generate_calls if self.partial_steps)

    @property
    def num_mini_batches(self) -> int:
        return exact_div(self.num_sequences, self.mini_batch, "rollout_batch * samples_per_prompt by mini_batch")

    @property
    def row_lengths(self) -> tuple[int, int]:
        """The forecast tokens of a row's prompt and response, the mean of a distribution."""
        if self.forecast_lengths is None:
            return self.max_prompt, self.max_response
        prompts = self.forecast_lengths.prompts or (self.max_prompt,)
        return max(1, round(sum(prompts) / len(prompts))), max(1, round(self.forecast_lengths.mean))

    def num_distinct_prompts(self, columns: range) -> float:
        """Returns the number of distinct prompts of these columns in an iteration. If samples of a prompt are spread
        over the batch, this is the expectation over random orders."""
        samples, num_rows = self.samples_per_prompt, self.num_mini_batches * len(columns)
        if self.group_size < samples:
            absent = prod(max(0.0, 1 - num_rows / (self.num_sequences - i)) for i in range(samples))
            return self.rollout_batch * (1 - absent)
        starts = range(0, self.num_sequences if columns else 0, self.mini_batch)
        parts = (range((at + columns[0]) // samples, (at + columns[-1]) // samples + 1) for at in starts)
        return len(set().union(*parts))

    def generated_rows(self, columns: range) -> list[tuple[int, int]]:
        """Returns the tokens of prompt and response of each row of these columns, in the order in which an engine
        begins them. The engine computes equal prompts once, so only the first row of a prompt has its tokens."""
        (prompt, response), num_rows = self.row_lengths, self.num_mini_batches * len(columns)
        different = self.num_distinct_prompts(columns)
        begun = [ceil(row * different / num_rows - ROUNDED) for row in range(num_rows + 1)]
        return [(prompt * (after > before), response) for before, after in pairwise(begun)]

    def row_shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of one row of a data key; () for a single number."""
        if self.workflow.shapes[key] == "routes":
            maker = self.workflow.producer(key)
            assert isinstance(maker, Generate), key
            tokens, shape = self.max_prompt + self.max_response - 1, self.shape(maker.model)
            words = -(-tokens // WORD_BYTES)  # a row is sent in whole words
            return WORD_BYTES * words, shape.num_sparse_layers, shape.experts_per_token
        shapes = {"prompt": (self.max_prompt,), "token+1": (self.max_response + 1,), "row": ()}
        shapes["kept"] = (self.max_response, self.max_kept)
        return shapes.get(self.workflow.shapes[key], (self.max_response,))

    def row_bytes(self, key: str) -> int:
        """Returns bytes of one row of a data key on the wire: int32 or float32, but for routes."""
        return prod(self.row_shape(key)) * (1 if self.workflow.shapes[key] == "routes" else WORD_BYTES)

    def needs_batch(self, call: Call) -> bool:
        """Returns whether a call needs all rows of the iteration: no mini-batch holds the scope of a compute, or it
        infers with the weights with which training begins."""
        if not isinstance(call, Compute):
            return is_current(call)
        return call.sums or call.rounds > 1 or call.scope == "batch" or self._splits_groups(call)

    def _splits_groups(self, call: Compute) -> bool:
        """Returns whether a call reads groups that begin in one mini-batch and end in the next."""
        return call.scope == "group" and self.mini_batch % self.samples_per_prompt > 0

    def columns_seen(self, call: Call, columns: range) -> range:
        """Returns the columns that a call must see to make some columns: more than these if its scope is larger than a
        row. The samples of a prompt are neighbours."""
        if not isinstance(call, Compute) or call.scope == "row" or not columns:
            return columns
        if call.scope != "group" or self._splits_groups(call):
            return range(self.mini_batch)
        group = self.samples_per_prompt
        return range(columns.start // group * group, -(-columns.stop // group) * group)

    def largest_tp(self, cluster: Cluster, *, pp: int = 1) -> int:
        """Returns the largest tp that the key-value heads of every model, every node, and all ranks with pp stages
        allow."""
        num_ranks = cluster.num_devices
        shapes = [shape for shape in self.models.values() if shape]
        heads = min((shape.num_kv_heads for shape in shapes), default=1)
        devices = min(node.num_devices for node in cluster.nodes)
        sizes = [tp for tp in range(1, min(heads, devices) + 1) if num_ranks % (tp * pp) == 0 and devices % tp == 0]
        sizes = [tp for tp in sizes if all(shape.most_tp(tp) == tp for shape in shapes)]
        return max(sizes, default=1)

    def shape(self, model: str) -> ModelShape:
        """Returns the shape of a model that has weights."""
        shape = self.models[model]
        assert shape is not None, f"{model} has no weights"
        return shape

    def trained_number_bytes(self, model: str) -> int:
        """Returns bytes of a number that training changes: of a weight in the compute precision, or of an adapter."""
        shape = self.models[model]
        return NUMBER_BYTES if shape is not None and shape.adapters is not None else self.param_bytes

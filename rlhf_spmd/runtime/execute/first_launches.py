"""Launches the kernels of a rank's calls before the first iteration, on models of one layer of each kind.

A GPU loads a kernel when it is first launched, and Triton compiles it then; both may wait for all that the device is
doing. In an iteration that may be a receive whose sender needs this rank. A model of one or two layers with the sizes
of this rank's slice launches the same kernels, needs no other rank, and leaves weights, gradients and random numbers
alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlhf_spmd.kernels.decode_attention import choose_parts, decode_attention_triton, processors
from rlhf_spmd.kernels.known_tokens import KnownTokens
from rlhf_spmd.kernels.token_logprobs import kinds_of_widths
from rlhf_spmd.model.parallel import extent, layers_of, vocabulary_of
from rlhf_spmd.model.sequences import Sequences, forward, response_logprobs, response_values, sequence_scores
from rlhf_spmd.model.transformer import Transformer
from rlhf_spmd.plan.calls import Generate, Infer, Measure, Train
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.generation.cuda_graphs import graph_size
from rlhf_spmd.runtime.generation.kv_cache import GPU_BLOCK
from rlhf_spmd.runtime.generation.rollout import generate_rows


def launch_kernels(job: Job) -> None:
    """Launches the kernels of each call of this rank with a pass of two tokens: forward, readout and, if it trains,
    backward; or two sampled tokens, and attention in as many parts as any batch has. Local."""
    for call in job.workload.workflow.placed_calls:
        if job.world.rank in job.layout(call).ranks and job.workload.models[call.model] is not None:
            model = job.models.model(call)
            width = known_width(job, model)
            if isinstance(call, Generate):
                small = one_layer_of_each_kind(model, width)
                _draw(job, call, small)
                if job.world.device.type == "cuda":
                    attend_in_parts(job, small, windows_of(model))
            else:
                for columns in kinds_of_widths(width) if model.head == "lm" else [width]:
                    _read(job, call, one_layer_of_each_kind(model, columns))


def known_width(job: Job, model: Transformer) -> int:
    """Returns the columns of the logits that this rank computes with a model; of a slice without known tokens, all."""
    ids = vocabulary_of(model.config, replace(model.parallel.shard, stage=0, pp=1))
    return job.known.width(ids) or len(ids)


def windows_of(model: Transformer) -> list[int | None]:
    """Returns the windows that layers of this stage attend to, each once: the kinds of its layers."""
    layers = layers_of(model.config, model.parallel.shard)
    return list(dict.fromkeys(model.config.window(layer) for layer in layers))


def attend_in_parts(job: Job, model: Transformer, windows: Sequence[int | None]) -> None:
    """Runs attention of one token in as many parts as batches of any number of rows have: the number of parts is a
    constant of the kernel.

    model: of a few layers.
    windows: those of the whole model.
    """
    config, device, dtype = model.config, job.world.device, model.dtype
    block_size = job.config.generation.block_size or GPU_BLOCK
    query_1Hd = torch.zeros(1, config.num_heads, config.head_dim, dtype=dtype, device=device)
    cache_1Ksd = torch.zeros(1, config.num_kv_heads, block_size, config.head_dim, dtype=dtype, device=device)
    table_11 = torch.zeros(1, 1, dtype=torch.int32, device=device)
    length_1 = torch.ones(1, dtype=torch.int64, device=device)
    for window in windows:
        for num_parts in parts_of_batches(job, config.num_kv_heads, window, processors(device)):
            options = {"window": window, "cap": config.attention_cap, "num_parts": num_parts}
            decode_attention_triton(query_1Hd, cache_1Ksd, cache_1Ksd, table_11, length_1, **options)


def parts_of_batches(job: Job, num_kv_heads: int, window: int | None, num_processors: int) -> list[int]:
    """Returns the numbers of parts that a row's attention has in batches of one row up to the most."""
    generation, workload = job.config.generation, job.workload
    block_size = generation.block_size or GPU_BLOCK
    longest = -(-(workload.max_prompt + workload.max_response) // block_size) * block_size
    longest = min(longest, window or longest)
    sizes = range(1, graph_size(generation.max_sequences) + 1)
    return sorted({choose_parts(num_rows * num_kv_heads, longest, num_processors) for num_rows in sizes})


def one_layer_of_each_kind(model: Transformer, vocab_size: int | None = None) -> Transformer:
    """Makes a whole model, all zeros, with the sizes of this rank's slice of a model. It has a layer with full
    attention, one with a sliding window, or both, as this rank's stage. The window is one token, because a window that
    is at least as long as a pass makes no difference to it, not even another kernel.

    vocab_size: others.
    """
    config, shard, device = model.config, model.parallel.shard, next(model.parameters()).device
    slice_ = replace(shard, stage=0, pp=1)
    heads, kv_heads = (len(extent(config, what, slice_)) // config.head_dim for what in ("queries", "keys"))
    if config.hidden_size % heads:  # an uneven slice, which some families do not allow as a whole model
        heads, kv_heads = config.num_heads, config.num_kv_heads
    windows = windows_of(model)
    slides = any(window is not None for window in windows)
    sizes: dict[str, Any] = {
        "num_layers": len(windows),
        "sliding_layers": (len(windows) - 1,) if slides else (),
        "sliding_window": 1 if slides else config.sliding_window,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": len(extent(config, "intermediate", slice_)),
        "vocab_size": vocab_size or len(vocabulary_of(config, slice_)),
        "tie_embeddings": True,  # half the memory
    }
    options: dict[str, Any] = {"dtype": model.dtype, "device": "meta", "adapters": model.adapters}
    made = Transformer(replace(config, **sizes), head=model.head, **options)
    made.take({name: torch.zeros(one.shape, dtype=one.dtype, device=device) for name, one in made.named_parameters()})
    made.recompute = model.recompute
    return made


def _read(job: Job, call: Infer | Train | Measure, model: Transformer) -> None:
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=job.world.device)
    batch = Sequences.join(token_11, token_11)
    trains = isinstance(call, Train)
    for name, weight in model.train(trains).named_parameters():  # a norm with a frozen weight has a kernel of its own
        weight.requires_grad_(trains and name in model.trained_names())
    with torch.set_grad_enabled(trains):
        output_nD = forward(model, batch)
        if model.head == "scalar":
            made = response_values(model, batch, output_nD), sequence_scores(model, batch, output_nD)
        else:
            entropy = not isinstance(call, Infer) and call.entropy
            support_11K = token_11[..., None].expand(1, 1, job.workload.max_kept).int() if call.kept else None
            sampling = job.sampling | _vocabulary(model)
            found = response_logprobs(model, batch, output_nD, support_11K, entropy=entropy, **sampling)
            made = found if isinstance(found, tuple) else (found,)
        if trains:
            sum(one.sum() for one in made).backward()


def _draw(job: Job, call: Generate, model: Transformer) -> None:
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=job.world.device)
    own = {} if call.temperature is None else {"temperature": call.temperature}
    drawing = job.drawing | own | _vocabulary(model) | {"stop": (), "block_size": job.config.generation.block_size}
    with torch.no_grad():
        generate_rows(model.eval().requires_grad_(False), token_11, token_11.expand(1, 2), **drawing)


def _vocabulary(model: Transformer) -> dict[str, Any]:
    """Returns options that name tokens, in the vocabulary of a slice."""
    return {"eos_ids": (), "known": KnownTokens(model.config.vocab_size)}

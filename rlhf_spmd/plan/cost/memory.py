"""Bytes that a rank needs: what it holds throughout an iteration, and the most that a call needs in addition.

Mixed precision as the files of runtime/engines/ lay it out (ZeRO, arXiv 1910.02054, section 3): with p
parameters in a rank's shard and c bytes per weight in the compute precision, a trained model holds c*p weights, two
AdamW moments in float32, and, if c < 4, float32 master weights; during a step float32 gradients. Stage 2 has those of
its part, of a weight before they are sent, and of buckets under way, or whole ones if it adds up several micro-batches.
Stage 3 is DeepSpeed's (measured with 0.19.8, tests/mpi/test_allocations.py): it has float32 masters in any precision,
and always gradients of its part and the buffer in which it reduces them.

With `offload`, moments and master weights are in host memory; during an update parts of them are on the device.

A model with adapters holds c*p weights of its base, which models may have in common, and for each of its a numbers of
adapters 4 bytes of itself and of each moment, and of its gradient during a step. If it generates with copies of its
weights that have the adapters in them, these are there during the call.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from rlhf_spmd.plan.adapters import WITH_ONE_INPUT, B
from rlhf_spmd.plan.calls import Generate, ModelCall, Train, trains
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.norms import num_norms
from rlhf_spmd.plan.placement import leaves_device, ranks_of, weights_layout
from rlhf_spmd.plan.program.instructions import BUCKET_BYTES, Load, Offload, Program, Run, keys_made, keys_read, merged
from rlhf_spmd.plan.program.pipeline import largest_number, pass_bytes
from rlhf_spmd.plan.program.tensors import frozen_weights_of, numbers_in, trained_weights_of, weights_of
from rlhf_spmd.plan.runtime_words import ROUTES
from rlhf_spmd.plan.shard import Shard, split
from rlhf_spmd.plan.workload import ModelShape, Workload

STATIC = ("weights", "kept gradients", "optimizer", "offloaded")
GENERATING = ("KV cache", "copies with adapters")
WORKING = ("gathered", "buckets", "gradients", "activations", *GENERATING, "beside training", "rows")
REDUCE_NUMEL = 50_000_000  # numbers in DeepSpeed's communication buffers, if no weight is larger
BUCKET_NUMEL = 1 << 24  # numbers that the own engine sends at a time: enough for bandwidth, little to wait in memory
CHUNK_BYTES, MOST_CHUNKS = 32 * 2**20, 24  # as in kernels/token_logprobs.py
LIVE_NUMEL = 10**9  # weights that DeepSpeed's stage 3 keeps gathered while it trains (its default)


@lru_cache(maxsize=65536)
def num_params(shape: ModelShape, shard: Shard) -> int:
    """Returns parameters of one shard of a model, without adapters."""
    return sum(numbers_in(box) for weight in weights_of(shape) if (box := weight.box(shard)))


@lru_cache(maxsize=65536)
def num_trained(shape: ModelShape, shard: Shard) -> int:
    """Returns numbers of one shard of a model that training changes: all parameters, or adapters."""
    return sum(numbers_in(box) for weight in trained_weights_of(shape) if (box := weight.box(shard)))


@lru_cache(maxsize=65536)
def num_frozen(shape: ModelShape, shard: Shard) -> int:
    """Returns parameters of one shard of a model that training with adapters leaves as they are."""
    return sum(numbers_in(box) for weight in frozen_weights_of(shape) if (box := weight.box(shard)))


@lru_cache(maxsize=65536)
def base_sizes(shape: ModelShape, shard: Shard) -> tuple[tuple[str, int], ...]:
    """Returns the weights of one shard of a model that its base may have in common with others: name, numbers. A frozen
    model without adapters has its head of one number per token there, too."""
    table = weights_of(shape) if shape.adapters is None else frozen_weights_of(shape)
    return tuple((weight.name, numbers_in(box)) for weight in table if (box := weight.box(shard)))


def reduce_numel(workload: Workload, model: str, layout: Layout, shard: Shard) -> int:
    """Returns float32 numbers that a rank needs beside its part of the gradients of a shard: what DeepSpeed reduces at
    a time under ZeRO 3; under ZeRO 2 buckets that are sent and received while the next ones are, and whole gradients
    or those of the largest weight."""
    params, largest = num_params(workload.shape(model), shard), _largest(workload.shape(model), shard)
    if layout.zero != 2:
        return max(largest, min(params, REDUCE_NUMEL))
    call = workload.workflow.train_call(model)
    is_whole = call is not None and not workload.sums_each_pass and largest_number(layout, workload, call) > 1
    return (params if is_whole else -(-workload.param_bytes * largest // 4)) + 4 * min(params, BUCKET_NUMEL)


@lru_cache(maxsize=65536)
def _largest(shape: ModelShape, shard: Shard) -> int:
    """Returns numbers of the largest weight of a shard."""
    return max(numbers_in(((0, 1), *box[1:])) for weight in weights_of(shape) if (box := weight.box(shard)))


def state_bytes(number_bytes: int) -> int:
    """Returns bytes of the optimizer's states of a weight: two moments, and a float32 master of a narrower one."""
    return 8 if number_bytes >= 4 else 12


def zero_bytes(layout: Layout, params: int, numel: int, number_bytes: int, *, trains: bool) -> dict[str, int]:
    """Returns the bytes of a rank that depend on the ZeRO stage of a layout: permanent ("weights", "kept
    gradients", "optimizer") and needed during a call ("gathered", "gradients").

    params: of the rank's shard.
    numel: its `reduce_numel`.
    trains: whether the call trains the model.
    """
    zero, part = layout.zero if layout.dp > 1 else 0, -(-params // layout.dp)
    weights = number_bytes * (part if zero == 3 else params)
    if not trains:
        return {"weights": weights}
    in_step = {2: part + numel, 3: 0}.get(zero, params)  # gradients
    states = 12 if zero == 3 else state_bytes(number_bytes)
    return {
        "weights": weights,
        "kept gradients": 4 * (part + numel) if zero == 3 else 0,
        "optimizer": states * (part if zero else params),
        "gathered": number_bytes * min(params, LIVE_NUMEL) if zero == 3 else 0,
        "gradients": 4 * in_step + (2 * states * min(params, BUCKET_NUMEL) // layout.dp if layout.offload else 0),
    }


def static_bytes(program: Program, rank: int) -> dict[str, int]:
    """Returns bytes that a rank holds all the time, by kind; "offloaded" is host memory. A shard of weights that
    several models have in common counts once."""
    total = dict.fromkeys(STATIC, 0)
    workload, layouts = program.workload, program.placement.layouts
    held: set[tuple[str, Shard, str]] = set()  # weights of bases, each of which has one copy of a shard

    def base_bytes(model: str, shard: Shard) -> int:
        """Returns bytes of the frozen weights of a model that are not there yet."""
        sizes = {(workload.bases[model], shard, name): size for name, size in base_sizes(workload.shape(model), shard)}
        numbers = sum(size for key, size in sizes.items() if key not in held)
        held.update(sizes)
        return workload.param_bytes * numbers

    for model in program.trained(rank):
        (training,) = (layouts[call.name] for call in workload.workflow.train_calls if call.model == model)
        stays = _zero_bytes(workload, model, training, training.shard(rank), trains=True)
        for kind in ("weights", "kept gradients", "optimizer"):
            total["offloaded" if training.offload and kind == "optimizer" else kind] += stays[kind]
        if model in workload.bases:
            total["weights"] += base_bytes(model, training.shard(rank))
    for (model, shard), calls in program.copies(rank).items():
        if (shape := workload.models[model]) is None:
            continue
        layout = layouts[calls[0]]
        if model in workload.bases and not leaves_device(layout):
            adapters = 0 if shape.adapters is None else num_trained(shape, shard)
            total["weights"] += base_bytes(model, shard) + workload.trained_number_bytes(model) * adapters
        else:
            kind = "offloaded" if layout.offload else "weights"
            total[kind] += _zero_bytes(workload, model, layout, shard, trains=False)["weights"]
    return total


def offloaded_bytes(program: Program, node: int) -> int:
    """Returns bytes that the ranks of a node keep in host memory, which is pinned where they have GPUs."""
    of_node = [rank for rank in program.cluster.ranks if program.cluster.node_of(rank) == node]
    return sum(static_bytes(program, rank)["offloaded"] for rank in of_node)


def call_bytes(program: Program, call: ModelCall, rank: int) -> dict[str, int]:
    """Returns bytes that a call needs on a rank beside `static_bytes`, by kind: what ZeRO 3 gathers or what comes from
    host memory, gradients and activations of training, keys and values of generation, and weights with adapters in
    them. Empty if the call does not run there."""
    workload, layout = program.workload, program.placement.layouts[call.name]
    if rank not in layout.ranks or workload.models[call.model] is None:
        return {}
    if isinstance(call, Train):
        of_zero = _zero_bytes(workload, call.model, layout, layout.shard(rank), trains=True)
        taken = {kind: of_zero[kind] for kind in WORKING if kind in of_zero}
        return taken | {"activations": activation_bytes(workload, call, layout, rank)}
    kept = weights_layout(call, rank, workload, program.placement)
    taken = {"gathered": 0}
    if layout.offload:
        taken["gathered"] = _zero_bytes(workload, call.model, layout, layout.shard(rank), trains=False)["weights"]
    elif kept.zero == 3 and kept.dp > 1:
        taken["gathered"] = gathered_bytes(workload, call, layout, rank)
    if isinstance(call, Generate):
        taken["KV cache"] = cache_bytes(workload, call, layout, rank)
        taken["copies with adapters"] = copied_bytes(workload, call, layout, rank)
    return taken


def copied_bytes(workload: Workload, call: ModelCall, layout: Layout, rank: int) -> int:
    """Returns bytes of the copies of weights with adapters in them with which a rank generates (model/linear.py:
    sum_bytes)."""
    shape, shard = workload.shape(call.model), layout.shard(rank)
    if shape.adapters is None or not workload.adds_adapters:
        return 0
    table = [weight for weight in weights_of(shape) if shape.adapters.copies(weight.name.removesuffix(".weight"))]
    return workload.param_bytes * sum(numbers_in(box) for weight in table if (box := weight.box(shard)))


def gathered_bytes(workload: Workload, call: ModelCall, layout: Layout, rank: int) -> int:
    """Returns the most bytes that a rank gathers at a time for a call that does not train, with weights that ZeRO 3
    shards: for generation all of its shard. Inference runs each layer on all rows before the next one
    (model/sequences.forward_by_layer), so it holds one layer, the other weights (embedding, final norm, head),
    and the hidden states of all rows between two layers."""
    shape, shard, c = workload.shape(call.model), layout.shard(rank), workload.param_bytes
    params = num_params(shape, shard)
    if isinstance(call, Generate):
        return c * params
    besides = num_params(replace(shape, num_layers=0), shard)
    rows = len(layout.columns(rank, workload.mini_batch)) * workload.num_mini_batches
    tokens = rows * (workload.max_prompt + workload.max_response) * call.num_sequences
    states = tokens * shape.hidden_size // layout.tp
    return c * (besides + (params - besides) // shape.num_layers + states)


def working_bytes(program: Program, rank: int) -> dict[str, int]:
    """Returns the most bytes of each kind that a rank needs at one time for calls (weights from host memory count as
    gathered), for buckets of weights in transit, and for the rows of an iteration."""
    total = dict.fromkeys(WORKING, 0)
    for transfer in program.transfers:
        if transfer.reallocation is not None and rank in transfer.ranks:
            total["buckets"] += transfer.reallocation.extra_bytes(BUCKET_BYTES).get(rank, 0)
    for call in program.workload.workflow.placed_calls:
        for kind, num_bytes in call_bytes(program, call, rank).items():
            total[kind] = max(total[kind], num_bytes)
    total["gathered"] = max(total["gathered"], loaded_bytes(program, rank))
    total["KV cache"] = most_alive_bytes(program, rank, cache_bytes)
    if program.workload.adds_adapters:
        total["copies with adapters"] = most_alive_bytes(program, rank, copied_bytes)
    if trains_beside_cache(program, rank):
        total["beside training"] = sum(total[kind] for kind in GENERATING)
    total["rows"] = rows_bytes(program, rank)
    return total


def rows_bytes(program: Program, rank: int) -> int:
    """Returns bytes of the data keys that a rank reads or makes, in its columns (runtime/execute/iteration.py: Store).
    One iteration ahead, a rank has two batches of samples: one that trains, and the next one."""
    workload, placement = program.workload, program.placement
    held: dict[str, set[range]] = {}
    for call in workload.workflow.calls:
        for layout in (placement.layouts[site] for site in placement.sites(call, workload.workflow)):
            columns = layout.columns(rank, workload.mini_batch) if rank in ranks_of(call, layout) else range(0)
            for keys, some in ((keys_read, workload.columns_seen(call, columns)), (keys_made, columns)):
                for key in keys(call, layout, rank) if columns else ():
                    held.setdefault(key, set()).add(some)
    total = 0
    for generate in workload.workflow.generate_calls:  # also where routes are recorded, and what goes on
        layout = placement.layouts[generate.name]
        rows = workload.num_mini_batches * len(layout.columns(rank, workload.mini_batch)) if rank in layout.ranks else 0
        twice = [key for key in generate.outputs if workload.partial_steps or key.endswith(ROUTES)]
        total += sum(rows * workload.row_bytes(key) for key in twice)
    for key, ranges in held.items():
        rows = workload.num_mini_batches * sum(map(len, merged(ranges)))
        total += rows * workload.row_bytes(key) * batches_of(placement.ahead, workload, key)
    return total


def most_rows_bytes(workload: Workload, ahead: int) -> int:
    """Returns bytes of the rows of a rank that holds all columns of all keys. ahead: of the placement."""
    keys = workload.workflow.shapes
    return sum(workload.num_sequences * workload.row_bytes(key) * batches_of(ahead, workload, key) for key in keys)


def batches_of(ahead: int, workload: Workload, key: str) -> int:
    """Returns how many batches of a data key a rank holds at one time. ahead: of the placement."""
    maker = workload.workflow.producer(key)
    return 2 if ahead and not (maker is not None and trains(maker, workload.workflow)) else 1


def most_alive_bytes(program: Program, rank: int, of_call: Callable[[Workload, ModelCall, Layout, int], int]) -> int:
    """Returns the most bytes of KV caches, or of what lives as long, that a rank has at one time. of_call: of a
    call."""
    calls = {call.name: call for call in program.workload.workflow.generate_calls}
    layouts = program.placement.layouts
    sizes = {
        name: of_call(program.workload, call, layouts[name], rank)
        for name, call in calls.items()
        if rank in layouts[name].ranks and program.workload.models[call.model] is not None
    }
    if len(sizes) < 2:  # the program need not be read
        return sum(sizes.values())
    alive = caches_alive(program, rank)
    return max((sum(sizes[name] for name in together) for together in alive.values()), default=0)


def caches_alive(program: Program, rank: int) -> dict[str, list[str]]:
    """Returns, by generate call, the calls whose KV caches are alive on a rank when its own is made or later, itself
    included. A cache lives from the first to the last Run of its call, so two calls that alternate while streaming have
    both."""
    names = {call.name for call in program.workload.workflow.generate_calls}
    lives: dict[str, list[int]] = {}
    for position, step in enumerate(program.instructions[rank] if program.instructions else ()):
        if isinstance(step, Run) and step.call in names:
            lives.setdefault(step.call, []).append(position)
    return {
        call: [name for name, other in lives.items() if other[0] <= mine[-1] and mine[0] <= other[-1]]
        for call, mine in lives.items()
    }


def loaded_bytes(program: Program, rank: int) -> int:
    """Returns the most bytes of weights from host memory that a rank has at one time."""
    sizes: dict[str, int] = {}
    for call in program.workload.workflow.placed_calls:
        layout = program.placement.layouts[call.name]
        if layout.offload and rank in layout.ranks and not isinstance(call, Train):
            sizes[call.model] = call_bytes(program, call, rank)["gathered"]
    loaded: set[str] = set()
    most = 0
    for step in program.instructions[rank] if sizes and program.instructions else ():
        if isinstance(step, Load):
            loaded.add(step.model)
        elif isinstance(step, Offload):
            loaded.discard(step.model)
        most = max(most, sum(sizes[model] for model in loaded))
    return most


def trains_beside_cache(program: Program, rank: int) -> bool:
    """Returns whether a rank trains a model while a KV cache is alive there, which needs streaming."""
    generates = program.workload.workflow.generate_calls
    if not program.placement.streams(program.workload) or not any(
        rank in program.placement.layouts[call.name].ranks for call in generates
    ):
        return False
    workflow, steps = program.workload.workflow, program.instructions[rank] if program.instructions else ()
    kinds = [workflow.call(step.call).kind for step in steps if isinstance(step, Run)]
    places = [place for place, kind in enumerate(kinds) if kind == "generate"]
    return bool(places) and "train" in kinds[places[0] : places[-1]]


def _zero_bytes(workload: Workload, model: str, layout: Layout, shard: Shard, *, trains: bool) -> dict[str, int]:
    shape = workload.shape(model)
    if trains and shape.adapters is not None:  # without its base
        layout, numbers = replace(layout, zero=min(layout.zero, 1)), num_trained(shape, shard)
        return zero_bytes(layout, numbers, 0, workload.trained_number_bytes(model), trains=True)
    numel = reduce_numel(workload, model, layout, shard) if trains else 0
    return zero_bytes(layout, num_params(shape, shard), numel, workload.param_bytes, trains=trains)


def peak_bytes(static: dict[str, int], working: dict[str, int]) -> int:
    """Returns the most that a rank's device holds at one time: calls run one after another, transfers and rows beside
    them."""
    training = working["activations"] + working["gradients"] + working["beside training"]
    calls = working["gathered"] + max(training, sum(working[kind] for kind in GENERATING))
    return sum(static.values()) - static["offloaded"] + calls + working["buckets"] + working["rows"]


def most_bytes(program: Program) -> int:
    """Returns the largest peak of any rank, with the KV cache that its device has room for."""
    most = 0
    for rank in program.cluster.ranks:
        static, working = static_bytes(program, rank), working_bytes(program, rank)
        need, limit = peak_bytes(static, working), program.cluster.usable_bytes(rank)
        if limit is not None and need > limit:
            need = max(limit, least_bytes(program, rank))
        most = max(most, need)
    return most


def places_of(program: Program, call: Generate) -> dict[int, int]:
    """Returns how many sequences each rank of a generate call decodes at once: as many of full length as the device
    with the least room among those of its copy of the model has room for. Caches that are alive together get equal
    parts of the free memory, as the runtime gives them (handlers/generate.py: cache_share)."""
    layout = program.placement.layouts[call.name]
    of_rank = {rank: room(program, call, rank) for rank in layout.ranks}
    return {rank: min(of_rank[other] for other in layout.model_ranks(rank)) for rank in layout.ranks}


def room(program: Program, call: Generate, rank: int, resident: Program | None = None) -> int:
    """Returns how many sequences of a call have room on a rank beside all else, at least one.

    resident: as in `least_bytes`.
    """
    limit, workload = program.cluster.usable_bytes(rank), program.workload
    if limit is None or workload.models[call.model] is None:
        return workload.max_sequences
    static, working = static_bytes(resident or program, rank), working_bytes(program, rank)
    if peak_bytes(static, working) <= limit:
        return workload.max_sequences
    sleeping = () if working["beside training"] else ("activations", "gradients")
    free = limit - peak_bytes(static, working | dict.fromkeys(("KV cache", "beside training", *sleeping), 0))
    alive = len(caches_alive(program, rank).get(call.name, (call.name,)))  # without instructions, its own
    number = free // alive // sequence_bytes(workload, call, program.placement.layouts[call.name], rank)
    return max(1, min(workload.max_sequences, number))


def activation_bytes(workload: Workload, call: ModelCall, layout: Layout, rank: int) -> int:
    """Returns the most bytes of activations that training keeps for its backward passes on a rank.

    Recomputation keeps only the input of each layer and works on one layer at a time, else a layer keeps
    `layer_numbers`. The last stage also has the final norm's input, what the head reads, and `logits_bytes`.
    """
    shape, c = workload.shape(call.model), workload.param_bytes
    shard, h = layout.shard(rank), shape.hidden_size
    num_layers = len(shard.layers(shape.num_layers))
    longest = (workload.max_prompt + workload.max_response) * call.num_sequences
    tokens = (layout.micro_batch or workload.micro_batch) * longest
    if layout.tokens:  # a row is never cut, and there may be fewer rows than the budget has room for
        tokens = min(max(layout.tokens, longest), -(-workload.mini_batch // layout.dp) * longest)
    kept = [layer_numbers(shape, shard.tp, shard.tp_index)] * num_layers
    if sparse := shape.sparse_in(shard.layers(shape.num_layers)):
        kept[num_layers - sparse :] = [sparse_layer_numbers(shape, c, shard.tp, shard.tp_index)] * sparse
    passes = layout.pp - shard.stage  # micro-batches in the pipeline under 1F1B
    numbers = tokens * (num_layers * h / layout.tp if layout.recompute else sum(kept)) * passes
    numbers += tokens * max(kept) if layout.recompute else 0
    logits = 0
    if shard.is_last:
        responses = math.ceil(tokens * workload.max_response * call.num_sequences / longest)
        numbers += tokens * h / layout.tp + (tokens if shape.scalar_head else responses) * h
    if shard.is_last and not shape.scalar_head:
        logits = logits_bytes(responses, math.ceil(shape.vocab_size / layout.tp), h, c)
    passed = 2 * pass_bytes(layout, workload, call) if layout.pp > 1 else 0
    return int(numbers * c) + logits + passed


def layer_numbers(shape: ModelShape, tp: int, index: int) -> float:
    """Returns numbers in the compute precision that a forward pass of training keeps per token of a layer, in a slice.

    As Korthikanti et al. (arXiv 2205.05198, table 2) without dropout, with attention that stores no scores and SwiGLU:
    sequence parallelism splits everything by tp except the gathered inputs of a block. Counted are the operations of a
    GPU. On a CPU a norm whose weight trains keeps its rows before the product with it, too.
    """
    h, adapters = shape.hidden_size, shape.adapters
    heads, kv_heads, intermediate = shape.slice_sizes(tp, index)
    wide = (heads + kv_heads) * shape.head_dim
    # slices of the inputs of norms; q, k, v and the attention's output; inputs of norms of q and k; gate and up
    kept = num_norms(shape.norms) * h / tp + 2 * wide + shape.qk_norm * wide
    kept += (shape.mlp_matrices - 1) * intermediate
    if adapters is None:  # what down_proj reads, and what q, k, v and gate, up read: whole on each slice
        return kept + intermediate + 2 * h
    gathered = sum(h for some in WITH_ONE_INPUT if len(some) > 1 and any(map(adapters.has, some)))
    # the products with A; what layers read is computed again, unless it is no norm's or other slices have a part of it
    return kept + len(adapters.targets) * adapters.rank + (gathered if tp > 1 or shape.norms == "after" else 0)


def sparse_layer_numbers(shape: ModelShape, number_bytes: int, tp: int, index: int) -> float:
    """Returns what layer_numbers does, of a layer with experts that have equally many tokens: of each of a token's k
    experts its input, gate and up and their product, and what down_proj makes; of the router its input, if it is not in
    float32, and the probabilities, which are."""
    h, of_expert = shape.hidden_size, 2 * shape.hidden_size + 3 * shape.expert_size
    experts, wide = shape.experts_per_token * of_expert / tp, 4 / number_bytes
    attention = layer_numbers(replace(shape, intermediate_size=0), tp, index)
    return attention + experts + wide * (shape.num_experts + (h if wide > 1 else 0))


def chunk_columns(num_rows: int, vocab_size: int) -> int:
    """Returns the tokens of the vocabulary in one chunk of logits: the function of this name in
    kernels/token_logprobs.py (a test compares them), repeated because nothing here imports torch."""
    columns = max(CHUNK_BYTES // (4 * max(num_rows, 1)), -(-vocab_size // MOST_CHUNKS))
    return min(-(-columns // 128) * 128, vocab_size)


def logits_bytes(num_rows: int, vocab_size: int, hidden_size: int, number_bytes: int) -> int:
    """Returns the most bytes that the logprobs of so many response tokens need: logits and their gradients if one chunk
    holds them all, else one chunk and, in float32, the sum over chunks of the hidden states' gradients."""
    columns = chunk_columns(num_rows, vocab_size)
    if columns == vocab_size:
        return 2 * number_bytes * num_rows * vocab_size
    return num_rows * (number_bytes * columns + 4 * hidden_size)


def packed_bytes(program: Program, rank: int) -> int:
    """Returns the most bytes beside `working_bytes` of the packed copies of weights with which a rank generates on a
    CPU (model/linear.py: Copies)."""
    workload, layouts = program.workload, program.placement.layouts
    most = 0
    for call in [call for call in workload.workflow.generate_calls if rank in layouts[call.name].ranks]:
        shape, layout = workload.shape(call.model), layouts[call.name]
        num_bytes, shard = 0, layout.shard(rank)
        for weight in weights_of(shape):
            is_head = weight.name == ("embed_tokens.weight" if shape.tied else "lm_head.weight")
            is_packed = shard.is_last if is_head else weight.name.endswith("_proj.weight")
            if is_packed and (box := weight.box(shard)):
                num_bytes += workload.param_bytes * numbers_in(box)
        for factor in trained_weights_of(shape) if shape.adapters and not workload.adds_adapters else ():
            if box := factor.box(shard):  # q, k and v have their B in one matrix, with zeros
                num_bytes += workload.param_bytes * numbers_in(box) * (3 if factor.name.endswith(B) else 1)
        most = max(most, num_bytes - copied_bytes(workload, call, layout, rank))
    return most


def cache_bytes(workload: Workload, call: ModelCall, layout: Layout, rank: int) -> int:
    """Returns bytes of keys and values of the rows that a rank decodes at the same time, each of full length."""
    rows = len(layout.columns(rank, workload.mini_batch)) * workload.num_mini_batches
    return min(rows, workload.max_sequences) * sequence_bytes(workload, call, layout, rank)


def sequence_bytes(workload: Workload, call: ModelCall, layout: Layout, rank: int) -> int:
    """Returns bytes of keys and values of one sequence of full length, the least that generation needs."""
    shape, shard = workload.shape(call.model), layout.shard(rank)
    heads = len(split(shape.num_kv_heads, shard.tp, shard.tp_index))
    layers = len(shard.layers(shape.num_layers))
    tokens = workload.max_prompt + workload.max_response
    return 2 * tokens * layers * heads * shape.head_dim * workload.param_bytes


def least_bytes(program: Program, rank: int, resident: Program | None = None) -> int:
    """Returns the least bytes that a rank's device must hold: its peak with the smallest KV cache. resident: the
    program whose models are in memory all the time; None: this one."""
    least = most_alive_bytes(program, rank, sequence_bytes)
    static, working = static_bytes(resident or program, rank), working_bytes(program, rank)
    beside = least + working["copies with adapters"] if working["beside training"] else 0
    return peak_bytes(static, working | {"KV cache": least, "beside training": beside})

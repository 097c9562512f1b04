"""What is wrong with a placement before it is compiled: everything in one message, with calls, ranks and the fix."""

from collections.abc import Iterator, Sequence

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import Call, Infer, ModelCall, Train, Workflow, is_current, is_read_by_both, trains
from rlhf_spmd.plan.cluster import DEVICE_BYTES, Cluster
from rlhf_spmd.plan.layout import Layout, format_ranks
from rlhf_spmd.plan.placement import Placement, leaves_device, uses_trained_weights
from rlhf_spmd.plan.runtime_words import GENERATOR_LOGPROBS, LOGPROBS, START_LOGPROBS, routes_of
from rlhf_spmd.plan.shard import Shard
from rlhf_spmd.plan.workload import Workload

MOST_PARTS = 256  # iterations of a response (runtime/execute/response_hashes.py)


def validate(placement: Placement, workload: Workload, cluster: Cluster) -> None:
    """Raises one UserError that lists everything wrong with a placement."""
    workflow = workload.workflow
    names = [call.name for call in workflow.placed_calls]
    unknown = [name for name in placement.layouts if name not in names]
    problems = [f"{name} is not a call of this workflow; its calls are {', '.join(names)}" for name in unknown]
    of_layouts: dict[tuple[tuple[int, ...], str], list[str]] = {}  # ranks, what is wrong there -> calls
    for call in workflow.placed_calls:
        layout = placement.layouts.get(call.name)
        if layout is None:
            problems.append(f"call {call.name} has no layout; add it to the placement")
        elif not isinstance(layout, Layout):
            problems.append(f"call {call.name}: {layout!r} is not a Layout; use Layout.data_parallel(ranks)")
        else:
            for text in _layout_problems(layout, cluster.num_devices) or _shape_problems(layout, workload, call):
                of_layouts.setdefault((layout.ranks, text), []).append(call.name)
    problems += [*_overlap_problems(placement, workflow), *device_problems(workload, cluster)]
    if not problems and not of_layouts:
        problems += [*_ahead_problems(placement, workflow), *_partial_problems(placement, workload)]
        problems += [*_stream_problems(placement, workload), *_partner_problems(placement, workload)]
        for name, text in _zero_problems(placement, workload):
            of_layouts.setdefault((placement.layouts[name].ranks, text), []).append(name)
    for (ranks, text), calls in of_layouts.items():
        where = f" on ranks {format_ranks(ranks)}" if ranks else ""
        problems.append(f"call{'s' * (len(calls) > 1)} {', '.join(calls)}{where}: {text}")
    if problems:
        raise UserError("; ".join(problems))


def device_problems(workload: Workload, cluster: Cluster) -> Iterator[str]:
    """Yields which models cannot run on the devices of a cluster. A type that is not known here may be a CPU; there the
    ranks check again (world/devices.py)."""
    if any(map(DEVICE_BYTES.get, cluster.device_types)):
        yield from on_gpu_problems(workload)


def on_gpu_problems(workload: Workload) -> Iterator[str]:
    """Yields which models cannot run on GPUs."""
    if mixtures := [model for model, shape in workload.models.items() if shape and shape.num_experts]:
        yield f"mixtures of experts ({', '.join(mixtures)}) run on CPUs alone; use dense models on GPUs"


def _overlap_problems(placement: Placement, workflow: Workflow) -> Iterator[str]:
    """Yields the problems of own_first, joint, in_flight and decode_mini_batches."""
    order = [call.name for call in workflow.calls]
    known = [call.name for call in workflow.placed_calls if not isinstance(call, Train)]
    for field, names in (("own_first", placement.own_first), ("joint", sum(placement.joint, ()))):
        if not set(names) <= set(known) or len(set(names)) != len(names):
            yield f"{field} names {', '.join(names)}; name calls before training, each once: {', '.join(known)}"
    for calls in placement.joint:
        places = [order.index(name) for name in calls if name in order]
        members = [call for call in workflow.calls if call.name in calls]
        is_run = not places or max(places) - min(places) < len(calls)
        if not is_run or not workflow.independent(members):
            yield f"joint: {' and '.join(calls)} exchange together; join neighbours of which none reads another one"
    for field in ("in_flight", "decode_mini_batches"):
        if getattr(placement, field) < 1:
            yield f"{field} {getattr(placement, field)} is less than 1; raise it"


def _ahead_problems(placement: Placement, workflow: Workflow) -> Iterator[str]:
    """Yields why a batch cannot be sampled while another one trains, or what makes no sense unless it is."""
    if not placement.ahead:
        for train in workflow.train_calls:
            if train.loglinear:
                yield (
                    f"{train.name}: old_logprobs=loglinear estimates the lag of batches that are sampled one iteration "
                    "ahead, and without it is the generator's: choose old_logprobs=recompute, or strategy.ahead=1"
                )
        return
    yield from ahead_problems(placement.ahead, workflow)
    for calls in placement.joint:
        if len({trains(workflow.call(name), workflow) for name in calls}) > 1:
            yield f"ahead: joint {' and '.join(calls)} work on two batches; take them apart"
    training = [call for call in workflow.placed_calls if trains(call, workflow)]
    for call in workflow.placed_calls:
        if placement.ahead == 1 and call not in training:
            yield from _shared_problems(placement, call, training, "ahead")


def ahead_problems(ahead: int, workflow: Workflow) -> Iterator[str]:
    """Yields why a workflow's batches cannot be sampled ahead, wherever its calls are placed."""
    if ahead != 1:
        yield f"ahead {ahead}: a batch can be sampled one iteration ahead; use 0 or 1"
    if not workflow.generate_calls or not workflow.train_calls:
        yield "ahead: this workflow does not generate what it trains on, so there is nothing to sample ahead; drop it"
    for train in workflow.train_calls:
        makers = [workflow.producer(key) for key in train.inputs]
        late = [one.name for one in makers if isinstance(one, Infer) and one.model == train.model and not one.current]
        if GENERATOR_LOGPROBS in dict(train.arguments) and late:
            yield (
                f"ahead: {train.name} corrects differences from the generator, and {late[0]} has the weights that "
                "generated, so that it cannot see that these are an iteration old; choose old_logprobs=current or "
                "loglinear, or drop importance_weights and rejection"
            )
        yield from _uncorrected(train, workflow)
    for call in workflow.calls:
        if is_read_by_both(call, workflow):
            yield f"ahead: {call.name} is read by training and by calls before it, which work on two batches; drop it"


def _uncorrected(train: Train, workflow: Workflow) -> Iterator[str]:
    """Yields what ignores that the generator is an iteration older: a loss that compares with the newest weights and
    does not read the generator's logprobs, or an early stop that compares with the generator."""
    keys = [key for name, key in train.arguments if name != START_LOGPROBS]
    current = [one.name for one in map(workflow.producer, keys) if one is not None and is_current(one)]
    # old logprobs of loglinear are the generator's
    if train.drawn and (current or train.loglinear) and keys.count(train.drawn) <= train.loglinear:
        yield (
            f"ahead: {train.name} compares with {[*current, 'estimates'][0]} of the newest weights, so that nothing "
            "corrects that the generator is an iteration older; set importance_weights or rejection, or choose "
            "old_logprobs=generator"
        )
    if train.drawn and train.stop and not (current or train.loglinear or START_LOGPROBS in dict(train.arguments)):
        yield (
            f"ahead: {train.name} stops by {train.stop[0]}, which counts that the generator is an iteration older; "
            f"give the loss {START_LOGPROBS}=..., and compare with these"
        )


def _partial_problems(placement: Placement, workload: Workload) -> Iterator[str]:
    """Yields why responses cannot take several iterations."""
    workflow, size = workload.workflow, workload.samples_per_prompt
    if not workload.partial_steps:
        return
    where, calls = f"partial_steps={workload.partial_steps}", workflow.generate_calls
    if not placement.ahead:
        yield f"{where}: responses go on beside training; give strategy.ahead=1 (or plan --ahead 1), or drop it"
    if workload.num_parts > MOST_PARTS:
        least = -(-workload.max_response // MOST_PARTS)
        yield f"{where}: a response would take {workload.num_parts} iterations, at most {MOST_PARTS}; give {least}"
    others = {
        "several generate calls": len(calls) > 1,
        "an environment": any(call.has_turns for call in calls),
        "rounds of sampling": workload.rounds > 1,
        "experts.replay=true": any(routes_of(call.outputs[0]) in call.outputs for call in calls),
        f"{size} samples of a prompt that nothing compares": workload.group_size != size,
        "old_logprobs=loglinear": any(train.loglinear for train in workflow.train_calls),
        "old_logprobs=recompute": any(_repeats_drawn(call, workflow) for call in workflow.calls),
    }
    for name in (name for name, has in others.items() if has):
        yield f"{where}: it is not supported with {name}; drop one of them"
    for call in calls:
        yield from split_groups(placement.layouts[call.name], workload, call.name, where)


def _repeats_drawn(call: Call, workflow: Workflow) -> bool:
    """Returns whether a call infers logprobs of what its model has sampled, with the weights of the last tokens."""
    is_pass = isinstance(call, Infer) and call.function == LOGPROBS and not call.current
    return is_pass and bool(call.outputs) and call.model in {one.model for one in workflow.generate_calls}


def split_groups(layout: Layout, workload: Workload, call: str, option: str, rows: int = 0) -> Iterator[str]:
    """Yields the problem of a call that gives a rank a part of a group, where an option needs whole ones. rows: of an
    episode, which is then meant in place of a group."""
    size, whole = workload.group_size, "a group of samples_per_prompt"
    if rows:
        size, whole = rows, "an episode of episode.rows"
    columns = [layout.columns(rank, workload.mini_batch) for rank in layout.ranks]
    if any(part.start % size or part.stop % size for part in columns):
        yield (
            f"{option}: {call} spreads mini_batch={workload.mini_batch} rows over {layout.dp} ranks so that some "
            f"have a part of {whole}={size}; choose mini_batch as a multiple of "
            f"{size * layout.dp}, or generate on fewer ranks"
        )


def _stream_problems(placement: Placement, workload: Workload) -> Iterator[str]:
    """Checks streaming: a model that trains then changes before the last mini-batch is generated and scored."""
    for call in workload.workflow.placed_calls if placement.streams(workload) else ():
        train = workload.workflow.train_call(call.model)
        if train is not None and not isinstance(call, Train):
            yield from _shared_problems(placement, call, [train], "stream")


def _shared_problems(placement: Placement, call: ModelCall, training: Sequence[ModelCall], field: str) -> Iterator[str]:
    """Yields the first call of training that runs meanwhile on ranks of a call, because of a field of the placement."""
    for other in training:
        shared = set(placement.layouts[call.name].ranks) & set(placement.layouts[other.name].ranks)
        if shared:
            where = f"ranks {format_ranks(tuple(sorted(shared)))}, where {other.name} runs meanwhile"
            yield f"{field}: {call.name} is on {where}; place it elsewhere, as `separation` does, or drop {field}"
            return


def _partner_problems(placement: Placement, workload: Workload) -> Iterator[str]:
    """Checks partners: two calls may use one copy of a model's shard only if they split the model with the same
    ranks."""
    # model, rank, shard -> call and the ranks of its copy
    users: dict[tuple[str, int, Shard], tuple[str, tuple[int, ...]]] = {}
    for call in workload.workflow.placed_calls:
        layout = placement.layouts[call.name]
        for rank in layout.ranks if layout.pp * layout.tp > 1 and not isinstance(call, Train) else ():
            if uses_trained_weights(call, rank, workload, placement):
                continue
            ranks = layout.model_ranks(rank)
            other, others = users.setdefault((call.model, rank, layout.shard(rank)), (call.name, ranks))
            if others != ranks:
                where = f"ranks {list(ranks)}, {other} over ranks {list(others)}"
                yield f"{call.name} splits {call.model} over {where}; group the ranks alike in both"
                break


def _layout_problems(layout: Layout, size: int) -> list[str]:
    """Returns the problems of a layout in a world of `size` ranks."""
    outside = [rank for rank in layout.ranks if not 0 <= rank < size]
    if not outside:
        return layout.problems()
    fix = f"use ranks below {size} or start at least {max(outside) + 1} ranks"
    text = f"rank {outside[0]} is outside the world of ranks 0 to {size - 1}; {fix}"
    return [*layout.problems(), text]


def _shape_problems(layout: Layout, workload: Workload, call: ModelCall) -> Iterator[str]:
    """Yields what a model is too small for, and options that its call cannot have."""
    model, shape = call.model, workload.models.get(call.model)
    if shape is None:
        if (layout.pp, layout.tp) != (1, 1):
            yield f"{model} is a function, which has no weights to split; use pp = tp = 1"
        return
    if layout.pp > shape.num_layers:
        yield f"pp {layout.pp} is more than the {shape.num_layers} layers of {model}; lower pp"
    most_tp = min(shape.num_kv_heads, shape.intermediate_size, shape.vocab_size)
    if layout.tp <= most_tp and layout.tp > (allowed := shape.most_tp(layout.tp)):
        why = f"{shape.num_experts} experts, which are cut whole"
        yield f"tp {layout.tp} cannot cut {model}, which has {why}; use tp {allowed}"
    if layout.pp > 1 and call.name in workload.counted:
        text = f"the losses of routers need all layers of {model} before a step, where no generation has chosen experts"
        yield f"{text}; use pp 1 here, or drop experts.balance_coef and experts.z_coef"
    if layout.zero > 1 and shape.num_experts:
        yield f"ZeRO {layout.zero} is not for {model}, a mixture of experts; use ZeRO 0 or 1, or split it by tp or pp"
    if layout.tp > most_tp:
        text = f"tp {layout.tp} is more than the {most_tp} key-value heads of {model}, or the rows of a weight"
        yield f"{text}, which are not replicated; lower tp to {most_tp} or less"
    if layout.recompute and not isinstance(call, Train):
        yield "recompute saves activations for a backward pass, which only training has; drop it here"
    if isinstance(call, Train) and shape.adapters is not None and layout.zero == 3:
        text = f"ZeRO 3 (by DeepSpeed) shards weights that train, and {model} trains adapters on frozen ones"
        yield f"{text}; use ZeRO 0 or 1, split its weights by tp or pp, or drop lora.rank"
    if workload.workflow.train_call(model) is None and shape.adapters is not None and leaves_device(layout):
        text = f"{model} is frozen and its folder holds adapters, beside which the base has to stay on the device"
        yield f"{text}; drop ZeRO 3 and offload here, or merge them: convert FOLDER MERGED --merge"
    if layout.offload and workload.workflow.train_call(model) and not isinstance(call, Train):
        yield f"offload is for frozen models and for calls that train, and {model} trains in another call; drop it here"
    if layout.offload and isinstance(call, Train) and layout.zero == 3:
        yield "ZeRO 3 (by DeepSpeed) keeps the optimizer's states on the device; drop offload here, or use ZeRO 0 to 2"
    if layout.offload and isinstance(call, Train) and shape.adapters is not None:
        yield f"offload would save little, because {model} trains adapters alone; drop it here"


def _zero_problems(placement: Placement, workload: Workload) -> Iterator[tuple[str, str]]:
    """Calls with an impossible ZeRO stage. A trained model has the stage of its training, on the same ranks; a frozen
    one has 0, or 3 if all its calls gather on the same ranks."""
    for call in workload.workflow.placed_calls:
        layout = placement.layouts[call.name]
        train = workload.workflow.train_call(call.model)
        if train is None:
            first = next(c for c in workload.workflow.placed_calls if c.model == call.model)
            there = placement.layouts[first.name]
            differs = (layout.ranks, layout.zero) != (there.ranks, there.zero) and 3 in (layout.zero, there.zero)
            if layout.zero in (1, 2) or differs or (layout.zero == 3 and layout.offload):
                text = f"{call.model} does not train: its weights are whole, or ZeRO 3 shards them on the same ranks in"
                yield call.name, f"{text} all of its calls, without offload; use ZeRO 0, or 3 in all of them"
            continue
        training = placement.layouts[train.name]
        kept = layout.same_shards(training) and layout.zero == training.zero
        if layout.zero and not isinstance(call, Train) and not kept:
            text = f"ZeRO {layout.zero} would be ignored, because {call.model} trains on ranks"
            text = f"{text} {format_ranks(training.ranks)} with {training}"
            yield call.name, f"{text}; use zero=0 here, and set the stage of {train.name}"

"""The program of an evaluation, on a set of rows of its own: generation and scoring as in training or, where training
reads given responses, its losses without their gradients. And the program that computes once what would be the same in
every iteration.

An evaluation runs between two iterations. At the end of an iteration every copy of a model has the new weights, so it
moves no weights; optimizer state and the other models stay where they are.
"""

from collections.abc import Mapping
from dataclasses import fields, replace

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.calls import NOTHING_REPEATED, Call, Compute, Generate, Measure, ModelCall, Train, Workflow
from rlhf_spmd.plan.layout import Layout
from rlhf_spmd.plan.placement import Placement, weights_layout
from rlhf_spmd.plan.program.compile import compile_program
from rlhf_spmd.plan.program.instructions import Program
from rlhf_spmd.plan.runtime_words import SCORES
from rlhf_spmd.plan.workload import ModelShape, Workload


def evaluation_program(
    training: Program,
    *,
    num_prompts: int,
    samples_per_prompt: int,
    temperature: float,
    max_response: int,
    by_function: bool,
) -> Program:
    """Makes the program of an evaluation: the first generate call of a training program and the call that scores its
    responses, in the same layouts; of a program that generates nothing, all calls, where those that train only measure.
    Raises UserError for a workflow that cannot be evaluated.

    num_prompts: of the evaluation set.
    temperature: of generation; 0 is greedy.
    max_response: tokens.
    by_function: a Python function scores in the place of the model.
    """
    workload, placement = training.workload, training.placement
    calls: tuple[Call, ...]
    judged: ModelCall | None = None  # whose model a function replaces
    if workload.workflow.generate_calls:
        generating, scoring = _calls(workload.workflow)
        kept = (key for key in generating.outputs if workload.workflow.shapes[key] not in ("kept", "routes"))
        calls = replace(generating, outputs=tuple(kept), temperature=temperature), scoring
        judged = scoring if by_function else None
    else:
        calls = _measuring(workload.workflow)
    placed = [call for call in calls if not isinstance(call, Compute)]
    layouts = {call.name: _frozen(call, workload, placement) for call in placed}
    models = {call.model: workload.models[call.model] for call in placed}
    if judged is not None:
        models[judged.model] = None
        layouts[judged.name] = Layout.data_parallel(layouts[judged.name].ranks)
    sized = replace(workload, max_response=max_response, forecast_lengths=None, partial_steps=0)
    num_rows = samples_per_prompt * workload.episode_rows
    return _program(replace(training, workload=sized), calls, layouts, models, num_prompts, num_rows)


def precompute_program(training: Program, *, num_rows: int) -> Program:
    """Makes the program of the calls that give a row the same logprobs in every iteration of training, in the same
    layouts, on so many rows. Raises UserError if there are none."""
    workload = training.workload
    calls = workload.workflow.repeated_calls
    if not calls:
        raise UserError(NOTHING_REPEATED)
    layouts = {call.name: _frozen(call, workload, training.placement) for call in calls}
    models = {call.model: workload.models[call.model] for call in calls}
    return _program(training, calls, layouts, models, num_rows, 1)


def _program(
    training: Program,
    calls: tuple[Call, ...],
    layouts: Mapping[str, Layout],
    models: Mapping[str, ModelShape | None],
    num_prompts: int,
    samples_per_prompt: int,
) -> Program:
    """Returns the program of these calls, whose rows are one mini-batch."""
    workload, keys = training.workload, {key for call in calls for key in (*call.inputs, *call.outputs)}
    workflow = Workflow(
        calls,
        tuple(key for key in workload.workflow.given if key in keys),
        {key: shape for key, shape in workload.workflow.shapes.items() if key in keys},
        {call.model: workload.workflow.heads[call.model] for call in calls if call.model},
    )
    own = replace(
        workload,
        workflow=workflow,
        models=models,
        rollout_batch=num_prompts,
        samples_per_prompt=samples_per_prompt,
        mini_batch=num_prompts * samples_per_prompt,
        epochs=1,
        max_kept=0,
    )
    return compile_program(own, Placement(layouts), training.cluster)


def _measuring(workflow: Workflow) -> tuple[Call, ...]:
    """Returns all calls of a workflow without generation, of which those that train measure the loss."""
    for call in workflow.calls:
        if isinstance(call, Compute) and (call.scope != "row" or call.sums):
            raise UserError(
                f"eval.prompts: {call.function} needs more than a row at once, so rows cannot be evaluated; drop "
                "eval.prompts"
            )
    return tuple(
        Measure(**{part.name: getattr(call, part.name) for part in fields(call) if part.init})
        if isinstance(call, Train)
        else call
        for call in workflow.calls
    )


def _calls(workflow: Workflow) -> tuple[Generate, ModelCall]:
    """Returns the calls that generate and score."""
    for generating in workflow.generate_calls[:1]:
        for call in workflow.placed_calls:
            if call.function == SCORES and call.responses == generating.outputs[:1]:
                return generating, call
    raise UserError(
        "eval.prompts: an evaluation generates responses and scores them, and this algorithm has no call that scores "
        "generated responses; drop eval.prompts"
    )


def _frozen(call: ModelCall, workload: Workload, placement: Placement) -> Layout:
    """Returns the layout of a call in a workflow without training. The weights are kept as in training: ZeRO 3 gathers
    them, a lower stage concerns gradients and optimizer state only."""
    layout = placement.layouts[call.name]
    if workload.models[call.model] is None:
        return layout
    if isinstance(call, Measure):
        return replace(layout.of_inference, zero=3 if layout.zero == 3 else 0)
    kept = weights_layout(call, layout.ranks[0], workload, placement)
    return replace(layout, zero=3 if kept.zero == 3 else 0)

"""Runs the calls of a program on this rank, each kind by its handler."""

from collections.abc import Sequence

from torch import Tensor

from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.plan.runtime_words import READOUTS
from rlhf_spmd.plan.workflow import Call, Compute, Generate, Train
from rlhf_spmd.runtime.execute.handlers import compute, generate, infer, train
from rlhf_spmd.runtime.execute.handlers.context import CallContext, RunState
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.optimizer_step import Training
from rlhf_spmd.runtime.execute.pipeline_runtime import Passes
from rlhf_spmd.runtime.rewards.response_scores import Judged


class Calls:
    """The calls of one program on this rank."""

    def __init__(self, context: CallContext):
        self.context = context
        self.training = Training(context.config, context.workload, context.world.rank, context.sampling, context.masks)

    def run(self, step: Run, data: Iteration, state: RunState) -> None:
        """Executes one Run without stages."""
        context = self.context
        call = context.workload.workflow.call(step.call)
        if isinstance(call, Generate):
            generate.generate(context, call, step, data)
        elif isinstance(call, Compute):
            compute.compute(context, call, step, data, state)
        elif isinstance(call, Train):
            begun = train.begin(context, self.training, call, step, data, state)
            if begun is not None:
                self.training.whole(begun)
                train.end(context, self.training, begun, data)
        elif context.workload.models[call.model] is None:
            infer.keep_scores(context, call, data, context.place(step), None)
        else:
            self._inference(call, step, data).run(context, call)

    def passes(self, step: Run, data: Iteration, state: RunState) -> Passes | None:
        """The passes of a Run with stages; None if there is nothing to do."""
        context = self.context
        call = context.workload.workflow.call(step.call)
        if isinstance(call, Train):
            begun = train.begin(context, self.training, call, step, data, state)
            return None if begun is None else train.passes(context, self.training, begun, data)
        return self._inference(call, step, data).passes()

    def _inference(self, call: Call, step: Run, data: Iteration) -> infer.Forwards:
        """Forwards that make a readout, or measure a loss."""
        model = self.context.models.model(call)
        if call.function in READOUTS:
            return infer.inference(self.context, call, step, data, model)
        return infer.measurement(self.context, self.training, call, step, data, model)

    def scores(self, call: Call, prompts_BP: Tensor, responses_BG: Tensor, index_B: Sequence[int]) -> Judged | None:
        """Scores of whole responses outside an iteration, as infer.scores."""
        return infer.scores(self.context, call, prompts_BP, responses_BG, index_B)

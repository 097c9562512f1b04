"""The loop of a run that draws one iteration ahead: each step trains one batch and draws the next one."""

from rlhf_spmd.runtime.ahead.in_flight import Batch, collect, restore
from rlhf_spmd.runtime.ahead.steps import AheadExecutor, Batches
from rlhf_spmd.runtime.checkpoint.checkpoint_files import Checkpoint
from rlhf_spmd.runtime.checkpoint.saving import Tensors
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.run.loop import Loop
from rlhf_spmd.runtime.run.prepare import make_iteration


class AheadLoop(Loop):
    """The steps of a run."""

    executor: AheadExecutor
    in_flight: Batch | None = None  # that of the next iteration; None: it is drawn first

    def take_up(self, checkpoint: Checkpoint) -> str:
        """Restores the batch in flight of a checkpoint -> a note if it has none. Collective."""
        self.in_flight = restore(self.job, checkpoint, make_iteration(self.job, len(self.history)))
        if self.in_flight is not None or len(self.history) == self.job.config.iterations:
            return ""
        return "note: this run had ended: its next iteration is drawn with the newest weights, not with older ones"

    def share_in_flight(self) -> Tensors | None:
        return None if self.in_flight is None else collect(self.job, self.in_flight)

    def given(self, number: int) -> Batches:
        """Returns a batch that has been drawn, by the prologue if need be, and the next one, if there is one."""
        if self.in_flight is None:
            self.in_flight = Batch(make_iteration(self.job, number))
            self.now, self.doing = self.in_flight.data, Batches(None, self.in_flight)
            self.executor.iteration(self.doing)
            self.executor.recorder.forget(number + 1)  # what follows is the first whole iteration
        trained, is_last = self.in_flight, number + 1 == self.job.config.iterations
        trained.data.before = self.history[-1] if self.history else {}
        self.now, self.in_flight = trained.data, None if is_last else Batch(make_iteration(self.job, number + 1))
        if self.in_flight is not None:
            self.in_flight.data.lag = 1
        self.doing = Batches(trained, self.in_flight)
        return self.doing

    @property
    def draws(self) -> Iteration | None:
        return None if self.in_flight is None else self.in_flight.data

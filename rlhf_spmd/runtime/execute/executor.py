"""Executes the instructions of a rank with torch: which handler computes a Run, and what ranks report at the end."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlhf_spmd.plan.calls import Compute, Generate, Train
from rlhf_spmd.plan.program.instructions import Agree, Load, Offload, Run
from rlhf_spmd.runtime.execute import optimizer_step
from rlhf_spmd.runtime.execute.first_launches import launch_kernels
from rlhf_spmd.runtime.execute.handlers import compute, generate, infer
from rlhf_spmd.runtime.execute.instruction_loop import InstructionLoop
from rlhf_spmd.runtime.execute.iteration import Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.passes import Passes, through_stages
from rlhf_spmd.runtime.execute.post_and_wait import Transfers
from rlhf_spmd.runtime.execute.response_hashes import ROW, responses_made
from rlhf_spmd.runtime.execute.rounds import agree_on_round
from rlhf_spmd.runtime.failure.signals import Asked
from rlhf_spmd.runtime.generation.kv_cache import release_unused
from rlhf_spmd.runtime.world.metric_sums import combine, summed
from rlhf_spmd.runtime.world.trace import Tracer


class Executor(InstructionLoop):
    """Carries out the instructions with torch."""

    def __init__(self, job: Job, recorder: Tracer, asked: Asked | None = None):
        """asked: signals received, which all ranks learn at the end of an iteration; None: there are none."""
        super().__init__(job.program, job.world, recorder)
        self.job, self.asked = job, asked or Asked()
        if self.world.device.type == "cuda":
            launch_kernels(job)
        self.begin()
        self.transfers = Transfers(job)
        self.next_state: Any = None  # in a chain: of the next iteration, where a rank's functions read it

    def reset(self) -> None:
        """Frees what the device's allocator holds back."""
        release_unused(self.world.device)

    def run(self, run: Run, data: Iteration) -> Callable[[], None] | None:
        """Executes a Run of any call. Returns what sends its passes through stages, if there are any."""
        call = self.program.workload.workflow.call(run.call)
        passes: Passes | None = None
        if isinstance(call, Generate):
            generate.generate(self.job, call, run, data)
        elif isinstance(call, Compute):
            compute.compute(self.job, call, run, data)
        elif isinstance(call, Train):
            passes = optimizer_step.begin(self.job, call, run, data)
        else:
            passes = infer.begin(self.job, call, run, data)
        if passes is None:
            return None
        if self.job.layout(passes.call).pp > 1:
            return partial(through_stages, passes, self.recorder)
        with passes.within():
            for index in range(len(passes.batches)):
                passes.forward(index)
                if isinstance(call, Train):
                    passes.backward(index)
        passes.close()
        return None

    def post(self, number: int, data: Iteration) -> None:
        """Starts this rank's part of a transfer."""
        self.transfers.post(number, data)

    def wait(self, number: int, data: Iteration) -> None:
        """Waits until this rank's part of a transfer is done."""
        self.transfers.wait(number, data)

    def load(self, load: Load) -> None:
        """Brings the weights of a frozen model to the device."""
        for copy in self.job.models.offloaded_copies(load.model):
            copy.load()

    def offload(self, offload: Offload) -> None:
        """Frees the weights of a frozen model on the device."""
        for copy in self.job.models.offloaded_copies(offload.model):
            copy.release()

    def _message(self, data: Iteration) -> bytes:
        """Returns this rank's report on an iteration: a line of JSON, then the records of responses as in memory."""
        sent = {"bytes": data.num_bytes_sent, "messages": data.num_messages_sent}
        numbers = data.meter.to_message() | {"sent": sent, "signals": self.asked.take()}
        numbers["peak_bytes"] = self.world.computes.peak_bytes()
        rows = responses_made(self.program, self.world.rank, data) if data.responses is None else data.responses
        return json.dumps(numbers).encode() + b"\n" + rows.tobytes()

    def agree(self, data: Iteration, what: str) -> list[dict[str, Any]]:
        """Exchanges messages at the end -> those of all ranks."""
        return answers_of(self.world.allgather_bytes(self._message(data), what))

    def report(self, data: Iteration) -> None:
        """Sends rank 0 the message of an iteration."""
        assert self.reports is not None, "the program chains iterations"
        self.reports.send(data.number, self._message(data))

    def agree_among(self, data: Iteration, step: Agree) -> bool:
        """Computes the next state from the sums of all ranks, or gives groups that failed other prompts."""
        if step.round:
            return agree_on_round(self.job, data, step.ranks, self.reports)
        assert self.reports is not None, "the program chains iterations"
        counted = data.meter.part(self.job.workload.state_sums).to_message()
        total = self.reports.merge(step.ranks, counted, lambda messages: summed(messages).to_message())
        self.next_state = next_state(self.job, self.job.state.of_algorithm, [total])
        return False


def answers_of(messages: Sequence[bytes]) -> list[dict[str, Any]]:
    """Returns for each rank its numbers and, under "rows", a record of each response that it generated
    (response_hashes.py)."""
    said = (message.partition(b"\n") for message in messages)
    return [json.loads(numbers) | {"rows": np.frombuffer(rows, ROW)} for numbers, _, rows in said]


def next_state(job: Job, state: Any, answers: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the algorithm's state after an iteration, from global numbers only. state: that it had. answers: of
    ranks, which have counted all that the state depends on."""
    config = job.config
    num_sequences = config.rollout_batch * config.rows_per_prompt
    return config.algorithm.after_iteration(state, config.options, *combine(answers), num_sequences)

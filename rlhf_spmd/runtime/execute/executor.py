"""Executes a rank's instruction list; plan/program/instructions.py says what each instruction means.

A failure inside an instruction becomes one message that names rank, host, iteration, instruction, group, and, when a
deadline passed, the ranks that have not arrived.
"""

import json
from typing import Any

import numpy as np
import torch.distributed as dist

from rlhf_spmd.errors import UserError
from rlhf_spmd.plan.program.instructions import Agree, Instruction, Load, Offload, Post, Program, Run, Wait
from rlhf_spmd.plan.workflow import Compute, Generate, ModelCall, Train
from rlhf_spmd.runtime.diagnosis.wait_graph import needs_of, places_of, text_of
from rlhf_spmd.runtime.execute import optimizer_step
from rlhf_spmd.runtime.execute.first_launches import launch_kernels
from rlhf_spmd.runtime.execute.handlers import compute, generate, infer
from rlhf_spmd.runtime.execute.iteration import ALL, Iteration
from rlhf_spmd.runtime.execute.job import Job
from rlhf_spmd.runtime.execute.passes import Passes, through_stages
from rlhf_spmd.runtime.execute.post_and_wait import Transfers
from rlhf_spmd.runtime.execute.response_hashes import ROW, digests
from rlhf_spmd.runtime.generation.kv_cache import release_unused
from rlhf_spmd.runtime.guard.failures import PeerError, is_lost, is_peer_error
from rlhf_spmd.runtime.guard.signals import Asked
from rlhf_spmd.runtime.observe.trace import Tracer

MAX_SAMPLES = 1_000_000  # of a prompt


class Executor:
    """Runs iterations of one program on this rank."""

    def __init__(self, job: Job, recorder: Tracer, asked: Asked | None = None):
        """asked: signals received, which all ranks learn at the end of an iteration; None: there are none."""
        self.job, self.program, self.world, self.recorder = job, job.program, job.world, recorder
        self.asked = asked or Asked()
        self.instructions = self.program.instructions[self.world.rank]
        self.texts = [text_of(self.program, step) for step in self.instructions]
        if self.world.device.type == "cuda":
            launch_kernels(job)
        self.begin()
        self.transfers = Transfers(job)

    def begin(self) -> None:
        """Tells the world that this program is executed from now on; needed again after another one."""
        self.world.will_execute(self.program)

    def iteration(self, data: Iteration) -> list[dict[str, Any]]:
        """One pass over the list -> the messages of all ranks at the closing Agree."""
        self.recorder.iteration = data.number
        self.transfers.num_bytes_sent, self.transfers.num_messages_sent = 0, 0
        answers: list[dict[str, Any]] = []
        for position, step in enumerate(self.instructions):
            self.world.progress(f"{data.title}: {self.texts[position]}", data.number, position)
            try:
                if position == 0:
                    release_unused(self.world.device)  # while no message is under way
                if isinstance(step, Run):
                    with self.recorder.span(step.call, "compute", epoch=step.epoch, mini_batch=step.mini_batch):
                        passes = self.run(step, data)
                    if passes is not None:
                        through_stages(passes, self.recorder)
                elif isinstance(step, Post):
                    what = self.program.transfers[step.transfer].what
                    with self.recorder.span(f"post {what}", "transfer", transfer=step.transfer):
                        self.transfers.post(step.transfer, data)
                elif isinstance(step, Wait):
                    what = self.program.transfers[step.transfer].what
                    with self.recorder.span(f"wait {what}", "wait", transfer=step.transfer):
                        self.transfers.wait(step.transfer, data)
                elif isinstance(step, Load):
                    with self.recorder.span(f"load {step.model}", "transfer"):
                        for copy in self.job.models.offloaded_copies(step.model):
                            copy.load()
                elif isinstance(step, Offload):
                    for copy in self.job.models.offloaded_copies(step.model):
                        copy.release()
                elif isinstance(step, Agree):
                    with self.recorder.span(step.what, "control"):
                        answers = self._agree(data, f"{data.title}: {step.what}")
                if position == len(self.instructions) - 1:
                    self.recorder.read_marks()  # waits for the device: an iteration ends when its last kernel does
            except UserError:
                raise
            except (RuntimeError, dist.DistError) as error:
                raise self._explained(error, step, position, data) from error
        self.world.progress(f"{data.title}: over", data.number)
        return answers

    def run(self, run: Run, data: Iteration) -> Passes | None:
        """Executes a Run of any call. Returns its passes if they go through stages."""
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
        if passes is None or self.job.layout(passes.call).pp > 1:
            return passes
        with passes.within():
            for index in range(len(passes.batches)):
                passes.forward(index)
                if isinstance(call, Train):
                    passes.backward(index)
        passes.close()
        return None

    def _agree(self, data: Iteration, what: str) -> list[dict[str, Any]]:
        """Exchanges messages at the end -> for each rank its numbers and, under "rows", a record of each response that
        it generated (response_hashes.py). A message is a line of JSON followed by the records as they are in memory."""
        sent = {"bytes": self.transfers.num_bytes_sent, "messages": self.transfers.num_messages_sent}
        numbers = data.meter.to_message() | {"sent": sent, "signals": self.asked.take()}
        message = json.dumps(numbers).encode() + b"\n" + self._digests(data).tobytes()
        said = (answer.partition(b"\n") for answer in self.world.allgather_bytes(message, what))
        return [json.loads(numbers) | {"rows": np.frombuffer(rows, ROW)} for numbers, _, rows in said]

    def _digests(self, data: Iteration) -> np.ndarray:
        """Records of the responses that this rank generated and reports; those of a second generate call count as
        further samples."""
        made = [np.empty(0, ROW)]
        for number, call in enumerate(self.program.workload.workflow.generate_calls):
            columns = reported_columns(self.program, call, self.world.rank)
            if columns.start < columns.stop:
                responses_MCG = data.store.at(call.outputs[0], (ALL, columns))
                samples_MC = data.sample_MC[:, columns] + number * MAX_SAMPLES
                made.append(digests(data.prompt_MC[:, columns], samples_MC, responses_MCG))
        return np.concatenate(made)

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _explained(self, error: Exception, instruction: Instruction, position: int, data: Iteration) -> Exception:
        """A lost or late peer as a UserError with names; any other error as it is."""
        if not is_peer_error(error):
            return error
        world = self.world
        needs = needs_of(self.program, world.rank, instruction, places_of(self.program))
        late, reason = world.stragglers(needs, data.number), str(error).partition("\n")[0]
        place = f"{data.title}, instruction {position}: {text_of(self.program, instruction)}"
        names = "; ".join(f"rank {rank} on {world.hosts[rank]} last reported: {where}" for rank, where in late.items())
        what = "lost a connection" if is_lost(error) else "gave up waiting"
        return PeerError(
            f"rank {world.rank} on {world.hosts[world.rank]} {what} in {place}: "
            + (names or "all its peers arrived, but a message did not get through")
            + f" ({reason[:120]})",
            lost=is_lost(error),
        )


def reported_columns(program: Program, call: ModelCall, rank: int) -> slice:
    """The columns whose responses to a call this rank makes and reports at the end of an iteration; may be empty."""
    layout = program.placement.layouts[call.name]
    if rank not in layout.ranks or not layout.reports(rank):
        return slice(0, 0)
    columns = layout.columns(rank, program.workload.mini_batch)
    return slice(columns.start, columns.stop)

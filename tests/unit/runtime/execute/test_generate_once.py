"""Responses that end before their mini-batch is asked for are not drawn a second time."""

from rlhf_spmd.plan.program.instructions import Run
from rlhf_spmd.runtime.execute.handlers import generate
from rlhf_spmd.runtime.run.prepare import make_iteration
from tests.folders import write_all
from tests.runs import RunOf, load


def test_early_ends_while_streaming(tmp_path, monkeypatch):
    made = []

    class Counted(generate.Rollout):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(generate, "Rollout", Counted)
    run = RunOf(load(write_all(tmp_path), "rollout_batch=8", "mini_batch=4", "generation.max_new_tokens=3"))
    (call,) = run.program.workload.workflow.generate_calls
    data = make_iteration(run.job, 0)
    for mini_batch in range(2):  # all rows run at the same time, and have at most three tokens
        generate.generate(run.job, call, Run(call.name, mini_batch=mini_batch), data)
    assert len(made) == 1 and not data.generations
    assert (data.store["responses"][..., 0] >= 0).all()

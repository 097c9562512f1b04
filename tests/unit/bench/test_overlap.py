"""The benches of overlap: their verdicts, and that the sleeps leave something to gain."""

from bench.speed import overlap
from rlhf_spmd.plan.cost.simulate import Times, simulate


def test_sleeps_leave_something_to_gain(tmp_path):
    overlap.write_models(tmp_path)

    def period_s(name):
        _, program = overlap.compiled(name, tmp_path)
        of_call = overlap.VARIANTS[name].slow_s
        return simulate(program, Times(lambda rank, run: overlap.slow_s(program, run, of_call))).makespan_s

    for name, (other, least) in overlap.GAINS.items():
        assert period_s(other) / period_s(name) > 1.05 * least

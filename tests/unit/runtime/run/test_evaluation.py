"""What an evaluation counts as right."""

from types import SimpleNamespace

import numpy as np

from rlhf_spmd.runtime.execute.response_hashes import ROW
from rlhf_spmd.runtime.run.evaluation import SCORED, Evaluation


def test_right_at_is_compared_in_the_precision_of_scores():
    """A score of 0.9 is 0.89999998 as float32, so that pass@1 was 0."""
    workload = SimpleNamespace(rollout_batch=1, samples_per_prompt=2)
    config = SimpleNamespace(eval=SimpleNamespace(right_at=0.9))
    job = SimpleNamespace(program=SimpleNamespace(workload=workload), config=config)
    evaluation = SimpleNamespace(job=job, scores=True, sources=[""])
    scored = np.array([(0, 0, np.float32(0.9)), (0, 1, np.float32(0.89))], SCORED)
    answer = {"sums": {}, "maxima": {}, "minima": {}, "rows": np.zeros(0, ROW)}
    assert Evaluation._metrics(evaluation, scored, [answer])["pass@1"] == 0.5

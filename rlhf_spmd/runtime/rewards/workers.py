"""Reward functions in worker processes (`reward_workers`), one response at a time, with a deadline for each.

A worker calls the functions in its main thread, so they may use SIGALRM. One that exceeds the deadline is ended and
replaced, and only its row has no score.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlhf_spmd.errors import UserError
from rlhf_spmd.runtime.rewards.function import Scores, load_reward_function, response_of
from rlhf_spmd.runtime.rewards.styles import Scored
from rlhf_spmd.runtime.workers.pool import WorkerPool
from rlhf_spmd.runtime.workers.serve import Link


def serve(link: Link, opening: Mapping[str, Any]) -> None:
    """Loads the functions in a worker, and scores the rows that the rank sends. Raises UserError."""
    functions = [load_reward_function(spec, opening["columns"]) for spec in opening["functions"]]
    link.send({"ready": True})
    for message in link.messages():
        scores, logs = functions[message["function"]].score(Scored(**message["row"]))
        link.send({"ticket": message["ticket"], "scores": scores, "logs": logs})


class RewardWorkers:
    """Processes that call reward functions. Raises UserError, also from the start, if one cannot load them."""

    def __init__(
        self,
        specs: Sequence[str],
        columns: Sequence[str],
        *,
        num: int,
        timeout_s: float,
        beat: Callable[[], None] = lambda: None,
    ):
        """Starts the workers.

        specs, columns: as in load_reward_function.
        timeout_s: for one response and function; 0: no limit.
        beat: see WorkerPool.
        """
        opening = {"functions": list(specs), "columns": list(columns)}
        name = f"the reward functions {', '.join(specs)}"
        self.pool = WorkerPool(serve, opening, num=num, name=name, option="reward_workers", at_once=1, beat=beat)
        self.specs, self.timeout_s = list(specs), timeout_s

    def score(self, rows: Scored) -> tuple[list[Scores], set[int]]:
        """Returns the scores of each function, as RewardFunction.score gives them for these rows one by one, and the
        rows that ran out of time, whose scores are None. Raises UserError for errors of the user's code and lost
        workers."""
        results: list[Scores] = [([None] * len(rows), {}) for _ in self.specs]
        late: set[int] = set()
        asked: dict[int, tuple[int, int]] = {}
        for function in range(len(self.specs)):
            for row in range(len(rows)):
                message = {"function": function, "row": asdict(rows.row(row))}
                asked[self.pool.ask(None, message, timeout_s=self.timeout_s)] = function, row
        while asked:
            for ticket, answer in self.pool.answers(1.0, asked):
                function, row = asked.pop(ticket)
                if "lost" in answer:
                    fix = "it, or a library that it calls, ended its process; fix it, or return a score for such a row"
                    if "SIGKILL" in answer["lost"]:
                        fix = "most likely the machine's memory ran out; set reward_workers lower, or fix the function"
                    raise UserError(
                        f"reward function {self.specs[function]}: its worker process {answer['lost']} on "
                        f"{response_of(rows, row)}: {fix}"
                    )
                if "timed_out" in answer:
                    late.add(row)
                    continue
                scores, logs = results[function]
                (scores[row],) = answer["scores"]
                for name, (value,) in answer["logs"].items():
                    logs.setdefault(name, [None] * len(rows))[row] = value
        return results, late

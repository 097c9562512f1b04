"""Code of the user inside the rank's process: what it raises is one message, and what it forks can be ended."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from rlhf_spmd.errors import UserError
from rlhf_spmd.pages import user_module
from rlhf_spmd.runtime.rewards.function import RewardFunction
from rlhf_spmd.runtime.rewards.styles import bind
from tests.run_mpi import environment_alone


def test_what_is_forked_is_ended_by_signals_that_this_process_only_notes():
    program = """
import os, signal, sys, time
from rlhf_spmd.runtime.failure.signals import Asked
asked = Asked()
asked.listen(signal.SIGTERM)
for _ in range(5):
    child = os.fork()
    if not child:
        time.sleep(60)
    time.sleep(0.05)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
print(asked.take())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        env=environment_alone(),
        check=False,
    )
    assert (done.stdout, done.stderr) == ("['SIGTERM']\n", "")


# ---- exceptions


class Mine(BaseException):
    pass


@pytest.mark.parametrize("kind", [Mine, GeneratorExit, SystemExit, KeyboardInterrupt])
def test_whatever_a_function_raises_is_one_message(kind, monkeypatch):
    monkeypatch.setattr(user_module, "_interrupts", [])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    user_module.remember_interrupts()

    def score(prompts, responses):
        if "b" in responses:
            raise kind("no")
        return [0.0] * len(responses)

    function = RewardFunction("r.py:score", bind(score))
    try:
        with pytest.raises(UserError, match=rf"r.py:score raised {kind.__name__}: no .*on a batch of 2 responses"):
            function(["p", "q"], ["a", "b"])
        if kind is KeyboardInterrupt:  # now it is the user's wish
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            with pytest.raises(KeyboardInterrupt):
                function(["p", "q"], ["a", "b"])
    finally:
        signal.signal(signal.SIGINT, before)

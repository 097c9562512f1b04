"""Steps for tests of bench first-light that end in every possible way; without torch, so that they start at once."""

import os
import signal
import subprocess
import sys

from bench.first_light.steps import Found, Light


def passes(light: Light) -> Found:
    light.row(work="planted", number=1.5)
    return Found(True, "as planted")


def crashes(light: Light) -> Found:
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return Found(True, "")


def hangs(light: Light) -> Found:
    """Hangs with a child in a session of its own, as the ranks of a launcher are."""
    light.row(work="planted", number=3)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (light.out / "child").write_text(str(child.pid), encoding="utf-8")
    print("begins to hang", flush=True)
    child.wait()
    return Found(True, "")

"""The processes that keep a machine busy for `make test-busy` end with what started them."""

import json
import subprocess
import sys
import time

from tests.run_mpi import REPOSITORY
from tests.unit.runtime.rewards.test_workers import is_alive

PROGRAM = """
import json, os, psutil
from tests.busy import busy
with busy(2):
    first = [child.pid for child in psutil.Process().children()]
with busy(1):
    print(json.dumps([first, [child.pid for child in psutil.Process().children()]]), flush=True)
    os._exit(3)
"""


def test_they_end_with_the_block_and_with_its_process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, encoding="utf-8", cwd=REPOSITORY)
    first, second = json.loads(done.stdout)
    assert done.returncode == 3 and (len(first), len(second)) == (2, 1)
    until = time.monotonic() + 60
    while any(map(is_alive, first + second)):
        assert time.monotonic() < until
        time.sleep(0.01)

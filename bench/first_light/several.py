"""The steps of `python -m bench first-light` that need two GPUs: NCCL under strategies, in CUDA graphs, and waiting."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from bench.first_light.checks import strategies_on
from bench.first_light.steps import Found, Light
from tests.run_mpi import mpi_command, run_limited

RANKS, MOST_RANKS = 2, 4
ONE_SHOT, NOTED = {"RLHF_SPMD_ONE_SHOT": "1"}, "NCCL_GRAPH_REGISTER=1"
SUMS = {"one shot": ONE_SHOT, "NCCL": {}, NOTED: {"NCCL_GRAPH_REGISTER": "1"}}
CASE_S = 100.0  # of one case of on_ranks.py


def on_ranks(light: Light, case: str, **variables: str) -> tuple[dict | None, str]:
    """Runs a case (bench/first_light/on_ranks.py) and returns what its rank 0 has found; None and why, where it does
    not end well."""
    command = [*mpi_command(RANKS), sys.executable, "-m", "bench.first_light.on_ranks", case]
    if light.dry:
        command.append("--dry")
    status, stdout, stderr = run_limited(command, limit_s=CASE_S, environment=dict(os.environ) | variables)
    print(f"--- {case} {variables}\n{stdout}{stderr}", flush=True)
    lines = stdout.strip().splitlines()
    if status == 0 and lines:
        return json.loads(lines[-1]), ""
    last = (stderr.strip().splitlines() or ["nothing said"])[-1]
    return None, f"{case} {'was stopped' if status is None else f'ended with {status}'}: {last}"


def nccl_strategies(light: Light) -> Found:
    import torch

    return strategies_on(light, min(MOST_RANKS, max(RANKS, torch.cuda.device_count())), "device=cuda")


def tp_graphs(light: Light) -> Found:
    """Tests two slices, whose sums are captured, in one shot and by NCCL. NCCL registers captured buffers unless told
    not to, which expandable segments do not allow: what happens then is noted, not judged."""
    told, ok = [], True
    with ThreadPoolExecutor() as pool:
        jobs = {name: pool.submit(on_ranks, light, "tp-graphs", **variables) for name, variables in SUMS.items()}
        ended = {name: job.result() for name, job in jobs.items()}
    for name, (found, why) in ended.items():
        light.row(sums=name, why=why, **(found or {}))
        told.append(f"{name}: {found['told'] if found else why}")
        ok &= name == NOTED or (found is not None and found["ok"])
    return Found(ok, "; ".join(told))


def one_shot_sums(light: Light) -> Found:
    found, why = on_ranks(light, "sums", **ONE_SHOT)
    light.row(**(found or {"why": why}))
    return Found(found is not None and (light.dry or found["ok"]), found["told"] if found else why)


def pending_receive(light: Light) -> Found:
    found, why = on_ranks(light, "pending-receive")
    light.row(**(found or {"why": why}))
    return Found(found is not None and (light.dry or found["ok"]), found["told"] if found else why)


def waiting_rank(light: Light) -> Found:
    """Tests the watch for hangs beside a receive by sockets, for which NCCL has a thread that spins."""
    found, why = on_ranks(light, "waiting", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    light.row(**(found or {"why": why}))
    return Found(found is not None and (light.dry or found["ok"]), found["told"] if found else why)

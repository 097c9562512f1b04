"""The first step of `python -m bench first-light`: what is there, on which the choice of all other steps depends."""

import importlib.util
import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from bench.first_light.steps import FACTS, GPU, MPI, STEPS, TWO_GPUS, Found, Light
from rlhf_spmd.runtime.records.software import version_of

VERSIONS = ("triton", "transformers", "mpi4py", "deepspeed", "pydantic", "numpy", "pytest")


def device(light: Light) -> Found:
    """Writes the facts by which all other steps are chosen, and reports what works differently than intended."""
    facts: dict = {"python": platform.python_version(), "missing": missing(light.dry)}
    facts["versions"] = {name: version_of(name) for name in VERSIONS}
    facts |= nvidia_smi()
    problems, notes = [], []
    if "torch" not in facts["missing"]:
        import torch

        from rlhf_spmd.runtime.world.devices import VISIBLE, hints, visible_devices

        facts["versions"] |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        facts["visible"] = [device.name for device in visible_devices(torch, "")]
        facts["hints"] = hints(os.environ)
        seen = len(facts["visible"])
        told = f"torch sees {seen}, nvidia-smi {facts['num_smi']}, hints are {', '.join(facts['hints']) or 'none'}"
        differ = VISIBLE not in os.environ and facts["num_smi"] not in (0, seen)
        if not light.dry and (seen == 0 or not facts["hints"] or differ):
            problems.append(f"GPUs: {told}; with none, everything would run on the CPU")
        facts["device"] = f"CPU, {torch.get_num_threads()} threads"
        if seen and not light.dry:
            facts |= of_gpu(torch.cuda.get_device_properties(0))
            notes += [f"{facts['free_bytes'] / 2**30:.0f} of {facts['total_bytes'] / 2**30:.0f} GiB free"]
        notes += degraded()
    (light.work / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    print(json.dumps(facts, indent=1))
    light.row(**{key: facts[key] for key in facts if key not in ("versions", "device", "driver", "python")})
    notes += [f"not here: {', '.join(facts['missing'])}"] if facts["missing"] else []
    return Found(not problems, "; ".join([*problems, str(facts.get("device")), *notes]))


def missing(dry: bool) -> list[str]:
    """Returns what the steps need and this machine lacks."""
    needed = dict.fromkeys(name for step in STEPS for name in step.required)
    return [name for name in needed if not is_here(name, dry)]


def is_here(name: str, dry: bool) -> bool:
    if name in (GPU, TWO_GPUS):
        return dry or num_gpus() >= (1 if name == GPU else 2)
    if name == MPI:
        return bool(printed(sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"))
    if name == "mpiexec":
        return any(map(shutil.which, ("mpiexec", "mpirun"))) or Path(sys.executable).with_name(name).exists()
    if name == "compute-sanitizer":
        return dry or shutil.which(name) is not None
    return importlib.util.find_spec(name) is not None


def printed(*command: str) -> list[str]:
    """Returns the lines that a command prints; none if it fails, or does not exist."""
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1:] or f"status {done.returncode}: {command}")
        return []
    return done.stdout.strip().splitlines()


@cache
def num_gpus() -> int:
    """Returns how many GPUs torch finds in a process of its own; none if it can't be asked."""
    lines = printed(sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
    return int(lines[-1]) if lines else 0


def nvidia_smi() -> dict:
    """Returns the driver, and how many devices the tool lists."""
    fields = ["name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit"]
    lines = printed("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    smi = dict(zip(fields, lines[0].split(", "), strict=False)) if lines else {}
    return {"driver": smi.get("driver_version"), "num_smi": len(lines), "smi": smi}


def of_gpu(properties) -> dict:
    """Returns the properties of a device according to torch."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "cache_bytes": properties.L2_cache_size,
        "free_bytes": free,
        "total_bytes": total,
    }


def degraded() -> list[str]:
    """Returns what this torch lacks, and what happens instead."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return ["torch has no varlen_attn: packed sequences are attended to one by one"]
    known, instead = inspect.signature(varlen_attn).parameters, "packed sequences are attended to one by one"
    wanted = {"window_size": instead, "enable_gqa": "grouped keys and values are repeated"}
    return [f"varlen_attn takes no {name}: {what}" for name, what in wanted.items() if name not in known][:1]

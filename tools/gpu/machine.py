"""The machine that the parts run on: devices, driver, versions.

`python -m tools.gpu.machine` prints it as JSON. The runner calls that in a process of its own, so
that it holds no memory of a GPU and survives a driver that does not answer.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

__all__ = ["PACKAGES", "described", "gpu_missing"]

PACKAGES = ("torch", "triton", "vllm", "transformers", "numpy", "pytest")
_QUERY = "name,memory.total,driver_version,pstate,clocks.max.sm"


def described() -> dict[str, Any]:
    """Return the device, the driver and the versions, as JSON values. Imports torch if it can."""
    cpu = _cpu()
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _said("git", "rev-parse", "--short=12", "HEAD"),
        "changed_files": len((_said("git", "status", "--porcelain", "-uno") or "").splitlines()),
        "sanitizer": shutil.which("compute-sanitizer"),
        "nvidia_smi": _said("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"),
    }
    return found | _device()


def gpu_missing(machine: dict[str, Any]) -> str:
    """Return why nothing can run on a GPU here; empty if it can."""
    return "" if machine.get("gpu") else str(machine.get("why_no_gpu") or "no GPU was looked for")


def _device() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"gpu": None, "why_no_gpu": f"torch cannot be imported: {error}"}
    built = torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        build = f"torch is built for CUDA {built}" if built else "torch is a CPU build"
        return {"gpu": None, "why_no_gpu": f"torch sees no GPU ({build})"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": built,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _said(*command: str) -> str | None:
    """Return what a command prints; None if it is not there, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    print(json.dumps(described()))
    sys.exit(0)

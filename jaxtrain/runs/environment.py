"""Environment of a run: devices and their peak FLOP/s, memory, versions, commit."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import psutil


def memory_bytes() -> int:
    """Peak memory of the fullest local device; if unknown (CPU), the process's resident memory."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max(s.get("peak_bytes_in_use", 0) for s in stats) or psutil.Process().memory_info().rss


# Dense bf16 FLOP/s of one JAX device (fp16 if it has no bf16 unit), from data sheets and
# jax/_src/tpu_info.py. The first pattern that matches a whole word of the device kind counts.
# fmt: off
PEAK_FLOPS = {
    "gb300|gb200": 2500e12, "b300|b200": 2250e12,
    "h100 nvl": 835e12, "h100 pcie": 756e12, "gh200|h200|h100|h800": 989e12, "h20": 148e12,
    "a100|a800": 312e12, "a40": 149.7e12, "a30": 165e12, "a10": 125e12, "a10g": 70e12,
    "l40s": 362e12, "l40": 181e12, "l4": 121e12,
    "rtx pro 6000": 503.8e12, "rtx 6000 ada": 364.2e12,
    "rtx 5090": 209.5e12, "rtx 4090": 165.2e12, "rtx 3090": 71e12,
    "v100": 125e12, "t4": 65e12, "p100": 18.7e12,
    "tpu7x": 1155e12, "tpu v6 lite|tpu v6e": 918e12, "tpu v5 lite|tpu v5e": 197e12,
    "tpu v5p|tpu v5": 459e12, "tpu v4": 275e12, "tpu v3": 61.5e12, "tpu v2": 22.5e12,
    "mi355x": 2500e12, "mi300x|mi325x": 1307e12,
}
# fmt: on


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a `jax.Device.device_kind`; None when unknown (MFU is omitted).

    nanochat's convention for the MFU is the bf16 peak, whatever the training precision.
    """
    kind = device_kind.lower()
    if re.search(r"\b(laptop|mig)\b", kind):  # a slice of a card, or a slower one of the same name
        return None
    for pattern, peak in PEAK_FLOPS.items():
        if re.search(rf"\b({pattern})\b", kind):
            return peak
    return None


PACKAGES = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")


def environment() -> dict[str, Any]:
    """The contents of env.json: versions, devices, host, commit, command.

    The commit is $JAXTRAIN_COMMIT (for code copied without git), or else the checkout's.
    """
    device = jax.devices()[0]
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.orig_argv,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "backend": f"{device.platform}: {device.client.platform_version}".splitlines()[0],
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "device_memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def versions() -> dict[str, str]:
    """Versions of the packages that results may depend on."""
    found = {}
    for name in PACKAGES:  # one by one: listing all installed packages is slow
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """The commit of the running code; None if unknown."""
    return os.environ.get("JAXTRAIN_COMMIT") or _git_commit()


def _git_commit() -> str | None:
    """The commit of the checkout this file is tracked in, with `-dirty` if it has changes."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    # The first command fails if this file is installed inside another project's checkout.
    tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, timeout=10, check=True)
        done = subprocess.run(describe, capture_output=True, timeout=10, check=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe(
    bench: str,
    config: str,
    variant: str,
    workload: dict[str, Any] | None = None,
    devices: int | None = None,
    env: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Record of a measurement, without its figures (`metrics` or `rows`, `floor`), as JSON.

    devices: number of devices used; default all.
    env: environment of the process that measured, if it is not this one.
    """
    here = env or environment()
    device = here["device_kind"]
    return {
        "bench": bench,
        "config": config,
        "variant": variant,
        "device": device,
        "device_count": devices or jax.device_count(),
        "workload": workload or {},
        "peers": [],
        "versions": here["versions"] | {"python": here["python"], "backend": here["backend"]},
        "commit": here["commit"],
        "when": here["when"],
    }

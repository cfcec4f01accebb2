"""A measurement as JSON: what was measured, on which device, with which versions."""

import re
from typing import Any

import jax

from jaxtrain.runs.environment import environment


def describe(
    bench: str,
    config: str,
    variant: str,
    workload: dict[str, Any] | None = None,
    devices: int | None = None,
    env: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A record without its figures (`metrics` or `rows`, `floor`). devices: used; default all.

    env: of the process that made the figures, where it is not this one.
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


def stem(record: dict[str, Any]) -> str:
    """`step-gpt_d12-bf16-nvidia_h200`, and `_x8` of eight devices."""
    count = record["device_count"]
    device = record["device"] + (f" x{count}" if count > 1 else "")
    parts = (record["bench"], record["config"], record["variant"], device)
    plain = (re.sub(r"[^a-z0-9]+", "_", part.lower()).strip("_") for part in parts)
    return "-".join(part for part in plain if part)

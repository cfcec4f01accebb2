"""Dry run for the page's form: `jaxtrain estimate` in a separate process."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from jaxtrain.config import shipped_names
from jaxtrain.runs.page.folder import RunFolder
from jaxtrain.settings import UserError

LIMIT = 600  # seconds
RUN = "run:"  # prefix of a run's name: use that run's configuration


def config_asked(folder: RunFolder, name: str) -> str:
    """The value of --config. Raises UserError unless it is a shipped config or a run."""
    if name.startswith(RUN):
        return str(folder.path(name.removeprefix(RUN), "config.yaml"))
    if name not in shipped_names():
        raise UserError(f"no config {name!r}; there are {', '.join(shipped_names())}")
    return name


def arguments_of(folder: RunFolder, asked: dict[str, Any]) -> list[str]:
    """Command-line arguments of a filled form. Raises UserError for an invalid field."""
    texts = {key: asked.get(key, "") for key in ("config", "overrides", "device", "devices")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise UserError(f"{key} must be a string")
    overrides = texts["overrides"].split()
    for one in overrides:
        if not re.match(r"[A-Za-z_][\w.]*=", one):
            raise UserError(f"override {one!r} must be key.path=value, such as train.steps=1000")
    found = [f"--config={config_asked(folder, texts['config'])}", *overrides, "--json"]
    found += [f"--{key}={texts[key]}" for key in ("device", "devices") if texts[key]]
    return found


async def dry_run(arguments: list[str]) -> dict[str, Any]:
    """The record of an estimate. Raises UserError with the command's error line."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jaxtrain.cli", "estimate", *arguments, env=environment,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, cwd=Path.cwd(),
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT)
    except TimeoutError:
        raise UserError(f"the dry run took more than {LIMIT} s and was stopped") from None
    finally:
        if process.returncode is None:  # too slow, or the request was cancelled
            process.kill()
            await process.wait()
    if process.returncode not in (0, 1):  # 1: it does not fit
        raise UserError(last_line(err.decode(errors="replace")))
    return json.loads(out)


def last_line(text: str) -> str:
    """The message of a failed command: its last error line, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["the dry run failed without a message"])[-1]


def answer_of(record: dict[str, Any]) -> dict[str, Any]:
    """The figures of a record that the page shows: whether it fits, tokens per second, hours.

    Pairs are the two ends of a range: without any overlap of collectives and compute, and with
    full overlap.
    """
    m, w = record["metrics"], record["workload"]
    exchanges = m["near_ms"] + m["far_ms"]
    slow, fast = m["compute_ms"] + exchanges, max(m["compute_ms"], exchanges)
    tokens = w["batch_size"] * w["sequence_length"]
    parts = ("frozen", "reference", "parameters", "states", "copy", "gradients", "activations")
    return {
        "fits": m["fits"],
        "advice": record["advice"],
        "device": f"{record['device_count']} x {record['device']}",
        "mesh": w["mesh"],
        "parameters": w["parameters"],
        "steps": w["steps"],
        "tokens_per_step": tokens,
        "total_bytes": m["total_bytes"],
        "device_bytes": m["device_bytes"],
        "parts": {part: m[f"{part}_bytes"] for part in parts if m[f"{part}_bytes"]},
        "ms": [slow, fast],
        "tokens_per_s": [1e3 * tokens / ms for ms in (slow, fast)],
        "hours": [w["steps"] * ms / 3.6e6 for ms in (slow, fast)],
    }

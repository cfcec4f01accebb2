"""`train.fit`: choose the device batch size and remat with which a step fits in device memory.

The choice uses the dry run's estimate, in a separate process that uses no accelerator.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import psutil

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config import Config, find_config, load_config
from jaxtrain.config.overrides import apply_overrides
from jaxtrain.estimate.dry_run import preflight, virtual_devices
from jaxtrain.runs.metrics import format_bytes
from jaxtrain.settings import UserError, read_object
from jaxtrain.storage.strict_yaml import read_saved, read_yaml
from jaxtrain.train.run_directory import check_text

Record = dict[str, Any]
ROWS, REMAT = "train.device_batch_size", "model.remat"
REMATS = ("none", "dots", "block")  # from the fastest to the smallest
COARSE = 2**27  # bytes: free memory differs by less among devices of one kind


def choose(
    name: str | None, overrides: Sequence[str], devices: int, kind: str, memory: int | None
) -> tuple[list[str], Record]:
    """Choose device batch size and remat, unless they are set, so that a step fits.

    Takes the first remat with which the smallest device batch fits, then the largest batch that
    fits: a divisor of the device's share of the global batch. If nothing fits, takes the setting
    that needs least. Returns the overrides and the dry run's record.
    """
    rows, remat = given_fields(name, overrides)
    tried: list[str] = []
    known: dict[tuple[str, ...], Record] = {}

    def measure(now: str, count: int | None) -> Record:
        tried[:] = [f"{REMAT}={now}"] * (remat is None)
        tried.extend([f"{ROWS}={count}"] * (rows is None and count is not None))
        if (key := tuple(tried)) not in known:
            known[key] = preflight(name, [*overrides, *tried], devices, kind, memory)
        return known[key]

    whole = one = measure(remat or REMATS[0], rows)
    if whole["metrics"]["fits"]:
        return tried, whole
    most, least = whole["workload"]["device_batch_size"], whole["workload"].get("batch_overlap", 1)
    for tighter in [remat] if remat else REMATS:
        one = measure(tighter, rows or least)
        if one["metrics"]["fits"]:
            break
    fits = one["workload"]["remat"]
    if rows or most == least or not one["metrics"]["fits"]:
        return tried, one
    if fits != whole["workload"]["remat"]:
        whole = measure(fits, most)
    for count in [n for n in range(most, least, -1) if most % n == 0 and n % least == 0]:
        if estimated(one, whole, count) and (record := measure(fits, count))["metrics"]["fits"]:
            return tried, record
    return tried, measure(fits, least)


def estimated(one: Record, whole: Record, rows: int) -> bool:
    """Whether `rows` may fit, by linear interpolation between the smallest batch and the whole."""
    a, b = (r["metrics"]["total_bytes"] for r in (one, whole))
    least, most = (r["workload"]["device_batch_size"] for r in (one, whole))
    return a + (b - a) * (rows - least) / (most - least) < 0.95 * one["metrics"]["device_bytes"]


def given_fields(name: str | None, overrides: Sequence[str]) -> tuple[int | None, str | None]:
    """(device batch size, remat) that the configuration file and the command line set, without
    defaults and without settings of the model in `train.init_from`."""
    tree = read_yaml(find_config(name)) or {} if name else {}
    apply_overrides(tree, overrides)
    train, model = ({} if tree.get(name) is None else tree[name] for name in ("train", "model"))
    return train.get("device_batch_size"), model.get("remat")


def fitted(
    name: str | None, overrides: Sequence[str], config: Config, coordinator: Coordinator
) -> Config:
    """The configuration with a device batch size and remat that fit this process's devices.

    A run that resumes on the same number of devices of the same kind keeps its settings.
    """
    tuned = config.finetune.name != "full"
    if None not in given_fields(name, overrides) or (tuned and not config.train.init_from):
        return config  # nothing to choose; or no base model to finetune: the run reports that
    check_text(config)
    if kept := choice_of(config.run_dir):
        open_ = [
            key for key, value in zip((ROWS, REMAT), given_fields(name, overrides)) if value is None
        ]
        more = [f"{key}={kept[key]}" for key in open_]
        line = f"{' '.join(more)}, as the run began"
    else:
        more, line = ask(name, overrides, *this_device())
    coordinator.compare({"rows and remat that fit": " ".join(more)}, "set them by hand")
    if coordinator.index == 0:
        print(f"fit      {line}", flush=True)
    return load_config(find_config(name) if name else None, [*overrides, *more])


def choice_of(run_dir: Path) -> dict[str, Any]:
    """The fitted settings of an existing run on the same kind and number of devices, or {}."""
    files = run_dir / "config.yaml", run_dir / "env.json"
    if not all(file.is_file() for file in files) or not (run_dir / "checkpoints").is_dir():
        return {}
    try:
        tree, env = read_saved(files[0]), read_object(files[1])
        train, remat = tree["train"], tree["model"]["remat"]
    except (KeyError, TypeError):
        return {}
    here = jax.devices()[0].device_kind, jax.device_count()
    if not train.get("fit") or (env.get("device_kind"), env.get("device_count")) != here:
        return {}
    return {REMAT: remat, ROWS: train["device_batch_size"]}


def this_device() -> tuple[int, str, int]:
    """(number of devices, the dry run's kind for them, memory bytes of each)."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:  # an equal part of half the host's memory
        limit = psutil.virtual_memory().total // 2 // jax.local_device_count()
    old = device.platform == "gpu" and float(device.compute_capability) < 8
    kind = "CPU" if device.platform == "cpu" else "T4" if old else "A100"
    return jax.device_count(), kind, limit // COARSE * COARSE


def ask(
    name: str | None, overrides: Sequence[str], devices: int, kind: str, memory: int
) -> tuple[list[str], str]:
    """Run `choose` in a process without an accelerator. Returns its overrides and a log line."""
    asked = json.dumps([name, list(overrides), devices, kind, memory])
    quiet = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "jaxtrain.estimate.fit", asked],
        env=os.environ | quiet, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise UserError(
            f"train.fit: the dry run failed; set {ROWS} and {REMAT} by hand, or train.fit=false: "
            f"{(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["overrides"], answer["line"]


def line_of(record: Record) -> str:
    """Log line: the chosen settings, and the device memory that they use."""
    m, w = record["metrics"], record["workload"]
    chosen = f"{ROWS}={w['device_batch_size']} {REMAT}={w['remat']}"
    fits = "" if m["fits"] else ", which may be too much"
    bytes_ = f"{format_bytes(m['total_bytes'])} of {format_bytes(m['device_bytes'])}"
    return f"{chosen}: {bytes_} by the dry run's estimate{fits}"


def main(argument: str) -> None:
    name, overrides, devices, kind, memory = json.loads(argument)
    try:
        virtual_devices(devices)
        more, record = choose(name, overrides, devices, kind, memory)
    except UserError as error:
        sys.exit(str(error))
    print(json.dumps({"overrides": more, "line": line_of(record)}))


if __name__ == "__main__":
    main(sys.argv[1])

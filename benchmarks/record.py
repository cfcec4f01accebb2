"""Benchmark records on disk: one JSON each, with the environment and the peers' figures."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.runs import environment

BENCHMARKS = Path(__file__).parent
Record = dict[str, Any]
RESULTS = BENCHMARKS / "results"


def with_peers[**P](describe: Callable[P, dict[str, Any]]) -> Callable[P, dict[str, Any]]:
    """Wrap `describe` so that records include the peers' figures of their benchmark."""

    def described(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        record = describe(*args, **kwargs)
        return record | {"peers": peers_of(record["bench"], record["config"], record["device"])}

    return described


describe = with_peers(environment.describe)


def stem(record: dict[str, Any]) -> str:
    """File name of a record: `step-gpt_d12-bf16-nvidia_h200`, with `_x8` for eight devices."""
    count = record["device_count"]
    device = record["device"] + (f" x{count}" if count > 1 else "")
    parts = (record["bench"], record["config"], record["variant"], device)
    plain = (re.sub(r"[^a-z0-9]+", "_", part.lower()).strip("_") for part in parts)
    return "-".join(part for part in plain if part)


def write(record: dict[str, Any], directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{stem(record)}.json"
    text = json.dumps(record, indent=1)
    # Put each point of a curve on one line.
    text = re.sub(r"\[\s+([^][{}\"]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(text + "\n")
    return path


def read_results(directory: Path = RESULTS) -> list[dict[str, Any]]:
    """All records, in the order of their file names; `file` is the name."""
    paths = sorted(p for p in directory.glob("*.json") if not p.stem.endswith("-profile"))
    return [json.loads(path.read_text()) | {"file": path.name} for path in paths]


def read_peers() -> list[dict[str, Any]]:
    """Peers' figures measured elsewhere; empty in an installation without the checkout."""
    path = BENCHMARKS / "peers.json"
    return json.loads(path.read_text())["peers"] if path.is_file() else []


def peers_of(bench: str, config: str, device: str | None = None) -> list[dict[str, Any]]:
    """Peers of one benchmark, on one kind of device or on any."""
    return [
        peer
        for peer in read_peers()
        if (peer["bench"], peer["config"]) == (bench, config) and device in (None, peer["device"])
    ]

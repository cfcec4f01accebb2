"""Details of one run, other than its curves: data, tasks, files, commands to copy."""

import shlex
import socket
from typing import Any

from jaxtrain.cluster.started_by import command_of, typed_again
from jaxtrain.runs.page.folder import RunFolder
from jaxtrain.settings import visible

MAX_SAMPLE = 20_000  # characters
ENVIRONMENT = (
    "when", "device_kind", "device_count", "process_count", "commit", "python", "platform",
    "backend", "cpu_count", "versions", "revisions",
)  # fmt: skip
SOURCE = ("documents", "tokens", "bytes", "skipped", "lengths")


def details_of(folder: RunFolder, name: str) -> dict[str, Any]:
    """Everything about a run that is not in its rows, as JSON. Raises UserError for no run."""
    env = folder.object(name, "env.json")
    return {
        "name": name,
        "config": folder.text(name, "config.yaml"),
        "environment": {key: env[key] for key in ENVIRONMENT if env.get(key)},
        "data": data_sources(folder.object(name, "data.json")),
        "tasks": folder.object(name, "tasks.json"),
        "checkpoints": folder.steps_saved(name),
        "model": folder.path(name, "model", "config.yaml").is_file(),
        "report": folder.path(name, "report.html").is_file(),
        "commands": commands_of(folder, name, env.get("command")),
    }


def data_sources(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of each source in `data.json` that the page shows."""
    found = {name: source for name, source in data.items() if isinstance(source, dict)}
    kept = lambda source: {key: source[key] for key in SOURCE if is_counted(source.get(key))}
    return {name: kept(source) for name, source in found.items()}


def is_counted(value: object) -> bool:
    """Whether a value is an int, or a dict of ints."""
    if isinstance(value, dict):
        return all(type(one) is int for one in value.values())
    return type(value) is int


def commands_of(folder: RunFolder, name: str, typed: object) -> list[dict[str, str]]:
    """Shell commands for a run, each {label, command}."""
    run_dir = folder.shown / name
    start = typed_again(typed) or command_of("train", "--config", run_dir / "config.yaml")
    found = [("Start or resume (the same command)", start)]
    if holder := folder.holder(name):
        stop = f"kill {holder.pid}"
        remote = holder.host != socket.gethostname()
        stop = f"ssh {shlex.quote(holder.host)} {stop}" if remote else stop
        found += [("Stop after a checkpoint", stop)]
    saved = folder.steps_saved(name)
    if folder.path(name, "model", "config.yaml").is_file() or saved:
        found += [("Chat in the terminal", command_of("chat", run_dir))]
        found += [
            (f"Chat with step {step}", command_of("chat", run_dir, "--step", step))
            for step in saved[-1:]
        ]
        found += [("Serve by OpenAI's API", command_of("serve", run_dir))]
        found += [("Evaluate", command_of("evaluate", run_dir))]
    if folder.path(name, "metrics.jsonl").is_file():
        found += [("Write the report", command_of("report", run_dir))]
    return [{"label": label, "command": command} for label, command in found]


def sample_of(folder: RunFolder, name: str, step: int) -> str | None:
    """The sample that a run's model wrote at a step; None if there is none."""
    file = folder.samples(name).get(step)
    text = folder.text(name, "samples", file, limit=MAX_SAMPLE) if file else None
    return None if text is None else visible(text)

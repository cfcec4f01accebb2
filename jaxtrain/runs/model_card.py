"""Model card of an exported run: README.md, with metadata for the Hugging Face Hub."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.cluster.started_by import typed_again
from jaxtrain.runs.history import MetricsRow, read_rows
from jaxtrain.runs.job import leaves
from jaxtrain.settings import UserError, read_object, visible
from jaxtrain.storage.strict_yaml import read_yaml

FIGURES = (("loss", "loss, nats per token"), ("bpb", "bits per byte"))
SHOWN = (
    "model.depth", "model.width", "model.context_length", "optim.name", "train.steps",
    "train.batch_size", "train.sequence_length", "train.precision", "objective.name",
    "finetune.name", "run.seed",
)  # fmt: skip


def run_of(path: Path) -> Path:
    """The run directory, given it or its `model/` folder."""
    return path.resolve().parent if path.resolve().name == "model" else path


def write_card(
    run: Path, out: Path, name: str, licence: str | None, base: Mapping[str, str]
) -> Path:
    """Write `out/README.md` about a run; returns its path. Any of the run's files may be missing.

    base: the result of `base_model_metadata`.
    """
    run_dir = run_of(run)
    path = out / "README.md"
    metadata: dict[str, Any] = {"library_name": "transformers", "tags": ["jaxtrain"]}
    if licence:
        metadata["license"] = licence
    if base:
        metadata["base_model"] = base["base_model"]
    rows = read_rows(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").is_file() else []
    env, config = found_object(run_dir / "env.json"), run_dir / "config.yaml"
    parts = [
        # JSON is valid YAML, and no string in it can end the front matter.
        f"---\n{json.dumps(metadata, indent=2)}\n---\n\n# {name.rpartition('/')[2]}",
        origin_text(licence, base),
        card_section("Training", training_facts(rows, env)),
        card_section("Data", data_facts(found_object(run_dir / "data.json"))),
        card_section("Evaluation", evaluation_facts(rows, found_object(run_dir / "tasks.json"))),
        card_section(
            "Settings", settings_facts(leaves(read_yaml(config))) if config.is_file() else []
        ),
    ]
    if command := typed_again(env.get("command")):
        parts += ["## Command\n\n" + indented(command)]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return path


def found_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if it is missing or damaged."""
    try:
        return read_object(path)
    except UserError:
        return {}


def origin_text(licence: str | None, base: Mapping[str, str]) -> str:
    lines = ["Trained with [jaxtrain](https://github.com/jaxtrain/jaxtrain)."]
    if base:
        at = base["base_model_revision"]
        lines.append(
            f"It began from {table_cell(base['base_model'])} at revision {table_cell(at)}."
        )
    if not licence:
        lines.append("Its author has not named a licence.")
    return " ".join(lines)


def training_facts(rows: Sequence[MetricsRow], env: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Parameters, steps, tokens, device and version."""
    start: MetricsRow = next((r for r in reversed(rows) if r.get("event") == "start"), {})
    last: MetricsRow = next((r for r in reversed(rows) if r["kind"] == "train"), {})
    found = [
        ("parameters", counted(start.get("parameters"))), ("steps", counted(last.get("step"))),
        ("tokens", counted(last.get("tokens"))),
    ]  # fmt: skip
    if kind := env.get("device_kind"):
        found.append(("device", f"{env.get('device_count', 1)} x {kind}"))
    versions = env.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    found.append(("jaxtrain", f"{versions.get('jaxtrain', '')} {env.get('commit') or ''}".strip()))
    return [(label, value) for label, value in found if value]


def data_facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Documents and tokens of each source."""
    sources = {name: one for name, one in data.items() if isinstance(one, dict)}
    return [
        (name, f"{counted(one.get('documents'))} documents, {counted(one.get('tokens'))} tokens")
        for name, one in sources.items()
    ]


def evaluation_facts(rows: Sequence[MetricsRow], tasks: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The last training and validation figures, and the CORE score."""
    found = []
    for kind in ("train", "validation"):
        last: MetricsRow = next((r for r in reversed(rows) if r["kind"] == kind), {})
        word = "training" if kind == "train" else kind
        for key, label in FIGURES:
            if isinstance(last.get(key), (int, float)):
                step = f"{last[key]:.4f} at step {last['step']:,}"
                found.append((f"{word} {label}", step))
    if isinstance(tasks.get("core"), (int, float)):
        found.append(("CORE", f"{tasks['core']:.4f}"))
    return found


def settings_facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, str(values[key])) for key in SHOWN if values.get(key) is not None]


def card_section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A Markdown heading and table; empty without rows."""
    if not rows:
        return ""
    lines = [f"| {table_cell(label)} | {table_cell(value)} |" for label, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


def table_cell(text: str) -> str:
    """A string escaped for one cell of a Markdown table."""
    plain = " ".join(visible(text).split())
    return "".join(f"\\{letter}" if letter in "\\|<>[]`*_#" else letter for letter in plain)


def indented(text: str) -> str:
    """A string as an indented code block, which backticks in it cannot end."""
    return "\n".join(f"    {line}" for line in visible(text).splitlines())


def counted(value: object) -> str:
    return f"{value:,}" if type(value) is int else ""

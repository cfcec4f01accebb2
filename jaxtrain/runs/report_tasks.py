"""The report's section about in-context tasks, from what `evaluate --tasks` has written."""

import json
from contextlib import suppress
from html import escape
from pathlib import Path


def tasks_section(run_dir: Path) -> str:
    """A table of the tasks in `run_dir/tasks.json`; nothing if there are none."""
    result = {}
    with suppress(OSError, ValueError):  # not asked yet, or torn by a crash
        result = json.loads((run_dir / "tasks.json").read_text("utf-8"))
    if not result.get("tasks"):
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("task", "examples", "accuracy", "centered"))
    rows = [
        f"<tr><th>{escape(label)}</th><td>{r['examples']:,}</td>"
        f"<td>{r['accuracy']:.4f} &plusmn; {r['error']:.4f}, chance {r['chance']:.3f}</td>"
        f"<td>{r['centered']:.4f}</td></tr>"
        for label, r in result["tasks"].items()
    ]
    if "core" in result:
        rows.append(f"<tr><th>CORE</th><td></td><td></td><td>{result['core']:.4f}</td></tr>")
    table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    return f'<h2>Tasks</h2><div class="wide">{table}</div>'

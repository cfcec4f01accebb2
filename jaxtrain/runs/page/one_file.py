"""`jaxtrain compare --html`: a comparison as one self-contained HTML file."""

import hashlib
import json
import math
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.runs.compare import Comparison, Run, comparison_tree
from jaxtrain.runs.history import MetricsRow
from jaxtrain.storage.disk import write_whole

STATIC = Path(__file__).with_name("static")
STYLES = ("uplot.css", "page.css")
SCRIPTS = ("uplot.js", "store.js", "dom.js", "charts.js", "curves.js", "one_file.js")
MAX_ROWS = 4000  # rows per run and kind
DIGITS = 6  # significant digits of a float
BODY = """<header><h1>jaxtrain <span>comparison</span></h1>
<button type="button" id="theme">Theme</button></header>
<main><div id="figures"></div><h2>Curves</h2><div id="curves"></div></main>
<p id="live" class="hidden" aria-live="polite"></p>"""


def write_page(c: Comparison, runs: Sequence[Run], path: Path) -> Path:
    """Write the page; returns `path`. Long runs are downsampled."""
    kept = [
        {"name": one.name, "rows": rows_kept(run.rows)}
        for one, run in zip(c.runs, runs, strict=True)
    ]
    data = json.dumps({"comparison": comparison_tree(c), "runs": kept}, allow_nan=False)
    style = "\n".join((STATIC / name).read_text("utf-8") for name in STYLES)
    scripts = [(STATIC / name).read_text("utf-8") for name in SCRIPTS]
    # In a <script> element only `</script` and `<!--` end or change the parsing.
    parts = "".join(f"<script>{text}</script>" for text in scripts)
    policy = (
        f"default-src 'none'; style-src {source(style)}; "
        f"script-src {' '.join(map(source, scripts))}; base-uri 'none'; form-action 'none'"
    )
    licence = (STATIC / "uplot-LICENSE").read_text("utf-8")
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>comparison of {len(runs)} runs</title><style>{style}</style>"
    )
    embedded = data.replace("<", "\\u003c")
    page = (
        f'<!doctype html>\n<html lang="en" data-theme="auto"><head>{head}</head>\n<body>{BODY}\n'
        f'<script type="application/json" id="data">{embedded}</script>\n'
        f"<!-- uPlot:\n{licence}-->\n{parts}</body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)
    return path


def source(text: str) -> str:
    """The hash with which a Content-Security-Policy allows an inline script or style."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def rows_kept(rows: Sequence[MetricsRow]) -> list[dict[str, Any]]:
    """The last start row, and at most MAX_ROWS training and validation rows each: evenly spaced,
    including the last."""
    found = [row for row in rows if row.get("event") == "start"][-1:]
    for kind in ("train", "validation"):
        some = [row for row in rows if row["kind"] == kind]
        stride = math.ceil(len(some) / MAX_ROWS) or 1
        found += some[::-1][::stride][::-1]
    return [
        {key: shortened(value) for key, value in row.items() if value is not None} for row in found
    ]


def shortened(value: object) -> object:
    """Round a float to DIGITS significant digits; None if it is not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None

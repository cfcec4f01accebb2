"""Facts that must be equal in all processes of a job: code, versions, configuration."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jaxtrain_kernels

from jaxtrain.config import Sections
from jaxtrain.runs.environment import commit, versions


def facts(config: Sections) -> dict[str, Any]:
    """Facts that all processes of a job compare before anything is computed."""
    roots = Path(__file__).parents[1], Path(jaxtrain_kernels.__path__[0])
    files = [path for root in roots for path in sorted(root.rglob("*.py"))]
    code = hashlib.sha256(b"".join(p.read_bytes() for p in files))
    tree = config.model_dump(mode="json")
    for name in ("cache_dir", "local_cache"):  # may differ: local disks of each host
        tree["data"].pop(name)
    return {
        "the commit": str(commit()),
        "source code of digest": code.hexdigest()[:12],
        "Python": platform.python_version(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        **versions(),
        **leaves(tree),
    }


def leaves(tree: object, path: str = "") -> dict[str, Any]:
    """The values of a nested tree, keyed by dotted path."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    nested = (leaves(value, f"{path}.{k}" if path else str(k)) for k, value in tree.items())
    return {key: text for part in nested for key, text in part.items()}

"""TensorBoard's event files."""

import importlib
import sys
from pathlib import Path
from typing import Any


def open_events(folder: Path, **options: Any) -> Any:
    """Open tensorboardX's SummaryWriter. options: its own.

    Its import would import torch, where that is installed, for tensors that are not logged here:
    3 s before the first step. So torch is hidden during the import.
    """
    modules: dict[str, Any] = vars(sys)["modules"]
    hidden = modules.setdefault("torch", None) is None
    try:
        return importlib.import_module("tensorboardX").SummaryWriter(str(folder), **options)
    finally:
        if hidden:
            del modules["torch"]

"""Optimizers: one file and one row of OPTIMIZERS each."""

from typing import Annotated, Any

from pydantic import Field

from jaxtrain.optim.adamw import AdamWConfig, adamw
from jaxtrain.optim.groups import Optimizer, build
from jaxtrain.optim.lion import LionConfig, lion
from jaxtrain.optim.muon import MuonConfig, muon

OPTIMIZERS = {"muon": muon, "adamw": adamw, "lion": lion}
OptimConfig = Annotated[MuonConfig | AdamWConfig | LionConfig, Field(discriminator="name")]


def make_optimizer(c: Any, specs: Any, total_steps: int) -> Optimizer:
    """The configured optimizer for a tree of parameter declarations."""
    return build(c, OPTIMIZERS[c.name](c), specs, total_steps)


__all__ = [
    "OPTIMIZERS", "AdamWConfig", "LionConfig", "MuonConfig", "OptimConfig", "Optimizer",
    "make_optimizer",
]  # fmt: skip

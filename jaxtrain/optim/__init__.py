"""Optimizers, each with one file and one row of OPTIMIZERS; their wrappers are in WRAPPERS."""

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from jaxtrain.optim.adafactor import AdafactorConfig, adafactor
from jaxtrain.optim.adamw import AdamWConfig, adamw
from jaxtrain.optim.adamw8bit import AdamW8bitConfig, adamw8bit
from jaxtrain.optim.galore import GaLoreConfig, galore
from jaxtrain.optim.lamb import LAMBConfig, lamb
from jaxtrain.optim.lars import LARSConfig, lars
from jaxtrain.optim.lion import LionConfig, lion
from jaxtrain.optim.merge_states import is_mergeable, mean_over_replicas, merge_states
from jaxtrain.optim.muon import DECAY, MuonConfig, Scale, muon, resolve_muon
from jaxtrain.optim.param_groups import Optimizer, OptimizerConfig, ParamGroup, build_optimizer
from jaxtrain.optim.rate_schedule import Shares
from jaxtrain.optim.schedule import shorten_warmup
from jaxtrain.optim.schedule_free import ScheduleFreeConfig, schedule_free
from jaxtrain.optim.sgd import SGDConfig, sgd
from jaxtrain.optim.soap import SOAPConfig, soap
from jaxtrain.optim.wrappers import WRAPPERS
from jaxtrain.weights.params import Specs

OPTIMIZERS: dict[str, Callable[..., dict[str, ParamGroup]]] = {
    "muon": muon,
    "adamw": adamw,
    "adamw8bit": adamw8bit,
    "schedule_free": schedule_free,
    "lion": lion,
    "soap": soap,
    "galore": galore,
    "adafactor": adafactor,
    "sgd": sgd,
    "lamb": lamb,
    "lars": lars,
}
OptimConfig = Annotated[
    MuonConfig
    | AdamWConfig
    | AdamW8bitConfig
    | ScheduleFreeConfig
    | LionConfig
    | SOAPConfig
    | GaLoreConfig
    | AdafactorConfig
    | SGDConfig
    | LAMBConfig
    | LARSConfig,
    Field(discriminator="name"),
]


def resolve_optimizer(c: OptimConfig, scale: Scale) -> OptimConfig:
    """The configuration with the rates derived from the scale of the run."""
    return resolve_muon(c, scale) if isinstance(c, MuonConfig) else c


def make_optimizer(
    c: OptimConfig | OptimizerConfig,
    specs: Specs,
    total_steps: int,
    batch_tokens: int | None = None,
    shares: Shares = (),
) -> Optimizer:
    """Make the configured optimizer for a tree of parameter declarations.

    batch_tokens: tokens per step, for `optim.batch_scaling`; None leaves the rates unchanged.
    shares: if steps differ in size, (first step, size of the steps from there on).
    """
    name = vars(c)["name"]  # every configuration has one; the base class does not
    table = OPTIMIZERS[name](c)
    return build_optimizer(c, c.schedule, table, specs, total_steps, batch_tokens, shares)


__all__ = [
    "DECAY", "OPTIMIZERS", "WRAPPERS", "AdafactorConfig", "AdamW8bitConfig", "AdamWConfig",
    "GaLoreConfig", "LAMBConfig", "LARSConfig", "LionConfig", "MuonConfig", "OptimConfig",
    "Optimizer", "SGDConfig", "SOAPConfig", "Scale", "ScheduleFreeConfig", "is_mergeable",
    "make_optimizer", "mean_over_replicas", "merge_states", "resolve_optimizer", "shorten_warmup",
]  # fmt: skip

"""An engine of a model on disk."""

from pathlib import Path

import jax

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.engine.requests import DEFAULT, EngineOptions
from jaxtrain.model import cast
from jaxtrain.runs.saved import load_saved


def load_engine(run: Path, step: int | None = None, options: EngineOptions = DEFAULT) -> Engine:
    """The engine of a run directory or model folder, a quantized one too. Raises UserError."""
    saved = load_saved(run, step)
    dtype = compute_dtype(saved.config.train.precision)
    params = cast(jax.device_put(saved.params), saved.specs, dtype)
    return Engine(
        saved.config.model, saved.graphdef, params, saved.tokenizer, saved.prompting.stops, options
    )

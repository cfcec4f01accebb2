"""An engine of a model on disk."""

from pathlib import Path

import jax

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.engine.requests import DEFAULT, EngineOptions
from jaxtrain.model import cast
from jaxtrain.parallel import MeshConfig, make_mesh
from jaxtrain.parallel.mesh import check_divides
from jaxtrain.runs.saved import Saved, load_saved, place_params


def load_engine(run: Path, step: int | None = None, options: EngineOptions = DEFAULT) -> Engine:
    """The engine of a run directory or model folder, a quantized one too. Raises UserError."""
    return engine_of(load_saved(run, step), options)


def engine_of(saved: Saved, options: EngineOptions = DEFAULT) -> Engine:
    """The engine of a model that was read already, in its compute dtype."""
    c, mesh = saved.config.model, None
    dtype = compute_dtype(saved.config.train.precision)
    in_dtype = lambda params: cast(params, saved.specs, dtype)
    if options.tensor > 1:
        devices, dims = jax.devices(), {"heads": c.heads}
        check_divides("tensor", options.tensor, dims | {"devices": len(devices)}, "the number of")
        mesh = make_mesh(
            MeshConfig.model_validate(dict(data=1, tensor=options.tensor)),
            devices[: options.tensor],
        )
        with jax.set_mesh(mesh):
            params = jax.jit(in_dtype)(place_params(saved, mesh))
    else:
        params = in_dtype(jax.device_put(saved.params))
    model = c, saved.graphdef, params, saved.tokenizer, saved.prompting.stops
    return Engine(*model, options, mesh)

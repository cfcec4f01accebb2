"""Load an engine from a model on disk."""

from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.data import Tokenizer
from jaxtrain.inference.engine.adapters import load_adapters
from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.engine.programs import EngineModel
from jaxtrain.inference.engine.requests import DEFAULT, EngineOptions
from jaxtrain.model import Params, cast
from jaxtrain.model.stack import codes_in_fragments, take_apart, transpose_large
from jaxtrain.parallel import MeshConfig, make_mesh
from jaxtrain.parallel.mesh import check_divides
from jaxtrain.runs.saved import Saved, load_saved, place_params
from jaxtrain.settings import UserError


def load_engine(run: Path, step: int | None = None, options: EngineOptions = DEFAULT) -> Engine:
    """Engine of a run directory or model folder, which may be quantized. Raises UserError."""
    return engine_of(load_saved(run, step), options)


def engine_of(saved: Saved, options: EngineOptions = DEFAULT) -> Engine:
    """Engine of a loaded model, in its compute dtype."""
    c, mesh = saved.config.model, None
    if options.tensor > 1:
        devices, dims = jax.devices(), {"heads": c.heads}
        check_divides("tensor", options.tensor, dims | {"devices": len(devices)}, "the number of")
        sizes = MeshConfig.model_validate({"data": 1, "tensor": options.tensor})
        mesh = make_mesh(sizes, devices[: options.tensor])
    drafter = load_drafter(options, saved.tokenizer, mesh)
    params = params_of(saved, mesh)
    if options.adapters:
        params = load_adapters(saved, params, options.adapters, mesh)
    if mesh is None:
        take_apart(params, saved.specs)
        transpose_large(params, saved.specs, options.slots)
        codes_in_fragments(params, saved.specs, options.slots * (1 + options.drafts))
    model = c, saved.graphdef, params, saved.tokenizer, saved.prompting.stops
    return Engine(*model, options, mesh, drafter, [name for name, _ in options.adapters])


def load_drafter(
    options: EngineOptions, tokenizer: Tokenizer, mesh: Mesh | None
) -> EngineModel | None:
    """Load the draft model of `draft_run`, if there is one, onto the mesh. Raises UserError if its
    tokenizer differs or `drafts` is 0."""
    if options.draft_run is None:
        return None
    small = load_saved(options.draft_run)
    if small.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(f"draft_run {options.draft_run}: its tokenizer differs from the model's")
    if not options.drafts:
        raise UserError(
            "draft_run needs drafts, the draft tokens per step; set drafts, for example to 4"
        )
    return EngineModel(small.config.model, small.graphdef, params_of(small, mesh))


def params_of(saved: Saved, mesh: Mesh | None) -> Params:
    """Parameters in their compute dtype, on the first device, or sharded over the mesh."""
    dtype = compute_dtype(saved.config.train.precision)
    in_dtype = lambda params: cast(params, saved.specs, dtype)
    if mesh is None:
        return in_dtype(jax.device_put(saved.params))
    with jax.set_mesh(mesh):
        return jax.jit(in_dtype)(place_params(saved, mesh))

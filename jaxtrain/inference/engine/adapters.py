"""LoRA adapters of one model, read from peft folders or jaxtrain runs."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.finetune import (
    LoRAConfig,
    adapter_folder,
    adapter_settings,
    lora_scale,
    make_partition,
)
from jaxtrain.interop.peft import modules, read_adapter
from jaxtrain.interop.tensors import read, read_header
from jaxtrain.model import column_norms
from jaxtrain.parallel import partition_spec
from jaxtrain.runs.saved import WEIGHTS, Saved
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.multi_lora import LoRAFactors, with_adapters
from jaxtrain.weights.params import Params, ParamSpec

Adapters = Sequence[tuple[str, Path]]
# Matrices that decoding applies to cached latents (MLA): one for all rows, so without adapters.
LATENT = ("k_up", "v_up")


def load_adapters(saved: Saved, params: Params, adapters: Adapters, mesh: Mesh | None) -> Params:
    """Parameters on their devices, with the LoRA factors of adapters added to their matrices.

    Raises UserError for an adapter that does not fit the model.
    """
    form = saved.config.model.weight_form
    if form is not None and not form.for_training:
        raise UserError(
            f"adapters: the model has model.weight_form={form.name}, to which "
            "adapters cannot be added; serve the adapter's merged model instead"
        )
    found = [read_factors(saved, params, name, folder) for name, folder in adapters]
    names = dict.fromkeys(name for one in found for name in one)
    changes = {name: [one.get(name) for one in found] for name in names}
    if mesh is None:
        return with_adapters(params, changes)
    specs = flatten(saved.specs)
    changes = {
        name: [place_factors(one, specs[name], mesh) for one in some]
        for name, some in changes.items()
    }
    with jax.set_mesh(mesh):
        return with_adapters(params, changes)


def read_factors(saved: Saved, params: Params, name: str, path: Path) -> dict[str, LoRAFactors]:
    """LoRA factors by matrix name. B includes the LoRA scale."""
    where = f"adapter {name}={path}"
    folder = adapter_folder(str(path), f"adapter {name}:")
    try:
        c = LoRAConfig.model_validate(adapter_settings(folder))
        check_base(saved, folder.parent)
        dtype = compute_dtype(saved.config.train.precision)
        like = make_partition(c, saved.specs, dtype).trainable
        values = flatten(read_adapter(folder, saved.config.model, like))
    except UserError as error:
        raise UserError(
            f"{where}: it does not fit the model {saved.tokenizer_dir}: {error.args[0]}"
        ) from None
    names = modules(values)
    for matrix in names:
        if matrix.rpartition("/")[2] in LATENT:
            raise UserError(
                f"{where}: it changes {matrix}, which decoding shares between all requests; "
                "serve its merged model instead"
            )
    base, scale = flatten(params), lora_scale(c)

    def factors(matrix: str) -> LoRAFactors:
        a, b = (jnp.asarray(values[f"{matrix}/{part}"], jnp.float32) for part in "ab")
        columns = None
        if c.dora:
            norms = column_norms(base[matrix], a, b, scale)
            columns = jnp.asarray(values[f"{matrix}/magnitude"]) / norms
        return LoRAFactors(a.astype(dtype), (scale * b).astype(dtype), columns)

    return {matrix: factors(matrix) for matrix in names}


def check_base(saved: Saved, folder: Path) -> None:
    """Raise UserError if the run of an adapter was tuned from another model.

    Compares the embedding of its merged model. A peft folder has no merged model and is not
    checked.
    """
    if not (folder / WEIGHTS).is_file():
        return
    theirs, ours = read_header(folder / WEIGHTS), np.asarray(saved.params["embed"])
    same = "embed" in theirs and theirs["embed"].shape == ours.shape
    if same:
        x, y = (jnp.asarray(x, jnp.float32) for x in (ours, read("embed", theirs["embed"])))
        same = bool(jnp.allclose(x, y, rtol=2**-7, atol=1e-6))  # it may be rounded to bfloat16
    if not same:
        raise UserError("it was tuned from another model: its embeddings differ")


def place_factors(one: LoRAFactors | None, spec: ParamSpec, mesh: Mesh) -> LoRAFactors | None:
    """Put LoRA factors on a mesh: A is sharded like the matrix's inputs, B like its outputs."""
    if one is None:
        return None
    layers, ins, outs = spec.axes

    def put(x: Array, *axes: str | None) -> Array:
        return jax.device_put(x, NamedSharding(mesh, partition_spec(axes, x.shape, mesh)))

    columns = None if one.columns is None else put(one.columns, layers, outs)
    return LoRAFactors(put(one.a, layers, ins, None), put(one.b, layers, None, outs), columns)

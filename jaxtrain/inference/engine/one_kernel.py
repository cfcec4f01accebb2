"""Megakernel of all layers of a decode step: whether an engine supports it, and its weights."""

import logging
from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtrain_kernels.decode_layers import LayersWeights
from jaxtyping import PyTree

from jaxtrain.inference.engine.pages import bytes_of, free_bytes
from jaxtrain.inference.engine.programs import EngineModel
from jaxtrain.inference.engine.requests import EngineOptions
from jaxtrain.model.packed import kernel_of, pack_layers, why_not_packed

log = logging.getLogger(__name__)


def packed_layers(
    options: EngineOptions, graphdefs: Sequence[nnx.GraphDef], models: Sequence[EngineModel],
    page: PyTree, pages: int, mesh: Mesh | None,
) -> LayersWeights | None:  # fmt: skip
    """Packed layers of the first model. None if the megakernel is off or unsupported; the latter is
    logged if it was requested. page: page shapes of the first model's layers (`page_shapes`),
    pages: their number per layer."""
    if options.megakernel is False:
        return None
    if why := why_not_engine(options, models, page, pages, mesh):
        if options.megakernel:
            log.warning("megakernel is off: one kernel for all layers %s", why)
        return None
    c, params = models[0].config, models[0].params
    kernel, _ = kernel_of(c, params, page_stack(page, pages))
    return pack_layers(kernel, graphdefs[0], params)


def page_stack(page: PyTree, pages: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Keys and values of all layers, whose pages are equal."""
    one = jax.tree.leaves(page[0])[0]
    stack = jax.ShapeDtypeStruct((len(page), pages, *one.shape[1:]), one.dtype)
    return stack, stack


def why_not_engine(
    options: EngineOptions,
    models: Sequence[EngineModel],
    page: PyTree,
    pages: int,
    mesh: Mesh | None,
) -> str | None:
    """Reason why an engine cannot use the megakernel; None if it can."""
    c, params = models[0].config, models[0].params
    context = options.context or c.context_length
    if options.slots > 1:
        return f"needs slots=1, got {options.slots}"
    if options.drafts or len(models) > 1:
        return "has no drafts"
    if mesh is not None:
        return "needs one device"
    if context > c.context_length:
        return f"needs a context up to the model's {c.context_length}, got {context}"
    # While packing, memory holds each layer's matrices twice.
    need = pages * bytes_of(page) + 2 * bytes_of(params["blocks"])
    if (free := free_bytes(params)) is not None and need > free:
        return f"needs {need / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
    arrays = [jax.tree.leaves(layer) for layer in page]
    if any(len(layer) != 2 or layer[0].shape != arrays[0][0].shape for layer in arrays):
        return "needs pages of keys and values, equal in all layers"
    return why_not_packed(c, params, page_stack(page, pages))

"""Declaration, storage and matmuls of parameters: float8, int8, int4, nf4, fp4, 2:4, adapters.

`model/` uses the weights; `finetune/` selects the trainable ones. A new form is one file here and
one row of WEIGHTS: the tests then try it on every matrix of a block of every family.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxtrain.weights import fake_quant, int8_training, microscaling
from jaxtrain.weights.contract import Weight, dequantize
from jaxtrain.weights.float8 import quantize_float8
from jaxtrain.weights.float8_storage import quantize_e4m3
from jaxtrain.weights.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from jaxtrain.weights.int4 import quantize_int4, quantize_offset_int4
from jaxtrain.weights.params import Params, Specs, is_block_matrix
from jaxtrain.weights.quantized import quantize
from jaxtrain.weights.two_four import sparse_2_4


class Form(NamedTuple):
    """A form of matrices: how and when arrays are encoded.

    encode: maps a stack of matrices [L, K, N] to a `Weight`, or to an array with the usual matmul.
    encoded_at: when to encode. `storage`: once, frozen (finetune.base_quantization, `jaxtrain
    quantize`). `step`: once per step (model.fp8). `layer`: each time that a layer uses the matrix
    [.., K, N] (model.weight_form). `training`: as `layer`, in training steps only. `layer` and
    `training` get the options that model.weight_form sets, by name; `training` also gets a PRNG
    key, and leaves experts as arrays.
    saved: how a trained model is saved. `master`: `model/` holds the encoded trained arrays.
    `compute`: `model/` holds the trained arrays; an export and `jaxtrain quantize` start from their
    copies in the compute dtype, encoded as in training. None: they start from the trained arrays.
    """

    encode: Callable[..., Array | Weight]
    encoded_at: Literal["storage", "step", "layer", "training"]
    options: frozenset[str] = frozenset()
    saved: Literal["master", "compute"] | None = None


def mx_form(operand: Format, gradient: Format) -> Form:
    encode = functools.partial(microscaling.mx, operand=operand, gradient=gradient)
    return Form(encode, "training", ROUNDING)


def each_matrix(encode: Callable[[Array], Weight]) -> Callable[[Array], Weight]:
    """Apply an encoder of one matrix [K, N] to each matrix of a stack [L, K, N]."""
    return jax.jit(functools.partial(jax.lax.map, encode))


STOCHASTIC = frozenset({"stochastic_rounding"})
ROUNDING = STOCHASTIC | {"hadamard"}
ACTIVATIONS = frozenset({"activations"})
WEIGHTS: dict[str, Form] = {
    "nf4": Form(functools.partial(quantize, kind="nf4"), "storage"),
    "int8": Form(functools.partial(quantize, kind="int8"), "storage"),
    "int4": Form(each_matrix(quantize_int4), "storage"),
    "int4_offset": Form(each_matrix(quantize_offset_int4), "storage"),
    "float8_e4m3": Form(each_matrix(quantize_e4m3), "storage"),
    "float8": Form(quantize_float8, "step"),
    "fake_int8": Form(fake_quant.int8, "layer", ACTIVATIONS, "compute"),
    "fake_int4": Form(fake_quant.int4, "layer", ACTIVATIONS | {"group_size"}, "compute"),
    "sparse_2_4": Form(sparse_2_4, "layer", saved="master"),
    "mxfp8": mx_form(E4M3, E4M3),
    "mxfp8_e5m2": mx_form(E4M3, E5M2),
    "mxfp6_e2m3": mx_form(E2M3, E2M3),
    "mxfp6_e3m2": mx_form(E3M2, E3M2),
    "mxfp4": mx_form(E2M1, E2M1),
    "nvfp4": Form(microscaling.nvfp4, "training", ROUNDING),
    "int8_training": Form(int8_training.int8_training, "training", STOCHASTIC),
    "switchback": Form(
        functools.partial(int8_training.int8_training, switchback=True), "training", STOCHASTIC
    ),
}
LAYER_FORMS = tuple(
    name for name, form in WEIGHTS.items() if form.encoded_at in ("layer", "training")
)
TRAINING_FORMS = tuple(name for name, form in WEIGHTS.items() if form.encoded_at == "training")


def encode_matrices(
    params: Params, specs: Specs, form: str, options: Mapping[str, Any], dtype: jnp.dtype
) -> Params:
    """The parameters, with the blocks' matrices rounded to `dtype`, encoded by a `layer` form, and
    dequantized to float32."""

    @jax.jit
    def encode(p: Array) -> Array:
        rounded = jax.lax.reduce_precision(p, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
        return dequantize(WEIGHTS[form].encode(rounded, **options))

    chosen = lambda p, s: encode(jnp.asarray(p, jnp.float32)) if is_block_matrix(s) else p
    return jax.tree.map(chosen, params, specs)

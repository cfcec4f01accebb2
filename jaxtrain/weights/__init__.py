"""How a parameter is declared, stored and multiplied: float8, int8, int4, nf4, fp4, 2:4, adapters.

What uses a weight is in `model/`; what trains is in `finetune/`. A new form is one file here and
one row of WEIGHTS: the tests then try it on every matrix of a block of every family.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxtrain.weights import fake_quant, int8_training, microscaling
from jaxtrain.weights.contract import Weight
from jaxtrain.weights.float8 import quantize_float8
from jaxtrain.weights.float8_storage import quantize_e4m3
from jaxtrain.weights.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from jaxtrain.weights.int4 import quantize_int4
from jaxtrain.weights.params import Params, Specs, is_block_matrix
from jaxtrain.weights.quantized import quantize
from jaxtrain.weights.two_four import sparse_2_4


class Form(NamedTuple):
    """How an array gets into a form, and who puts it there.

    encode: a stack of matrices [L, K, N] to a `Weight`, or to an array that is multiplied as usual.
    place: `storage`, once, frozen (finetune.base_quantization, `jaxtrain quantize`); `step`,
    once a step (model.fp8); `layer`, each time that a layer uses it (model.weight_form), on
    [.., K, N]; `training`, each time that a layer of a training step does. That one is also given a
    PRNG key and, by their names, those of its options that model.weight_form sets. Experts stay
    arrays in it.
    saved: a saved model holds what encode makes of its matrices.
    """

    encode: Callable[..., Array | Weight]
    place: Literal["storage", "step", "layer", "training"]
    options: frozenset[str] = frozenset()
    saved: bool = False


def mx_form(operand: Format, gradient: Format) -> Form:
    encode = functools.partial(microscaling.mx, operand=operand, gradient=gradient)
    return Form(encode, "training", ROUNDING)


def each_matrix(encode: Callable[[Array], Weight]) -> Callable[[Array], Weight]:
    """A form of one matrix [K, N], of a stack [L, K, N]."""
    return jax.jit(functools.partial(jax.lax.map, encode))


STOCHASTIC = frozenset({"stochastic_rounding"})
ROUNDING = STOCHASTIC | {"hadamard"}
WEIGHTS: dict[str, Form] = {
    "nf4": Form(functools.partial(quantize, kind="nf4"), "storage"),
    "int8": Form(functools.partial(quantize, kind="int8"), "storage"),
    "int4": Form(each_matrix(quantize_int4), "storage"),
    "float8_e4m3": Form(each_matrix(quantize_e4m3), "storage"),
    "float8": Form(quantize_float8, "step"),
    "fake_int8": Form(fake_quant.int8, "layer"),
    "fake_int4": Form(fake_quant.int4, "layer"),
    "sparse_2_4": Form(sparse_2_4, "layer", saved=True),
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
LAYER_FORMS = tuple(name for name, form in WEIGHTS.items() if form.place in ("layer", "training"))
TRAINING_FORMS = tuple(name for name, form in WEIGHTS.items() if form.place == "training")


def saved_params(params: Params, specs: Specs, form: str) -> Params:
    """The parameters with the arrays that a form of the layer makes of the blocks' matrices."""
    encode = lambda p: WEIGHTS[form].encode(jnp.asarray(p))
    return jax.tree.map(lambda p, s: encode(p) if is_block_matrix(s) else p, params, specs)

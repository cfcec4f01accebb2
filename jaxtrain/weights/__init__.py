"""How a parameter is declared, stored and multiplied: bf16, float8, nf4, int8, adapters, fake int8.

What uses a weight is in `model/`; what trains is in `finetune/`. A new form is one file here and
one row of WEIGHTS: the tests then try it on every matrix of a block of every family.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Array

from jaxtrain.weights import fake_quant
from jaxtrain.weights.contract import Weight
from jaxtrain.weights.float8 import quantize_float8
from jaxtrain.weights.quantized import quantize


class Form(NamedTuple):
    """How an array gets into a form, and who puts it there.

    encode: a stack of matrices [L, K, N] to a `Weight`, or to an array that is multiplied as usual.
    place: `storage`, once, frozen (finetune.base_quantization); `step`, once a step (model.fp8);
    `layer`, each time that a layer uses it (model.weight_form), on [.., K, N].
    """

    encode: Callable[[Array], Array | Weight]
    place: Literal["storage", "step", "layer"]


WEIGHTS: dict[str, Form] = {
    "nf4": Form(functools.partial(quantize, kind="nf4"), "storage"),
    "int8": Form(functools.partial(quantize, kind="int8"), "storage"),
    "float8": Form(quantize_float8, "step"),
    "fake_int8": Form(fake_quant.int8, "layer"),
    "fake_int4": Form(fake_quant.int4, "layer"),
}
LAYER_FORMS = tuple(name for name, form in WEIGHTS.items() if form.place == "layer")

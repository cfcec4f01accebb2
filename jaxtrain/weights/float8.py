"""Float8 linear layers: selection of matrices, float8 copies made once per step, and the matmul.

A training step replaces the matrices that it computes in float8 by `Fp8Weight`s. Evaluation and
generation pass plain arrays, and `dense` multiplies those as usual.

Delayed scaling (Transformer Engine's `DelayedScaling`): activations and gradients are scaled by
their amax over the last steps, so that the cast needs no extra pass over the tensor. The step
passes these values as an `AmaxHistory` and gets the new ones in place of their gradient.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from jaxtrain_kernels.dispatch import target
from jaxtrain_kernels.matmul.fp8 import layers
from jaxtyping import Array, DTypeLike, Float

from jaxtrain.parallel.axes import constrain, current_mesh
from jaxtrain.parallel.fp8_cast import cast_backend
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import MatmulOutput, Weight, gradients_together
from jaxtrain.weights.params import Params, ParamSpec, Specs, path_name

# Quantizing smaller matrices takes longer than float8 saves (nanochat's bound), and cuBLASLt's
# float8 needs multiples of 16.
SMALLEST, MULTIPLE = 128, 16
AMAX_SLOTS = 8192  # of a layer's tensor: more than a kernel has blocks at gpt_d24
JOINED = ("q", "k", "v")  # matrices of a module that `matmul_joined` concatenates in this order
Fp8Copies = dict[str, Any]  # a tree like the parameters', of `kernels.Fp8`, `JoinedCopy` or None


class JoinedCopy(NamedTuple):
    """The float8 copy of a module's JOINED matrices, at the first of them; None at the others."""

    fp8: kernels.Fp8 | None


class AmaxHistory(NamedTuple):
    """Largest magnitudes (amax) of each layer: [L] of one step, or a history [H, L], newest first.
    A step may take and return them in slots, [L, P] (see `in_slots`).

    Gradients are of a loss summed over tokens. So they are comparable whatever a step divides the
    loss by, and their scale before the first step can be 1.
    """

    inputs: dict[str, Array]  # of the matrices' inputs, by `reads`
    gradients: dict[str, Array]  # of the matrices' output gradients, by the matrix's name


class Fp8Options(NamedTuple):
    """How a step computes in float8: the fields `model.fp8_*` of the same names.

    hidden: hidden layers are saved for the backward pass in float8 alone. epilogue: they are cast
    in the epilogue of the matmuls that produce them. norms: the norm that produces a matmul's input
    casts it. gradients: the op that computes an output's gradient casts it, if it has a kernel for
    that. fast_accum: gradients of inputs are summed with the tensor cores' 14 bits, as outputs are.
    """

    hidden: bool = False
    epilogue: bool = False
    norms: bool = False
    gradients: bool = False
    fast_accum: bool = False


PLAIN = Fp8Options()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["w_KN", "fp8", "amax", "joined", "cast"],
    meta_fields=["options"],
)
@dataclasses.dataclass(frozen=True)
class Fp8Weight(Weight):
    """A matrix, or a stack of them: the array that receives the gradient, and its float8 copy.

    fp8: None: made when it is needed. joined: of this and others, concatenated, if there is one.
    amax: with delayed scaling, of the input and of the output's gradient. cast: of the input, if it
    has been cast.
    """

    w_KN: Any
    fp8: Any  # a kernels.Fp8 or None
    amax: Any = None
    joined: kernels.Fp8 | None = None
    options: Fp8Options = PLAIN
    cast: kernels.Fp8Input | None = None

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        amax_2 = None if self.amax is None else jnp.stack(self.amax)
        y_MN = kernels.fp8_matmul(
            x.reshape(-1, x.shape[-1]), self.w_KN, w_fp8=self.fp8, amax_2=amax_2,
            x_cast=self.cast, fast_accum=self.options.fast_accum, implementation=cast_backend(),
        )  # fmt: skip
        return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])

    def matmul_for_cast(self, x: Float[Array, "*B K"]) -> MatmulOutput:
        """`matmul` for an op that takes `MatmulOutput.gradient`; with `gradients` there is one.

        Raises UserError on a mesh.
        """
        if not self.options.gradients or self.amax is None:
            return MatmulOutput(self.matmul(x))
        if current_mesh() is not None:
            raise UserError("model.fp8_gradients runs on one device: set it to false on a mesh")
        y_MN, gradient = kernels.fp8_matmul_for_cast(
            x.reshape(-1, x.shape[-1]), self.w_KN, w_fp8=self.fp8, amax_2=jnp.stack(self.amax),
            x_cast=self.cast, fast_accum=self.options.fast_accum,
        )  # fmt: skip
        return MatmulOutput(y_MN.reshape(*x.shape[:-1], y_MN.shape[-1]), gradient)

    def matmul_joined(
        self, x: Float[Array, "*B K"], others: Sequence[Array | Weight]
    ) -> MatmulOutput | None:
        """Concatenate the matrices, and cast them with one scale if there is no joined copy.

        Every matrix's history then holds the amax of the joint output gradient.
        """
        matrices = [self, *(w for w in others if isinstance(w, Fp8Weight))]
        if len(matrices) <= len(others):
            return None
        w_KN = jnp.concatenate([matrix.w_KN for matrix in matrices], axis=1)
        x, w_KN = gradients_together(x, w_KN)
        seen = [matrix.amax for matrix in matrices if matrix.amax is not None]
        amax = tuple(map(shared_maximum, zip(*seen))) if len(seen) == len(matrices) else None
        joined = Fp8Weight(w_KN, self.joined, amax, options=self.options, cast=self.cast)
        return joined.matmul_for_cast(x)

    def input_amax(self) -> Array | None:
        """With `norms`, that of earlier steps, in slots. Raises UserError on a mesh."""
        if not self.options.norms or self.amax is None:
            return None
        if current_mesh() is not None:
            raise UserError("model.fp8_norms runs on one device: set it to false on a mesh")
        return jax.lax.stop_gradient(self.amax[0])

    def cast_input(self, x: Float[Array, "*B K"]) -> kernels.Fp8Input | None:
        """With delayed scaling. With current scaling XLA sees that matrices have one amax."""
        if self.amax is None:
            return None
        x_MK, amax = jax.lax.stop_gradient((x.reshape(-1, x.shape[-1]), self.amax[0]))
        return kernels.fp8_input(x_MK, amax, implementation=cast_backend())

    def with_input(self, cast: kernels.Fp8Input) -> "Fp8Weight":
        return dataclasses.replace(self, cast=cast)

    def feed_forward_relu2(
        self, x: Float[Array, "B T K"], down: Array | Weight, implementation: str | None
    ) -> Float[Array, "B T K"] | None:
        """Fuse the activation into the casts (see `jaxtrain_kernels`), if both matrices are in
        float8.

        Raises UserError if the requested backend does not support the call.
        """
        if not isinstance(down, Fp8Weight):
            return None
        amax_22 = None
        if self.amax is not None and down.amax is not None:
            amax_22 = jnp.stack([jnp.stack(self.amax), jnp.stack(down.amax)])
        epilogue = self.options.epilogue
        if epilogue and current_mesh() is not None:
            raise UserError("model.fp8_epilogue runs on one device: set it to false on a mesh")
        run = functools.partial(
            kernels.fp8_feed_forward_relu2, x, self.w_KN, down.w_KN, copies=(self.fp8, down.fp8),
            amax_22=amax_22, x_cast=self.cast, constrain=pinned,
            keep_hidden=not self.options.hidden, fast_accum=self.options.fast_accum,
            implementation=cast_backend() or implementation,
        )  # fmt: skip
        try:
            return run(epilogue="mosaic" if epilogue else None)
        except NotImplementedError as error:
            if epilogue:
                raise UserError(f"model.fp8_epilogue: {error}; leave it out") from None
            raise UserError(f"model.kernels.ffn: {error}; xla takes XLA's") from None

    def dequantize(self) -> Float[Array, "K N"]:
        """The array itself: float8 is its matmul format, not its storage format."""
        return self.w_KN


def shared_maximum(maxima: Sequence[Array]) -> Array:
    """The maximum; each of `maxima` receives its whole gradient (here, the new amax)."""
    alone = lambda most: most - jax.lax.stop_gradient(most)
    return jax.lax.stop_gradient(jnp.max(jnp.stack(maxima), axis=0)) + sum(map(alone, maxima))


def quantize_float8(w_LKN: Float[Array, "L K N"]) -> Fp8Weight:
    """A stack with its float8 copy; each layer has its own scale."""
    return Fp8Weight(w_LKN, float8_copies(w_LKN))


def pinned(h_BTF: Array) -> Array:
    return constrain(h_BTF, "batch", "tokens", "hidden")


def in_fp8(spec: ParamSpec) -> bool:
    """Whether float8 is used for this parameter: the large matrices of the blocks."""
    sides = spec.shape[-2:]
    large = min(sides, default=0) >= SMALLEST and not any(side % MULTIPLE for side in sides)
    return spec.role == spec.group == "matrix" and large  # not routers, not experts


def fp8_weights(
    params: Params, specs: Specs, unrolled: bool = False, joined: bool = False
) -> Fp8Copies:
    """Float8 copies of the matrices, each layer with its own scale; None for other parameters.

    unrolled: the model does not scan its layers, so that they need not be together in memory.
    joined: queries, keys and values are projected by one matmul, so that JOINED matrices of
    unrolled layers have one copy. Raises UserError on a device without float8, as `check_fp8` does.
    """
    check_fp8()
    stacks = [params[name] for name in JOINED if name in specs and in_fp8(specs[name])]
    one = unrolled and joined and len(stacks) == len(JOINED)
    one = one and layers.supports(target(), *stacks) is None

    def copy_of(name: str, spec: Any) -> Any:
        if isinstance(spec, dict):
            return fp8_weights(params[name], spec, unrolled, joined)
        if one and name in JOINED:
            first = name == JOINED[0]
            return JoinedCopy(stacked(layers.quantize_layers(*stacks)) if first else None)
        return float8_copies(params[name], unrolled) if in_fp8(spec) else None

    return {name: copy_of(name, spec) for name, spec in specs.items()}


def stacked(copies: list[kernels.Fp8]) -> kernels.Fp8:
    return jax.tree.map(lambda *x: jnp.stack(x), *copies)


def float8_copies(w_LKN: Float[Array, "L K N"], unrolled: bool = False) -> kernels.Fp8:
    """Float8 copies of a stack, each layer with its own scale; unrolled: as of `fp8_weights`."""
    if unrolled and layers.supports(target(), w_LKN) is None:
        return stacked(layers.quantize_layers(w_LKN))
    return jax.vmap(functools.partial(kernels.fp8_quantize, implementation="xla"))(w_LKN)


def with_fp8(
    params: Params,
    copies: Fp8Copies,
    specs: Specs,
    amax: AmaxHistory | None = None,
    options: Fp8Options = PLAIN,
) -> Params:
    """The parameters, with an Fp8Weight for each that has a copy.

    Among matrices with the same input, one reports its amax: the gradients of several would add up.
    """
    reported: set[str] = set()

    def put(path: tuple[Any, ...], param: Array, spec: ParamSpec, copy: Any) -> Any:
        if copy is None:
            return param
        joined = copy.fp8 if isinstance(copy, JoinedCopy) else None
        own = None if isinstance(copy, JoinedCopy) else copy
        if amax is None:
            return Fp8Weight(param, own, None, joined, options)
        name = path_name(path)
        tensor = reads(name, spec)
        most_L = amax.inputs[tensor]
        most_L = jax.lax.stop_gradient(most_L) if tensor in reported else most_L
        reported.add(tensor)
        maxima = most_L, amax.gradients[name]
        return Fp8Weight(param, own, maxima, joined, options)

    return jax.tree_util.tree_map_with_path(put, params, specs, copies)


# ---- delayed scaling ---------------------------------------------------------------------------


def reads(name: str, spec: ParamSpec) -> str:
    """Name of the tensor that a matrix reads; a module's matrices share it per input axis."""
    return f"{name.rpartition('/')[0]}/{spec.axes[-2]}"


def init_amax_history(specs: Specs, history: int) -> AmaxHistory:
    """An empty history: zeros [H, L]."""
    pairs = jax.tree_util.tree_flatten_with_path(specs)[0]
    stacks = {path_name(path): spec for path, spec in pairs if in_fp8(spec)}
    zeros = lambda spec: jnp.zeros((history, spec.shape[0]), jnp.float32)
    return AmaxHistory(
        {reads(name, spec): zeros(spec) for name, spec in stacks.items()},
        {name: zeros(spec) for name, spec in stacks.items()},
    )


def amax_from_history(past: AmaxHistory, factor: Array) -> AmaxHistory:
    """Per-layer amax for a step, [L]: the maximum over the history; of gradients, times `factor`.

    If it is zero (first step, or a gradient was zero), the amax is such that the scale is 1; for
    gradients, `factor` instead of 1. factor: the step multiplies the loss by it.
    """

    def most(past_HL: Array, dtype: DTypeLike) -> Array:
        most_L = jnp.max(past_HL, axis=0)
        return jnp.where(most_L > 0, most_L, float(jnp.finfo(dtype).max))

    return AmaxHistory(
        jax.tree.map(lambda x: most(x, kernels.E4M3), past.inputs),
        jax.tree.map(lambda x: factor * most(x, kernels.E5M2), past.gradients),
    )


def in_slots(amax: AmaxHistory) -> AmaxHistory:
    """Each layer's amax [L] in every slot [L, P].

    A step's gradient of them is then the amaxes of parts of a tensor, as its kernel finds them. So
    the maxima of all layers are found by one kernel, not by one or two kernels a layer.
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (len(x), AMAX_SLOTS)), amax)


def update_amax_history(past: AmaxHistory, seen: AmaxHistory, factor: Array) -> AmaxHistory:
    """The history with a step's amax, [L] or in slots, first, and without its oldest entry."""
    seen = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.max(x, axis=1), seen)
    seen = seen._replace(gradients=jax.tree.map(lambda x: x / factor, seen.gradients))
    return jax.tree.map(lambda x, new: jnp.concatenate([new[None], x[:-1]]), past, seen)


def check_fp8(field: str = "model.fp8") -> None:
    """Raise UserError if the device has no float8 matmuls; field: the setting that needs them."""
    if reason := kernels.fp8_unsupported():
        raise UserError(f"{field}: {reason}; leave it out to train in 16 bits")

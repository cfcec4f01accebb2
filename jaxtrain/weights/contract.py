"""The interface of a weight matrix: its matmul, and the array that it represents.

A parameter's value is an array or a `Weight`: another form such as nf4, float8 or LoRA. Layers call
`dense`, or `dequantize` if a kernel needs the array, and depend on no specific form. The encoders
of all forms are in the table `jaxtrain.weights.WEIGHTS`.
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import Fp8Input, GradientCast
from jaxtrain_kernels.matmul.few_rows import (
    MANY,
    InputNorm,
    Operations,
    few_rows_matmul,
    takes_operations,
)
from jaxtyping import Array, Float

from jaxtrain import parallel
from jaxtrain.weights.params import Params, ParamSpec, Specs, path_name


class MatmulOutput(NamedTuple):
    """A matmul's output y [*B, N]. gradient: the op that reads y takes it and casts y's gradient to
    float8; None: the matmul casts it, if it needs to."""

    y: Array
    gradient: GradientCast | None = None


class Weight(abc.ABC):
    """A matrix [K, N] in another form than an array.

    A subclass is a dataclass registered with jax. Its leaves may all have a leading dim L: a stack
    is sliced, scanned and sharded like a stacked array.
    """

    @abc.abstractmethod
    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """x times the matrix; the form defines the gradient."""

    def feed_forward_relu2(
        self, x: Float[Array, "B T K"], down: "Array | Weight", implementation: str | None
    ) -> Float[Array, "B T K"] | None:
        """relu(x W)^2 `down` by this form's own kernels; None if it has none."""
        return None

    def matmul_joined(
        self, x: Float[Array, "*B K"], others: "Sequence[Array | Weight]"
    ) -> MatmulOutput | None:
        """x times this and other matrices, concatenated by columns; None if the form cannot."""
        return None

    def matmul_each(
        self, x: Float[Array, "*B K"], others: "Sequence[Array | Weight]"
    ) -> tuple[Float[Array, "*B _"], ...] | None:
        """x times this and times each other matrix, by one matmul; None if the form cannot."""
        return None

    def takes_operations(
        self, rows: int, dtype: jnp.dtype, others: "Sequence[Array | Weight]"
    ) -> bool:
        """Whether one kernel computes so many rows of `dtype` times these matrices, and the
        operations around the products."""
        return False

    def matmul_fused(
        self,
        x_MK: Float[Array, "M K"],
        others: "Sequence[Array | Weight]",
        operations: Operations,
    ) -> tuple[Float[Array, "M _"], ...]:
        """The products and the operations around them; of forms that take them."""
        raise NotImplementedError(f"{type(self).__name__} takes no operations")

    def matmul_pending(
        self,
        x: "Float[Array, '*B K'] | PendingProduct",
        others: "Sequence[Array | Weight]",
        operations: Operations,
        residual: "Array | PendingProduct | None",
    ) -> "tuple[Array | PendingProduct, ...] | None":
        """As `matmul_fused`, by a kernel that also computes other products, before or after these;
        None if the form has none. residual: of the operations."""
        return None

    def input_amax(self) -> Array | None:
        """The amax with which the norm that computes the matmul's input may cast it to float8; None
        if this form reads the input itself."""
        return None

    def cast_input(self, x: Float[Array, "*B K"]) -> Fp8Input | None:
        """x in float8, as `matmul` casts it; None if this form reads x itself."""
        return None

    def with_input(self, cast: Fp8Input) -> "Weight":
        """This matrix for an input that is already cast; forms without such a cast ignore it."""
        return self

    def transposed(self) -> Float[Array, "N K"] | None:
        """The transposed matrix, if this form stores it as an array; else None."""
        return None

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "K N"]:
        """The array that the matrix represents, in the compute dtype."""


class PendingProduct(abc.ABC):
    """A product that a kernel will compute with others, when one of them is needed."""

    shape: tuple[int, ...]
    dtype: Any

    @abc.abstractmethod
    def array(self) -> Array:
        """The product, computed."""


def computed(x: Array | PendingProduct) -> Array:
    """x as an array, computed now if it is pending."""
    return x.array() if isinstance(x, PendingProduct) else x


class DeferredNorm(NamedTuple):
    """RMS norm of x that the kernel of the matmuls which read it computes: x has few rows."""

    x: Float[Array, "*B K"] | PendingProduct
    norm: InputNorm

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape


def matmul(x: Float[Array, "*B K"] | DeferredNorm, weight: Array | Weight) -> Float[Array, "*B N"]:
    """x times a matrix in any form."""
    if isinstance(x, DeferredNorm):
        if (found := few_rows_arrays(weight)) is not None:
            (array,), transposed = found
            return few_rows_matmul(computed(x.x), array, transposed=transposed, norm=x.norm)[0]
        x = x.norm.of(computed(x.x))
    if isinstance(weight, Weight):
        return weight.matmul(x)
    return few_rows_matmul(x, weight)[0] if has_few_rows(x) else x @ weight


def few_rows_arrays(*matrices: Array | Weight) -> tuple[list[Array], bool] | None:
    """The arrays that `few_rows_matmul` reads, and whether they are transposed; None if a matrix
    has another form, or not all have the same one."""
    arrays = [w for w in matrices if not isinstance(w, Weight)]
    turned = [w.transposed() for w in matrices if isinstance(w, Weight)]
    turned = [w for w in turned if w is not None]
    same = next((x for x in (arrays, turned) if len(x) == len(matrices)), None)
    return None if same is None else (same, same is turned)


def fuses_operations(x: Array | DeferredNorm | PendingProduct, *params: nnx.Param) -> bool:
    """Whether one kernel computes the matmuls with these matrices and the operations around them:
    the input's RMS norm, biases, activation, residual. x: has the rows and the dtype of the input.
    """
    if not params:
        return False
    first, *others = matrices = [param.get_value() for param in params]
    x = x.x if isinstance(x, DeferredNorm) else x
    rows = math.prod(x.shape[:-1])
    if (found := few_rows_arrays(*matrices)) is None:
        return isinstance(first, Weight) and first.takes_operations(rows, x.dtype, others)
    arrays, transposed = found
    input = jax.ShapeDtypeStruct((rows, arrays[0].shape[int(transposed)]), x.dtype)
    return rows < MANY and takes_operations(input, *arrays, transposed=transposed)


def dense_fused(
    x: Float[Array, "*B K"] | DeferredNorm | PendingProduct,
    *params: nnx.Param,
    biases: Sequence[nnx.Param | None] = (),
    activation: str | None = None,
    residual: Float[Array, "*B N"] | PendingProduct | None = None,
) -> tuple[Float[Array, "*B _"] | PendingProduct, ...]:
    """x times modules' matrices, and the operations around the products (`fuses_operations`)."""
    x, norm = x if isinstance(x, DeferredNorm) else (x, None)
    first, *others = matrices = [param.get_value() for param in params]
    vectors = tuple(None if bias is None else bias[...] for bias in biases)
    vectors = vectors if any(bias is not None for bias in vectors) else None
    if isinstance(first, Weight):
        around = Operations(norm, vectors, activation)
        if (pending := first.matmul_pending(x, others, around, residual)) is not None:
            return pending
    x, residual = computed(x), None if residual is None else computed(residual)
    if (found := few_rows_arrays(*matrices)) is None:
        assert isinstance(first, Weight)
        residual_MN = None if residual is None else residual.reshape(-1, residual.shape[-1])
        operations = Operations(norm, vectors, activation, residual_MN)
        ys = first.matmul_fused(x.reshape(-1, x.shape[-1]), others, operations)
        return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)
    arrays, transposed = found
    return few_rows_matmul(
        x,
        *arrays,
        transposed=transposed,
        norm=norm,
        biases=vectors,
        activation=activation,
        residual=residual,
    )


def has_few_rows(x: Array) -> bool:
    """Whether x has few rows, as in a decode step of few sequences; such matmuls have their own
    kernels."""
    return math.prod(x.shape[:-1]) < MANY


def matmul_joined(x: Float[Array, "*B K"], *matrices: Array | Weight) -> MatmulOutput | None:
    """x times the matrices of heads, concatenated by columns, in one matmul; None if their forms
    have none. With `mesh.tensor` each device's columns are together."""
    first, *others = matrices
    if isinstance(first, Weight):
        return first.matmul_joined(x, others)
    arrays = [first, *(w for w in others if not isinstance(w, Weight))]
    if len(arrays) <= len(others):
        return None
    if parallel.tensor_size() > 1:
        return MatmulOutput(parallel.joined_matmul(x, tuple(arrays)))
    x, w_KN = gradients_together(x, jnp.concatenate(arrays, axis=1))
    return MatmulOutput(x @ w_KN)


@jax.custom_vjp
def gradients_together(x: Array, w_KN: Array) -> tuple[Array, Array]:
    """Identity; makes both gradients available at the same time.

    Otherwise XLA would defer a joined matrix's gradient to the end of the backward pass, and keep
    its large operands until then.
    """
    return x, w_KN


gradients_together.defvjp(
    lambda x, w_KN: ((x, w_KN), None),
    lambda _, gradients: jax.lax.optimization_barrier(gradients),
)


def feed_forward_relu2(
    x: Float[Array, "B T K"],
    up: Array | Weight,
    down: Array | Weight,
    implementation: str | None = None,
) -> Float[Array, "B T K"] | None:
    """relu(x up)^2 down with a fused activation; None if these forms have no such kernel."""
    if isinstance(up, Weight):
        return up.feed_forward_relu2(x, down, implementation)
    if isinstance(down, Weight):
        return None
    if has_few_rows(x):
        (h,) = few_rows_matmul(x, up, activation="relu2")
        return few_rows_matmul(h, down)[0]
    return parallel.feed_forward_relu2(x, up, down, implementation)


def input_amax(*params: nnx.Param) -> Array | None:
    """The amax with which a norm may cast the input of all these matrices; None if one reads it."""
    matrices = [param.get_value() for param in params]
    found = [w.input_amax() if isinstance(w, Weight) else None for w in matrices]
    return None if any(amax is None for amax in found) else found[0]


def cast_input(x: Float[Array, "*B K"], param: nnx.Param) -> Fp8Input | None:
    """x in float8, as its matmul with this matrix casts it; None if the form reads x itself.

    The matrices of a module that read x have one amax, so this cast serves them all. XLA merges
    casts of their own in the forward pass only: with remat, each matrix's amax comes out of a
    barrier, and XLA does not see that they are equal.
    """
    weight = param.get_value()
    return weight.cast_input(x) if isinstance(weight, Weight) else None


def reading(param: nnx.Param, cast: Fp8Input | None) -> Array | Weight:
    """A module's matrix, which reads the cast instead of its input if there is one."""
    weight = param.get_value()
    return weight if cast is None or not isinstance(weight, Weight) else weight.with_input(cast)


def dense(
    x: Float[Array, "*B K"] | DeferredNorm, param: nnx.Param, cast: Fp8Input | None = None
) -> Float[Array, "*B N"]:
    """x times a module's matrix, in any form that the step or fine-tuning gave it. cast: of x."""
    weight = reading(param, cast)
    if isinstance(weight, Weight) or isinstance(x, DeferredNorm) or has_few_rows(x):
        return matmul(x, weight)
    return parallel.tensor_matmuls(x, (weight,), matrix_axes(param))[0]


def add_bias(y: Float[Array, "*B D"], bias: nnx.Param | None) -> Float[Array, "*B D"]:
    """Add the bias, if there is one, in y's dtype."""
    if bias is None:
        return y
    return y + jnp.expand_dims(bias[...].astype(y.dtype), range(y.ndim - 1))


def dense_of(
    x: Float[Array, "*B K"] | DeferredNorm,
    *params: nnx.Param,
    biases: Sequence[nnx.Param | None] = (),
    cast: Fp8Input | None = None,
) -> Callable[[nnx.Param], Array]:
    """`dense` of x as a function of any of these matrices, plus its bias if there are biases. The
    matrices' dims have the same logical axes. If x has few rows, one kernel call computes all."""
    first, *others = matrices = [param.get_value() for param in params]
    each = None
    if isinstance(first, Weight) and isinstance(x, Array):
        each = first.matmul_each(x, others)
    if isinstance(x, DeferredNorm) or (has_few_rows(x) and few_rows_arrays(*matrices) is not None):
        products = [computed(y) for y in dense_fused(x, *params, biases=biases)]
    else:
        if each is not None:
            products = each
        elif any(map(is_weight, matrices)):
            products = [dense(x, param, cast) for param in params]
        else:
            products = parallel.tensor_matmuls(x, matrices, matrix_axes(params[0]))
        products = [add_bias(y, b) for y, b in zip(products, biases or [None] * len(params))]
    found = dict(zip(map(id, params), products, strict=True))
    return lambda param: found[id(param)]


def matrix_axes(param: nnx.Param) -> tuple[str | None, str | None]:
    """Logical axes of a matrix's in and out dim."""
    spec: ParamSpec = param.get_metadata()["spec"]
    return spec.axes[-2], spec.axes[-1]


def dequantize(weight: Array | Weight) -> Array:
    """The array that a matrix in any form represents; an array is returned unchanged."""
    if not isinstance(weight, Weight):
        return weight
    # A matrix read from a file holds NumPy arrays until it is put on a device.
    return jax.tree.map(jnp.asarray, weight).dequantize()


def is_weight(leaf: object) -> bool:
    """Whether a leaf of the parameters is a `Weight`, not an array."""
    return isinstance(leaf, Weight)


def flatten(tree: Params | Specs) -> dict[str, Any]:
    """name -> leaf, in the tree's order; a `Weight` is one leaf."""
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_weight)[0]
    return {path_name(path): leaf for path, leaf in pairs}

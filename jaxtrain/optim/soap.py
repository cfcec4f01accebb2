"""SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's two factors.

A matrix is `[..., in, out]`; leading dims are a batch of matrices. With L = E[G G^T] and
R = E[G^T G], the gradient is rotated into their eigenbases Q: G' = Q_L^T G Q_R. Adam's second
moment is in that basis; the first moment stays in the parameter's own basis.

FLOPs for a matrix [n, m]: 8 nm (n + m) per step for factors and rotations, and 48 (n^3 + m^3) per
`newton_schulz` basis update (QR: about 8 n^3 per side, on few compute units). Muon itself takes
30 n^3 if n = m, and 8 n^2 m + 28 n^3 if m >= 2 n. For all matrices of gpt_d12, Muon takes 1.3e12
per step. SOAP adds 2.1e12 per step and 36e12 per basis update, or with max_dim=1024 (dims of 3072
keep their own basis) 0.7e12 and 3.1e12.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from pydantic import Field

from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.eigenbasis import rotate_basis
from jaxtrain.optim.merge_states import mean_over_replicas
from jaxtrain.optim.param_groups import Hyper, OptimizerConfig, ParamGroup
from jaxtrain.settings import Settings

Basis = Literal["qr", "newton_schulz"]


class SOAPConfig(OptimizerConfig):
    """SOAP: Adam in Shampoo's eigenbasis for matrices; AdamW for everything else."""

    name: Literal["soap"] = "soap"
    learning_rate: float = Field(3e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(
        0.01, ge=0, description="decoupled weight decay, multiplied by the learning rate"
    )
    b1: float = Field(0.95, ge=0, lt=1, description="decay rate of the first moment")
    b2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(
        1e-8, gt=0, description="epsilon, added to the square root of the second moment"
    )
    shampoo_beta: float = Field(0.95, ge=0, lt=1, description="decay rate of Shampoo's factors")
    precondition_frequency: int = Field(
        10, ge=1, description="steps between updates of the eigenbasis"
    )
    max_dim: int = Field(
        4096, ge=1, description="larger dimensions are not rotated (identity basis)"
    )
    basis: Basis = Field(
        "qr",
        description="update of the eigenbasis: qr, by power iteration and QR; newton_schulz, by "
        "rotations that need only matmuls",
    )


class SOAPDirectionConfig(Settings):
    """Muon orthogonalizes its momentum after dividing it by the root of its second moment in SOAP's
    basis (SOAP-Muon, Vyas et al. 2025; modded-nanogpt's track 3, record 44)."""

    b2: float = Field(0.9, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(
        1e-8, gt=0, description="epsilon, added to the square root of the second moment"
    )
    shampoo_beta: float = Field(0.9, ge=0, lt=1, description="decay rate of Shampoo's factors")
    precondition_frequency: int = Field(
        10,
        ge=1,
        description="steps between updates of the eigenbasis; in the first so many steps it is "
        "updated in each",
    )
    max_dim: int = Field(
        1024, ge=1, description="larger dimensions are not rotated (identity basis)"
    )
    basis: Basis = Field(
        "newton_schulz",
        description="update of the eigenbasis: qr, by power iteration and QR; newton_schulz, by "
        "rotations that need only matmuls",
    )


class Preconditioner(NamedTuple):
    """One Shampoo factor of a matrix and its eigenvectors, largest eigenvalue first."""

    factor: Array  # [..., n, n]
    basis: Array


class SOAPLeaf(NamedTuple):
    """State of one stack; a side is None where its dim is above max_dim."""

    m: Array | None  # None if Muon stores the momentum
    v: Array
    left: Preconditioner | None
    right: Preconditioner | None

    def merge(self) -> "SOAPLeaf":
        """Merge states stacked [R, ...]: the mean of everything in the parameter's own basis. The
        eigenvectors (their mean would not be a basis) and v (which is in their basis) are the first
        state's. The following power iterations rotate them towards the mean factors."""

        def side(s: Preconditioner | None) -> Preconditioner | None:
            return None if s is None else Preconditioner(mean_over_replicas(s.factor), s.basis[0])

        v = mean_over_replicas(self.v) if self.left is self.right is None else self.v[0]
        m = None if self.m is None else mean_over_replicas(self.m)
        return SOAPLeaf(m, v, side(self.left), side(self.right))


class SOAPState(NamedTuple):
    count: Array  # number of gradients: the first makes the basis, each later one is an Adam step
    leaves: Any


def to_eigenbasis(
    x: Float[Array, "*L i o"],
    left: Preconditioner | None,
    right: Preconditioner | None,
    back: bool = False,
) -> Float[Array, "*L i o"]:
    """Rotate x into the eigenbasis, or back."""
    if left is not None:
        q = left.basis if back else left.basis.mT
        x = q @ x
    if right is not None:
        q = right.basis.mT if back else right.basis
        x = x @ q
    return x


def init_basis(side: Preconditioner, v: Array, dim: int) -> tuple[Array, Array]:
    return jnp.linalg.eigh(side.factor)[1][..., ::-1], v


def power_iteration_basis(side: Preconditioner, v: Array, dim: int) -> tuple[Array, Array]:
    """One power iteration, orthogonalised by QR; v is permuted along with its eigenvectors."""
    seen = side.factor @ side.basis
    order = jnp.argsort(-jnp.sum(side.basis * seen, axis=-2), axis=-1)
    basis = jnp.linalg.qr(jnp.take_along_axis(seen, order[..., None, :], axis=-1))[0]
    return basis, jnp.take_along_axis(v, jnp.expand_dims(order, -1 if dim == -2 else -2), axis=dim)


def update_preconditioner(
    h: Hyper, side: Preconditioner, v: Array, count: Array, gram: Array, dim: int, kind: Basis
):
    """Update a factor with a gradient's outer product and, if due, its basis; v follows it."""
    factor = h["shampoo_beta"] * side.factor + (1 - h["shampoo_beta"]) * gram
    due = count % h["precondition_frequency"] == 0
    keep = lambda side, v: (side.basis, v)
    if kind == "newton_schulz":  # starts at the identity, with one round at each of the first steps
        turn = lambda s, v: (rotate_basis(s.factor, s.basis), v)
        due = due | (count < h["precondition_frequency"])
        basis, v = jax.lax.cond(due, turn, keep, side._replace(factor=factor), v)
        return Preconditioner(factor, basis), v
    which = jnp.where(count == 0, 2, jnp.where(due, 1, 0))
    branches = [
        keep,
        lambda s, v: power_iteration_basis(s, v, dim),
        lambda s, v: init_basis(s, v, dim),
    ]
    basis, v = jax.lax.switch(which, branches, side._replace(factor=factor), v)
    return Preconditioner(factor, basis), v


def divide_in_basis(
    h: Hyper, count: Array, g: Array, m: Array, s: SOAPLeaf, correct: Array | float, kind: Basis
) -> tuple[Array, SOAPLeaf]:
    """Divide m / correct by the root of the second moment, in the eigenbasis, and rotate it back.

    Returns it and the new state."""
    moved = count > 0
    g_turned, m_turned = to_eigenbasis(g, s.left, s.right), to_eigenbasis(m, s.left, s.right)
    v = jnp.where(moved, h["b2"] * s.v + (1 - h["b2"]) * jnp.square(g_turned), s.v)
    steps = jnp.maximum(count, 1)
    m_hat, v_hat = m_turned / correct, v / (1 - h["b2"] ** steps)
    u = to_eigenbasis(m_hat / (jnp.sqrt(v_hat) + h["eps"]), s.left, s.right, back=True)
    left, right = s.left, s.right
    if left is not None:
        left, v = update_preconditioner(h, left, v, count, g @ g.mT, -2, kind)
    if right is not None:
        right, v = update_preconditioner(h, right, v, count, g.mT @ g, -1, kind)
    return u, SOAPLeaf(s.m, v, left, right)


def step(
    h: Hyper, count: Array, kind: Basis, g: Array, s: SOAPLeaf, p: Array
) -> tuple[Array, SOAPLeaf]:
    """Update and state of one stack. The first gradient only initializes the basis: it is diagonal
    in its own eigenbasis, so Adam would amplify the rounding errors off the diagonal."""
    g = g.astype(jnp.float32)
    moved = count > 0
    assert s.m is not None
    m = jnp.where(moved, h["b1"] * s.m + (1 - h["b1"]) * g, s.m)
    correct = 1 - h["b1"] ** jnp.maximum(count, 1)
    u, new = divide_in_basis(h, count, g, m, s, correct, kind)
    u = jnp.where(moved, -h["learning_rate"] * (u + h["weight_decay"] * p), 0.0)
    return u, new._replace(m=m)


def init_leaf(p: jax.Array, max_dim: int) -> SOAPLeaf:
    """Initial state of one stack."""

    def side(n: int) -> Preconditioner | None:
        if n > max_dim:
            return None
        shape = (*p.shape[:-2], n, n)
        return Preconditioner(jnp.zeros(shape), jnp.broadcast_to(jnp.eye(n), shape))

    zeros = jnp.zeros(p.shape, jnp.float32)
    return SOAPLeaf(zeros, zeros, side(p.shape[-2]), side(p.shape[-1]))


def divide_momentum(
    c: SOAPDirectionConfig, h: Hyper, count: Array, g: Array, u: Array, s: SOAPLeaf
) -> tuple[Array, SOAPLeaf]:
    """Momentum u divided in SOAP's basis, for Muon to orthogonalise; for the first gradient, u."""
    rates = {name: h[f"soap_{name}"] for name in soap_peaks(c)}
    divided, new = divide_in_basis(rates, count, g.astype(jnp.float32), u, s, 1.0, c.basis)
    return jnp.where(count > 0, divided, u), new


def soap_peaks(c: SOAPDirectionConfig) -> dict[str, float]:
    return c.model_dump(include={"b2", "eps", "shampoo_beta", "precondition_frequency"})


def make_soap(max_dim: int, basis: Basis = "qr") -> Callable[[Hyper], optax.GradientTransformation]:
    """Function from the current rates to the transformation of a tree of [..., in, out]."""

    def make(h: Hyper) -> optax.GradientTransformation:
        def init(params):
            leaves = jax.tree.map(lambda p: init_leaf(p, max_dim), params)
            return SOAPState(jnp.zeros((), jnp.int32), leaves)

        def update(updates, state, params=None):
            grads, treedef = jax.tree.flatten(updates)
            rest = (treedef.flatten_up_to(t) for t in (state.leaves, params))
            pairs = [step(h, state.count, basis, *arrays) for arrays in zip(grads, *rest)]
            moved, leaves = (treedef.unflatten(part) for part in zip(*pairs))
            return moved, SOAPState(state.count + 1, leaves)

        return optax.GradientTransformation(init, update)

    return make


def soap(c: SOAPConfig) -> dict[str, ParamGroup]:
    adam = c.model_dump(include={"learning_rate", "weight_decay", "b1", "b2", "eps"})
    rates = adam | c.model_dump(include={"shampoo_beta", "precondition_frequency"})
    decayed, plain = (
        ParamGroup(make_adamw, adam),
        ParamGroup(make_adamw, {**adam, "weight_decay": 0.0}),
    )
    return {
        "matrix": ParamGroup(make_soap(c.max_dim, c.basis), rates, matrices=True),
        "embedding": decayed,
        "head": decayed,
        "gain": plain,
        "scalar": plain,
    }

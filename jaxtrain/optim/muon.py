"""Muon on stacked matrices, AdamW for the rest (Jordan et al. 2024; nanochat's recipe).

A matrix is `[..., in, out]`; everything in front is a batch of matrices, orthogonalised at once.
Each refinement is a switch, so that it can be measured.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from pydantic import Field

from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.groups import Group, Hyper, OptimizerConfig

# Amsel et al. 2025 (Polar Express): degree-5 odd polynomials for 5 iterations, safety 2e-2.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan et al. 2024
COEFFICIENTS = {"polar_express": POLAR_EXPRESS, "newton_schulz": NEWTON_SCHULZ}


class MuonConfig(OptimizerConfig):
    """Matrices by Muon; embeddings, head, gains and scalars by AdamW with rates of their own."""

    name: Literal["muon"] = "muon"
    matrix_lr: float = Field(0.02, gt=0, description="peak rate of the matrices")
    weight_decay: float = Field(0.28, ge=0, description="decay of the matrices, times their rate")
    momentum: float = Field(0.95, ge=0, lt=1, description="momentum of the matrices (Nesterov)")
    orthogonalize: Literal["polar_express", "newton_schulz"] = Field(
        "polar_express", description="polynomial iteration towards the nearest orthogonal matrix"
    )
    embedding_lr: float = Field(0.3, gt=0, description="peak rate of the token embedding")
    value_embedding_lr: float = Field(0.15, gt=0, description="peak rate of the value embeddings")
    head_lr: float = Field(0.008, gt=0, description="peak rate of the head")
    residual_scale_lr: float = Field(0.005, gt=0, description="peak rate of the residual scales")
    x0_scale_lr: float = Field(0.5, gt=0, description="peak rate of the x0 scales")
    scalar_lr: float = Field(0.2, gt=0, description="peak rate of smear, backout and other scalars")
    gain_lr: float = Field(0.02, gt=0, description="peak rate of the norms' gains")


class MuonState(NamedTuple):
    momentum: Any


def matmul_dtype() -> jnp.dtype:
    """bfloat16 where matrix units have it; a CPU is faster and exact in float32."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def orthogonalize(
    x_in_out: Float[Array, "*L i o"], coefficients: tuple[tuple[float, float, float], ...]
) -> Float[Array, "*L i o"]:
    """Push all singular values of each matrix towards 1.

    X <- aX + (b A + c A^2) X with A = X X^T, on the shorter side; float32 in and out.
    """
    x = x_in_out.astype(matmul_dtype())
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = (x / (norm * 1.01 + 1e-6)).astype(x.dtype)
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in coefficients:
        gram = jnp.einsum("...ij,...ik->...jk" if tall else "...ij,...kj->...ik", x, x)
        poly = b * gram + c * (gram @ gram)
        x = a * x + (x @ poly if tall else poly @ x)
    return x.astype(x_in_out.dtype)


def make_muon(c: MuonConfig) -> Callable[[Hyper], optax.GradientTransformation]:
    """Momentum, orthogonalisation and decoupled decay; the rate grows with sqrt(out / in)."""

    def make(h: Hyper) -> optax.GradientTransformation:
        def init(params):
            return MuonState(jax.tree.map(jnp.zeros_like, params))

        def leaf(g, m, p):
            mu = h["momentum"]
            m = mu * m + (1 - mu) * g
            u = orthogonalize((1 - mu) * g + mu * m, COEFFICIENTS[c.orthogonalize])
            rate = h["learning_rate"] * math.sqrt(max(1.0, g.shape[-1] / g.shape[-2]))
            return -rate * (u + h["weight_decay"] * p), m

        def update(updates, state, params=None):
            pairs = jax.tree.map(leaf, updates, state.momentum, params)
            outer, inner = jax.tree.structure(updates), jax.tree.structure((0, 0))
            moved, momentum = jax.tree.transpose(outer, inner, pairs)
            return moved, MuonState(momentum)

        return optax.GradientTransformation(init, update)

    return make


def muon(c: MuonConfig) -> dict[str, Group]:
    """nanochat's groups: rates, betas and decays by role."""

    def adam(rate: float, b1: float, b2: float, weight_decay: float) -> Group:
        peaks = {
            "learning_rate": rate,
            "weight_decay": weight_decay,
            "b1": b1,
            "b2": b2,
            "eps": 1e-10,
        }
        return Group(make_adamw, peaks)

    matrix = {
        "learning_rate": c.matrix_lr, "weight_decay": c.weight_decay, "momentum": c.momentum,
    }  # fmt: skip
    return {
        "matrix": Group(make_muon(c), matrix),
        "embedding": adam(c.embedding_lr, 0.8, 0.995, 0.001),
        "value_embedding": adam(c.value_embedding_lr, 0.8, 0.995, 0.01),
        "head": adam(c.head_lr, 0.8, 0.96, 0.01),
        "residual_scale": adam(c.residual_scale_lr, 0.8, 0.95, 0.05),
        "x0_scale": adam(c.x0_scale_lr, 0.96, 0.95, 0.0),
        "scalar": adam(c.scalar_lr, 0.8, 0.95, 0.0),
        "gain": adam(c.gain_lr, 0.8, 0.95, 0.0),
    }

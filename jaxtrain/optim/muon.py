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
from jaxtrain.optim.groups import Adjust, Group, Hyper, OptimizerConfig

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
    weight_decay_schedule: Literal["constant", "cosine"] = Field(
        "cosine", description="decay of the matrices over the run; cosine ends at 0"
    )
    momentum: float = Field(0.97, ge=0, lt=1, description="momentum of the matrices")
    momentum_start: float = Field(0.85, ge=0, lt=1, description="momentum at the first step")
    momentum_end: float = Field(
        0.90, ge=0, lt=1, description="momentum at the last step, reached along the rate's decay"
    )
    momentum_warmup_steps: int = Field(400, ge=0, description="steps from momentum_start up")
    nesterov: bool = Field(True, description="look one step of momentum ahead")
    orthogonalize: Literal["polar_express", "newton_schulz"] = Field(
        "polar_express", description="polynomial iteration towards the nearest orthogonal matrix"
    )
    equilibrate: bool = Field(
        True, description="give all output rows the same norm before orthogonalising (MuonEq)"
    )
    renormalize: bool = Field(
        True, description="scale the result to the norm of an orthogonal matrix (Muon+)"
    )
    normuon: bool = Field(True, description="divide by a running row or column norm (NorMuon)")
    normuon_b2: float = Field(0.9, ge=0, lt=1, description="decay of NorMuon's second moment")
    cautious: bool = Field(
        True, description="decay only the weights that the update moves towards zero"
    )
    embedding_lr: float = Field(0.3, gt=0, description="peak rate of the token embedding")
    value_embedding_lr: float = Field(0.15, gt=0, description="peak rate of the value embeddings")
    head_lr: float = Field(0.008, gt=0, description="peak rate of the head")
    residual_scale_lr: float = Field(0.005, gt=0, description="peak rate of the residual scales")
    x0_scale_lr: float = Field(0.5, gt=0, description="peak rate of the x0 scales")
    scalar_lr: float = Field(0.2, gt=0, description="peak rate of smear, backout and other scalars")
    gain_lr: float = Field(0.02, gt=0, description="peak rate of the norms' gains")


class MuonState(NamedTuple):
    """Momentum of each matrix, and NorMuon's mean squares (None where it is off)."""

    momentum: Any
    second: Any


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


def equilibrate(x: Float[Array, "*L i o"]) -> Float[Array, "*L i o"]:
    """Scale each output's column to the root mean square of all of them (MuonEq)."""
    norms = jnp.linalg.norm(x, axis=-2, keepdims=True)
    mean = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) / math.sqrt(x.shape[-1])
    return x * (mean / jnp.maximum(norms, 1e-6))


def rescale(x: Float[Array, "*L i o"], norm: Any) -> Float[Array, "*L i o"]:
    """Each matrix with this Frobenius norm; a zero matrix stays zero."""
    now = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    return x * (norm / jnp.maximum(now, 1e-10))


def second_axis(shape: tuple[int, ...]) -> int:
    """NorMuon averages over the inputs where there are as many outputs or more, else over these."""
    return -2 if shape[-1] >= shape[-2] else -1


def make_muon(c: MuonConfig) -> Callable[[Hyper], optax.GradientTransformation]:
    """The transformation of a tree of matrices `[..., in, out]`, from the rates in force.

    Rate and decay grow with sqrt(max(1, out / in)).
    """

    def second_like(p: jax.Array) -> jax.Array | None:
        if not c.normuon:
            return None
        shape = list(p.shape)
        shape[second_axis(p.shape)] = 1
        return jnp.zeros(shape, p.dtype)

    def leaf(h: Hyper, g: jax.Array, m: jax.Array, v: jax.Array | None, p: jax.Array):
        mu = h["momentum"]
        m = mu * m + (1 - mu) * g
        u = mu * m + (1 - mu) * g if c.nesterov else m
        u = orthogonalize(equilibrate(u) if c.equilibrate else u, COEFFICIENTS[c.orthogonalize])
        if c.renormalize:
            u = rescale(u, math.sqrt(min(g.shape[-2:])))
        if v is not None:
            mean = jnp.mean(jnp.square(u), axis=second_axis(u.shape), keepdims=True)
            blend: jax.Array = h["b2"] * v + (1 - h["b2"]) * mean
            norm = jnp.linalg.norm(u, axis=(-2, -1), keepdims=True)
            u, v = rescale(u * jax.lax.rsqrt(jnp.maximum(blend, 1e-10)), norm), blend
        decayed = p * (u * p >= 0) if c.cautious else p
        rate = h["learning_rate"] * math.sqrt(max(1.0, g.shape[-1] / g.shape[-2]))
        return -rate * (u + h["weight_decay"] * decayed), m, v

    def make(h: Hyper) -> optax.GradientTransformation:
        def init(params):
            return MuonState(
                jax.tree.map(jnp.zeros_like, params), jax.tree.map(second_like, params)
            )

        def update(updates, state, params=None):
            grads, treedef = jax.tree.flatten(updates)
            rest = (treedef.flatten_up_to(t) for t in (state.momentum, state.second, params))
            moved, momentum, second = zip(*(leaf(h, *arrays) for arrays in zip(grads, *rest)))
            unflatten = treedef.unflatten
            return unflatten(moved), MuonState(unflatten(momentum), unflatten(second))

        return optax.GradientTransformation(init, update)

    return make


def adjust(c: MuonConfig) -> Adjust:
    """Momentum up over the first steps and down along the rate's decay; the decay's own cosine."""

    def now(hyper: Hyper, step: jax.Array, schedule: Hyper) -> Hyper:
        total, peak = schedule["total_steps"], hyper["momentum"]
        warm = jnp.clip(step / jnp.maximum(hyper["momentum_warmup_steps"], 1), 0.0, 1.0)
        down = schedule.get("decay_fraction", 0.0) * total
        cool = jnp.clip((step - (total - down)) / jnp.maximum(down, 1), 0.0, 1.0)
        rising = hyper["momentum_start"] + (peak - hyper["momentum_start"]) * warm
        falling = peak + (hyper["momentum_end"] - peak) * cool
        decay = hyper["weight_decay"]
        if c.weight_decay_schedule == "cosine":
            decay = decay * 0.5 * (1 + jnp.cos(math.pi * step / total))
        return {**hyper, "momentum": jnp.where(warm < 1, rising, falling), "weight_decay": decay}

    return now


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
        "learning_rate": c.matrix_lr,
        "weight_decay": c.weight_decay,
        "momentum": c.momentum,
        "momentum_start": c.momentum_start,
        "momentum_end": c.momentum_end,
        "momentum_warmup_steps": c.momentum_warmup_steps,
        "b2": c.normuon_b2,
    }
    return {
        "matrix": Group(make_muon(c), matrix, adjust(c)),
        "embedding": adam(c.embedding_lr, 0.8, 0.995, 0.001),
        "value_embedding": adam(c.value_embedding_lr, 0.8, 0.995, 0.01),
        "head": adam(c.head_lr, 0.8, 0.96, 0.01),
        "residual_scale": adam(c.residual_scale_lr, 0.8, 0.95, 0.05),
        "x0_scale": adam(c.x0_scale_lr, 0.96, 0.95, 0.0),
        "scalar": adam(c.scalar_lr, 0.8, 0.95, 0.0),
        "gain": adam(c.gain_lr, 0.8, 0.95, 0.0),
    }

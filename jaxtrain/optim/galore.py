"""GaLore (Zhao et al. 2024, arXiv:2403.03507): Adam on gradients projected to a low rank.

A matrix is `[..., in, out]`; leading dims are a batch of matrices, each with its own projection P:
the top singular vectors of its gradient on the shorter side, recomputed every `gap` steps. Moments
are those of P^T G, so their size is rank / shorter side of Adam's. P times Adam's update moves the
weights. Q-GaLore (Zhang et al. 2024, arXiv:2407.08296) stores P in 4 bits and the moments in 8, and
recomputes P less often once it is stable. Its int8 weights are left out: a step updates and saves
parameters as plain arrays.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, UInt8
from pydantic import Field, model_validator

from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.adamw8bit import decode, encode
from jaxtrain.optim.param_groups import Hyper, Make, Moment, OptimizerConfig, ParamGroup

BLOCK = 256  # values that share a scale


class GaLoreConfig(OptimizerConfig):
    """GaLore: Adam in a low-rank subspace for matrices; AdamW for smaller matrices and everything
    else."""

    name: Literal["galore"] = "galore"
    learning_rate: float = Field(0.01, gt=0, description="peak learning rate of the matrices")
    adamw_lr: float = Field(1e-3, gt=0, description="peak learning rate of everything else")
    weight_decay: float = Field(
        0.0, ge=0, description="decoupled weight decay, multiplied by the learning rate"
    )
    b1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment")
    b2: float = Field(0.999, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(
        1e-8, gt=0, description="epsilon, added to the square root of the second moment"
    )
    rank: int = Field(128, ge=1, description="rank of each matrix's subspace")
    gap: int = Field(200, ge=1, description="steps between two updates of the projection")
    gap_similarity: float | None = Field(
        None,
        gt=0,
        le=1,
        description="similarity of consecutive projections, the mean squared cosine of the angles "
        "between their subspaces, from which a matrix's gap doubles (Q-GaLore: 0.4). Default the "
        "gap stays constant",
    )
    gap_patience: int = Field(
        5, ge=1, description="consecutive similar projections after which the gap doubles"
    )
    scale: float = Field(0.25, gt=0, description="factor on the updates of the matrices")
    quantize: bool = Field(
        False, description="store projections in 4 bits and moments in 8 (Q-GaLore)"
    )

    @model_validator(mode="after")
    def _check(self) -> "GaLoreConfig":
        if self.quantize and self.rank % 2:
            raise ValueError(f"rank {self.rank} is odd, and quantize packs two codes a byte")
        return self


class Gap(NamedTuple):
    """Projection schedule of each matrix of a stack; int32 [...], one entry per matrix."""

    next: Array  # step of the next projection
    steps: Array  # steps from one projection to the next
    similar: Array  # number of consecutive projections similar to the previous one


class GaLoreLeaf(NamedTuple):
    """State of one stack. projection is None for matrices with at most `rank` rows or columns.
    scale is None if the projection is not quantized."""

    projection: Array | None  # [..., shorter, rank], or two codes a byte [..., shorter, rank / 2]
    scale: Array | None
    m: Moment
    v: Moment
    gap: Gap | None = None  # set if the gap is adaptive


class GaLoreState(NamedTuple):
    count: Array
    leaves: Any


def to_int4(x: Float[Array, "*L n r"]) -> tuple[UInt8[Array, "*L n h"], Float[Array, "*L 1 r"]]:
    """Codes 1 ... 15 for -7 ... 7, two per byte, and one scale per column. r is even."""
    scale = jnp.max(jnp.abs(x), axis=-2, keepdims=True) / 7
    codes = jnp.round(x / jnp.maximum(scale, 1e-12)).astype(jnp.int32) + 8
    return (codes[..., ::2] + 16 * codes[..., 1::2]).astype(jnp.uint8), scale


def from_int4(
    codes: UInt8[Array, "*L n h"], scale: Float[Array, "*L 1 r"]
) -> Float[Array, "*L n r"]:
    pairs = jnp.stack([codes % 16, codes // 16], axis=-1)
    return (pairs.reshape(*codes.shape[:-1], -1).astype(jnp.float32) - 8) * scale


def top_singular_vectors(g: Float[Array, "*L i o"], rank: int) -> Float[Array, "*L s r"]:
    """Top `rank` singular vectors of each matrix on its shorter side."""
    tall = g.shape[-2] > g.shape[-1]
    gram = g.mT @ g if tall else g @ g.mT
    return jnp.linalg.eigh(gram)[1][..., ::-1][..., :rank]


def galore_leaf(c: GaLoreConfig, p: jax.Array) -> GaLoreLeaf:
    short, projection, scale, shape = min(p.shape[-2:]), None, None, p.shape
    if short > c.rank:
        shape = (*p.shape[:-2], c.rank, max(p.shape[-2:]))
        projection = jnp.zeros((*p.shape[:-2], short, c.rank), jnp.float32)
        if c.quantize:
            projection, scale = to_int4(projection)

    def moment(signed: bool) -> Moment:
        zeros = jnp.zeros(shape, jnp.float32)
        return Moment(*encode(zeros, BLOCK, signed)) if c.quantize else Moment(zeros, None)

    gap = None
    if projection is not None and c.gap_similarity is not None:
        zero = jnp.zeros(p.shape[:-2], jnp.int32)
        gap = Gap(zero, zero + c.gap, zero)
    return GaLoreLeaf(projection, scale, moment(True), moment(False), gap)


def encode_projection(c: GaLoreConfig, p: Array) -> tuple[Array, Array | None]:
    return to_int4(p) if c.quantize else (p, None)


def adapt_gap(
    c: GaLoreConfig, count: Array, g: Float[Array, "*L i o"], s: GaLoreLeaf
) -> tuple[Array, Array | None, Gap]:
    """(projection, its scale, gap), renewed for the matrices of the stack whose gap is over."""
    batch, least = g.shape[:-2], c.gap_similarity or 0.0

    def renew(one: Any) -> Any:
        g, packed, scale, gap = one
        old = packed if scale is None else from_int4(packed, scale)
        new = top_singular_vectors(g, c.rank)
        similarity = jnp.sum(jnp.square(old.mT @ new)) / c.rank
        similar = jnp.where(similarity >= least, gap.similar + 1, 0)
        rests = similar >= c.gap_patience
        steps = jnp.where(rests, 2 * gap.steps, gap.steps)
        after = Gap(count.astype(jnp.int32) + steps, steps, jnp.where(rests, 0, similar))
        return *encode_projection(c, new), after

    def one(given: Any) -> Any:
        return jax.lax.cond(count >= given[-1].next, renew, lambda given: given[1:], given)

    stack = g, s.projection, s.scale, s.gap
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(batch) :]), stack)
    done = jax.lax.map(one, rows)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), done)


def galore_step(
    c: GaLoreConfig, h: Hyper, count: Array, g: Array, s: GaLoreLeaf, p: Array
) -> tuple[Array, GaLoreLeaf]:
    """Update and state of one stack."""
    g, tall = g.astype(jnp.float32), g.shape[-2] > g.shape[-1]
    seen, turn, packed, scale, factor, gap = g, None, s.projection, s.scale, 1.0, s.gap
    if s.projection is not None:

        def anew() -> tuple[Array, Array | None]:
            return encode_projection(c, top_singular_vectors(g, c.rank))

        if gap is None:
            due = count % h["gap"] == 0
            packed, scale = jax.lax.cond(due, anew, lambda: (s.projection, s.scale))
        else:
            packed, scale, gap = adapt_gap(c, count, g, s)
        turn = packed if scale is None else from_int4(packed, scale)
        seen, factor = turn.mT @ (g.mT if tall else g), h["scale"]

    def read(x: Moment, signed: bool) -> Array:
        return x.values if x.scale is None else decode(x.values, x.scale, BLOCK, signed)

    write = lambda x, signed: Moment(*encode(x, BLOCK, signed)) if c.quantize else Moment(x, None)
    m = h["b1"] * read(s.m, True) + (1 - h["b1"]) * seen
    v = h["b2"] * read(s.v, False) + (1 - h["b2"]) * jnp.square(seen)
    m_hat, v_hat = m / (1 - h["b1"] ** (count + 1)), v / (1 - h["b2"] ** (count + 1))
    u = m_hat / (jnp.sqrt(v_hat) + h["eps"])
    if turn is not None:
        u = (turn @ u).mT if tall else turn @ u
    moved = -h["learning_rate"] * (factor * u + h["weight_decay"] * p)
    return moved, GaLoreLeaf(packed, scale, write(m, True), write(v, False), gap)


def make_galore(c: GaLoreConfig) -> Make:
    """Function from the current rates to the transformation of a tree of [..., in, out]."""

    def make(h: Hyper) -> optax.GradientTransformation:
        def init(params):
            leaves = jax.tree.map(lambda p: galore_leaf(c, p), params)
            return GaLoreState(jnp.zeros((), jnp.int32), leaves)

        def update(updates, state, params=None):
            grads, treedef = jax.tree.flatten(updates)
            rest = (treedef.flatten_up_to(t) for t in (state.leaves, params))
            pairs = [galore_step(c, h, state.count, *arrays) for arrays in zip(grads, *rest)]
            moved, leaves = (treedef.unflatten(part) for part in zip(*pairs))
            return moved, GaLoreState(state.count + 1, leaves)

        return optax.GradientTransformation(init, update)

    return make


def galore(c: GaLoreConfig) -> dict[str, ParamGroup]:
    rates = c.model_dump(include={"learning_rate", "weight_decay", "b1", "b2", "eps"})
    adam = {**rates, "learning_rate": c.adamw_lr}
    matrix = {**rates, "gap": float(c.gap), "scale": c.scale}
    decayed = ParamGroup(make_adamw, adam)
    plain = ParamGroup(make_adamw, {**adam, "weight_decay": 0.0})
    return {
        "matrix": ParamGroup(make_galore(c), matrix, mup_rule=None, matrices=True),
        "embedding": decayed,
        "head": decayed,
        "gain": plain,
        "scalar": plain,
    }

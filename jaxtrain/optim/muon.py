"""Muon on stacked matrices, AdamW for the rest (Jordan et al. 2024; nanochat's recipe).

A matrix is `[..., in, out]`; leading dims are a batch of matrices, orthogonalised together.
Each refinement is a switch, so that it can be measured.
"""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from pydantic import Field

from jaxtrain.optim.adamw import make_adamw
from jaxtrain.optim.orthogonalize import (
    COEFFICIENTS,
    LARGEST,
    line_squares,
    normalize,
    orthogonalize,
)
from jaxtrain.optim.param_groups import Hyper, OptimizerConfig, ParamGroup
from jaxtrain.optim.soap import (
    SOAPDirectionConfig,
    SOAPLeaf,
    SOAPState,
    divide_momentum,
    init_leaf,
    soap_peaks,
)
from jaxtrain.optim.types import Adjust, Number
from jaxtrain.parallel import distribute_matrices
from jaxtrain.settings import UserError
from jaxtrain.weights.params import ParamSpec

DECAY = 0.28  # weight decay of the matrices of nanochat's d12

# nanochat's b1 and b2 for the groups that AdamW updates.
ADAM_BETAS = {
    "embedding": (0.8, 0.995),
    "value_embedding": (0.8, 0.995),
    "head": (0.8, 0.96),
    "residual_scale": (0.8, 0.95),
    "x0_scale": (0.96, 0.95),
    "scalar": (0.8, 0.95),
    "gain": (0.8, 0.95),
}
AdamGroup = Literal[
    "embedding", "value_embedding", "head", "residual_scale", "x0_scale", "scalar", "gain"
]
Beta = Annotated[float, Field(ge=0, lt=1)]


class MuonConfig(OptimizerConfig):
    """Muon for matrices; AdamW for embeddings, head, gains and scalars, with their own learning
    rates."""

    name: Literal["muon"] = "muon"
    matrix_lr: float | None = Field(
        None,
        gt=0,
        description="peak learning rate of the matrices; default 0.02 x sqrt(batch tokens / 2^19)",
    )
    weight_decay: float | None = Field(
        None,
        ge=0,
        description="decoupled weight decay of the matrices, multiplied by their learning rate; "
        "default 0.28 x sqrt(batch tokens / 2^19) x d12 parameters / parameters (of matrices and "
        "head), at most 0.1 / matrix_lr. The default does not depend on train.steps",
    )
    weight_decay_schedule: Literal["constant", "cosine"] = Field(
        "cosine", description="schedule of the matrices' weight decay; cosine ends at 0"
    )
    momentum: float = Field(
        0.97, ge=0, lt=1, description="momentum of the matrices after its warm-up"
    )
    momentum_start: float = Field(0.85, ge=0, lt=1, description="momentum at the first step")
    momentum_end: float = Field(
        0.90,
        ge=0,
        lt=1,
        description="momentum at the last step, approached as the learning rate decays",
    )
    momentum_warmup_steps: int = Field(
        400, ge=0, description="steps of linear warm-up from momentum_start to momentum"
    )
    nesterov: bool = Field(True, description="use Nesterov momentum")
    orthogonalize: Literal["polar_express", "polar_express_4", "newton_schulz"] = Field(
        "polar_express",
        description="iteration that orthogonalizes the update, with 5 steps; polar_express_4: 4 "
        "steps, after scaling by the norm of the Gram matrix",
    )
    gram_newton_schulz: bool = Field(
        True,
        description="iterate on the smaller Gram matrix of long matrices (Gram Newton-Schulz), in "
        "float16 on a GPU",
    )
    symmetric: bool = Field(
        True,
        description="compute only one triangle of symmetric products, where a kernel exists "
        "(Hopper)",
    )
    equilibrate: bool = Field(
        True, description="give all output rows the same norm before orthogonalizing (MuonEq)"
    )
    renormalize: bool = Field(
        True, description="scale the update to the norm of an orthogonal matrix (Muon+)"
    )
    normuon: bool = Field(
        True, description="divide the update by a running norm per row or column (NorMuon)"
    )
    normuon_b2: float = Field(0.9, ge=0, lt=1, description="decay rate of NorMuon's second moment")
    cautious_decay: bool = Field(
        True,
        description="decay only weights that the update moves towards zero (cautious weight decay)",
    )
    embedding_lr: float | None = Field(
        None,
        gt=0,
        description="peak learning rate of the token embedding; default 0.3 x sqrt(batch tokens / "
        "2^19) x sqrt(768 / width)",
    )
    value_embedding_lr: float | None = Field(
        None,
        gt=0,
        description="peak learning rate of the value embeddings; default 0.15 x sqrt(batch tokens "
        "/ 2^19) x sqrt(768 / width)",
    )
    head_lr: float | None = Field(
        None,
        gt=0,
        description="peak learning rate of the head; default 0.008 x sqrt(batch tokens / 2^19) x "
        "sqrt(768 / width)",
    )
    residual_scale_lr: float | None = Field(
        None,
        gt=0,
        description="peak learning rate of the residual scales; default 0.005 x sqrt(batch tokens "
        "/ 2^19)",
    )
    x0_scale_lr: float | None = Field(
        None,
        gt=0,
        description="peak learning rate of the x0 scales; default 0.5 x sqrt(batch tokens / 2^19)",
    )
    scalar_lr: float = Field(
        0.2, gt=0, description="peak learning rate of smear, backout and other scalars"
    )
    gain_lr: float = Field(0.02, gt=0, description="peak learning rate of the norm gains")
    adam_betas: dict[AdamGroup, tuple[Beta, Beta]] = Field(
        default_factory=dict,
        description="AdamW's (b1, b2) by parameter group, such as {embedding: [0.5, 0.95]}; other "
        "groups keep nanochat's",
    )
    qk_heads: int | None = Field(
        None,
        ge=1,
        description="number of query heads, or key heads, orthogonalized as one matrix; 1: each "
        "head by itself, 2: pairs of heads (modded-nanogpt). Default all heads together",
    )
    soap: SOAPDirectionConfig | None = Field(
        None,
        description="normalize the momentum in SOAP's eigenbasis before orthogonalizing "
        "(SOAP-Muon); default off",
    )


class MuonRates(NamedTuple):
    """Rates of a MuonConfig that may be None, resolved."""

    matrix_lr: float
    weight_decay: float
    embedding_lr: float
    value_embedding_lr: float
    head_lr: float
    residual_scale_lr: float
    x0_scale_lr: float


class Scale(NamedTuple):
    """Quantities that the rates are derived from; defaults: the reference, nanochat's d12."""

    width: int = 768
    batch_tokens: int = 2**19  # tokens per step
    horizon: float = 1.0  # compute-optimal training tokens, as a multiple of the d12's
    rates: float = 1.0  # factor on the learning rates, from a custom fit


REFERENCE = Scale()


def muon_rates(c: MuonConfig, scale: Scale = REFERENCE) -> MuonRates:
    """Scale the unset rates from nanochat's d12; rates that are set stay.

    Learning rates grow with the square root of the batch. The weight decay keeps rate x decay x
    steps constant over a whole horizon (Wang & Aitchison 2024); a run of fewer steps uses the same
    decay, as in nanochat.
    """
    batch = math.sqrt(scale.batch_tokens / REFERENCE.batch_tokens)
    rate = batch * scale.rates
    wide = rate * math.sqrt(REFERENCE.width / scale.width)
    matrix_lr = c.matrix_lr or 0.02 * rate
    rates = {
        "matrix_lr": matrix_lr,
        # Otherwise a model much smaller than nanochat's would decay whole weights in each step.
        "weight_decay": min(DECAY * batch / scale.horizon, 0.1 / matrix_lr),
        "embedding_lr": 0.3 * wide,
        "value_embedding_lr": 0.15 * wide,
        "head_lr": 0.008 * wide,
        "residual_scale_lr": 0.005 * rate,
        "x0_scale_lr": 0.5 * rate,
    }
    # Eight digits, so that the rates read well where they are shown.
    given = {name: getattr(c, name) for name in rates}
    derived = {name: float(f"{rate:.8g}") for name, rate in rates.items()}
    return MuonRates(**{n: derived[n] if given[n] is None else given[n] for n in rates})


def resolve_muon(c: MuonConfig, scale: Scale) -> MuonConfig:
    """Fill in the rates from `muon_rates`."""
    return MuonConfig.model_validate({**c.model_dump(), **muon_rates(c, scale)._asdict()})


class MuonState(NamedTuple):
    """Momentum of each matrix, NorMuon's mean squares, and SOAP's state (None if off)."""

    momentum: Any
    second: Any
    soap: Any = None  # SOAPState


def second_moment_axis(shape: tuple[int, ...]) -> int:
    """Axis of NorMuon's mean: inputs if there are at least as many outputs, else outputs."""
    return -2 if shape[-1] >= shape[-2] else -1


def num_blocks(spec: ParamSpec | None, heads: int | None) -> int:
    """Number of column blocks that are orthogonalised separately: `heads` heads each, of q and k.

    A matrix with fewer heads is one block. Raises UserError if `heads` does not divide its heads.
    """
    if spec is None or heads is None or spec.head_dim is None:
        return 1
    there = spec.shape[-1] // spec.head_dim
    if there > heads and there % heads:
        raise UserError(
            f"optim.qk_heads {heads} does not divide {there} heads; set optim.qk_heads=1"
        )
    return max(1, there // heads)


def split_columns(x: Float[Array, "*L i o"], blocks: int) -> Float[Array, "*Ls i c"]:
    """[..., in, blocks x columns] -> [..., blocks, in, columns]; unchanged for one block."""
    if blocks == 1:
        return x
    return jnp.moveaxis(x.reshape(*x.shape[:-1], blocks, -1), -2, -3)


def join_columns(x: Float[Array, "*Ls i c"], blocks: int) -> Float[Array, "*L i o"]:
    """Inverse of `split_columns`."""
    if blocks == 1:
        return x
    return jnp.moveaxis(x, -3, -2).reshape(*x.shape[:-3], x.shape[-2], -1)


def make_muon(c: MuonConfig) -> Callable[[Hyper], optax.GradientTransformation]:
    """Function from the current rates to the transformation of a tree of matrices [..., in, out].

    Learning rate and decay are multiplied by sqrt(max(1, out / in)).
    """

    def second_like(p: jax.Array) -> jax.Array | None:
        if not c.normuon:
            return None
        shape = list(p.shape)
        shape[second_moment_axis(p.shape)] = 1
        return jnp.zeros(shape, p.dtype)

    def direction(
        blocks: int, b2: Number, u: jax.Array, v: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        shape, axis = u.shape, second_moment_axis(u.shape)
        u = normalize(split_columns(u, blocks), c.equilibrate)
        iteration = COEFFICIENTS[c.orthogonalize], c.gram_newton_schulz, c.symmetric
        u = orthogonalize(u, *iteration, LARGEST.get(c.orthogonalize))
        u = join_columns(u, blocks)
        # All norms below are computed from one pass over the 16-bit result.
        squares = line_squares(u, axis)
        norm = jnp.sqrt(jnp.sum(squares, axis=(-2, -1), keepdims=True))
        factor: Number = 1.0
        if c.renormalize:
            rank = blocks * min(shape[-2], shape[-1] // blocks)
            factor = math.sqrt(rank) / jnp.maximum(norm, 1e-10)
        if v is not None:
            v = now = b2 * v + (1 - b2) * jnp.square(factor) * squares / shape[axis]
            lines = jax.lax.rsqrt(jnp.maximum(now, 1e-10))
            evened = jnp.sqrt(jnp.sum(squares * jnp.square(lines), axis=(-2, -1), keepdims=True))
            factor = factor * lines * norm / jnp.maximum(evened, 1e-10)
        return u * jnp.float32(factor), v

    def leaf(
        h: Hyper,
        count: jax.Array | None,
        g: jax.Array,
        m: jax.Array,
        v: jax.Array | None,
        s: SOAPLeaf | None,
        p: jax.Array,
        spec: ParamSpec | None,
    ):
        mu = h["momentum"]
        m = mu * m + (1 - mu) * g
        u = mu * m + (1 - mu) * g if c.nesterov else m
        if c.soap and s is not None and count is not None:
            u, s = divide_momentum(c.soap, h, count, g, u, s)
        b2 = h["b2"]
        work = functools.partial(direction, num_blocks(spec, c.qk_heads))
        alone = spec is None
        u, v = work(b2, u, v) if alone else distribute_matrices(work, spec.axes, u, v, rate=b2)
        decayed = p * (u * p >= 0) if c.cautious_decay else p
        rate = h["learning_rate"] * math.sqrt(max(1.0, g.shape[-1] / g.shape[-2]))
        return -rate * (u + h["weight_decay"] * decayed), m, v, s

    def make(h: Hyper) -> optax.GradientTransformation:
        def init(params):
            momentum = jax.tree.map(jnp.zeros_like, params)
            state = MuonState(momentum, jax.tree.map(second_like, params))
            if (soap := c.soap) is None:
                return state
            bare = lambda p: init_leaf(p, soap.max_dim)._replace(m=None)
            zero = jnp.zeros((), jnp.int32)
            return state._replace(soap=SOAPState(zero, jax.tree.map(bare, params)))

        def update(updates, state, params=None, specs=None):
            grads, treedef = jax.tree.flatten(updates)
            nothing = treedef.unflatten([None] * len(grads))
            count, divided = state.soap or (None, nothing)
            trees = (state.momentum, state.second, divided, params, specs or nothing)
            rest = (treedef.flatten_up_to(t) for t in trees)
            leaves = (leaf(h, count, *arrays) for arrays in zip(grads, *rest))
            moved, *states = (treedef.unflatten(part) for part in zip(*leaves))
            new = MuonState(*states[:2])
            if count is not None:
                new = new._replace(soap=SOAPState(count + 1, states[2]))
            return moved, new

        return optax.GradientTransformationExtraArgs(init, update)

    return make


def adjust(c: MuonConfig) -> Adjust:
    """Schedules of momentum (warm-up, then down along the rate's decay) and weight decay."""

    def now(hyper: Hyper, step: jax.Array, schedule: Hyper) -> Hyper:
        total, peak = schedule["total_steps"], hyper["momentum"]
        warm = jnp.clip(step / jnp.maximum(hyper["momentum_warmup_steps"], 1), 0.0, 1.0)
        down = schedule.get("decay_steps", 0.0)
        cool = jnp.clip((step - (total - down)) / jnp.maximum(down, 1), 0.0, 1.0)
        rising = hyper["momentum_start"] + (peak - hyper["momentum_start"]) * warm
        falling = peak + (hyper["momentum_end"] - peak) * cool
        decay = hyper["weight_decay"]
        if c.weight_decay_schedule == "cosine":
            decay = decay * 0.5 * (1 + jnp.cos(math.pi * step / total))
        return {**hyper, "momentum": jnp.where(warm < 1, rising, falling), "weight_decay": decay}

    return now


def muon(c: MuonConfig) -> dict[str, ParamGroup]:
    """nanochat's groups: rates, betas and decays by role. Unset rates are the reference's."""
    rates = muon_rates(c)

    def adam(group: AdamGroup, rate: float, weight_decay: float) -> ParamGroup:
        b1, b2 = c.adam_betas.get(group, ADAM_BETAS[group])
        peaks = {
            "learning_rate": rate,
            "weight_decay": weight_decay,
            "b1": b1,
            "b2": b2,
            "eps": 1e-10,
        }
        return ParamGroup(make_adamw, peaks)

    matrix = {
        "learning_rate": rates.matrix_lr,
        "weight_decay": rates.weight_decay,
        "momentum": c.momentum,
        "momentum_start": c.momentum_start,
        "momentum_end": c.momentum_end,
        "momentum_warmup_steps": c.momentum_warmup_steps,
        "b2": c.normuon_b2,
    }
    if c.soap:
        matrix |= {f"soap_{name}": peak for name, peak in soap_peaks(c.soap).items()}
    return {
        "matrix": ParamGroup(make_muon(c), matrix, adjust(c), mup_rule="spectral", matrices=True),
        "embedding": adam("embedding", rates.embedding_lr, 0.001),
        "value_embedding": adam("value_embedding", rates.value_embedding_lr, 0.01),
        "head": adam("head", rates.head_lr, 0.01),
        "residual_scale": adam("residual_scale", rates.residual_scale_lr, 0.05),
        "x0_scale": adam("x0_scale", rates.x0_scale_lr, 0.0),
        "scalar": adam("scalar", c.scalar_lr, 0.0),
        "gain": adam("gain", c.gain_lr, 0.0),
    }

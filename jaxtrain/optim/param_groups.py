"""Parameter groups: each role or group of parameters has its own transformation and rates.

An optimizer is a table `group -> ParamGroup`. A parameter belongs to the row of its declared
group, or else of its role. Rates are arguments of the compiled step (`hyper`), never constants.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field, field_validator

from jaxtrain.optim.offload import (
    OffloadConfig,
    UpdateGroup,
    apply_offloaded,
    name_of,
    only,
    replace,
    to_device,
)
from jaxtrain.optim.rate_schedule import RateSchedule, Shares
from jaxtrain.optim.schedule import Schedule, Trapezoid, multiplier
from jaxtrain.optim.types import (
    Hyper,
    Hyperparams,
    Make,
    OptState,
    ParamGroup,
    RunPosition,
    Transformation,
    Updates,
    apply_mup_multiplier,
)
from jaxtrain.optim.wrappers import (
    WrapperConfig,
    make_wrappers,
    schedule_restarts,
    with_wrappers,
)
from jaxtrain.settings import Settings, UserError
from jaxtrain.weights.params import BALANCE_GROUPS, Params, ParamSpec, Specs

# muP factors on the learning rate (Yang et al. 2022, "Tensor Programs V", table 3), from the in and
# out dims as multiples of the base model's. Orthogonal updates (Muon) need no factor.
MUP_RULES: dict[str, Callable[[float, float], float]] = {
    "adam": lambda wider_in, wider_out: 1 / wider_in,
    "sgd": lambda wider_in, wider_out: wider_out / wider_in,
    "spectral": lambda wider_in, wider_out: 1.0,
}


POWERS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}


class BatchScaling(Settings):
    """Scaling of learning rates with the batch size (Goyal et al. 2017; Malladi et al. 2022)."""

    rule: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="learning rates of all groups grow with (batch tokens / reference_tokens)^0, "
        "^1 or ^0.5",
    )
    stage_rule: Literal["none", "linear", "sqrt"] = Field(
        "sqrt",
        description="learning rates in a data stage grow with (its batch_size / "
        "train.batch_size)^0, ^1 or ^0.5",
    )
    reference_tokens: int = Field(
        2**19, ge=1, description="batch size in tokens for which the learning rates are given"
    )

    def factor(self, tokens: int | None) -> float:
        """Factor on the rates for a step of this many tokens (None: the reference)."""
        return ((tokens or self.reference_tokens) / self.reference_tokens) ** POWERS[self.rule]


class CommonConfig(Settings):
    """Settings common to all optimizers."""

    clip_norm: float | None = Field(
        None,
        gt=0,
        description="maximum global gradient norm, to which larger gradients are clipped; null: "
        "no clipping",
    )
    multipliers: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="factors on the learning rates of parameter groups, such as {embedding: 0.1}",
    )
    decay_multipliers: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="factors on the weight decays of parameter groups, such as {embedding: 0}",
    )
    state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="dtype of the optimizer states of matrices and embeddings (8-bit states keep "
        "theirs). bfloat16 halves them, and loses changes of a second moment below 0.4% per step",
    )
    offload: OffloadConfig = Field(
        None,
        description="storage of the states of matrices and embeddings between steps; they are "
        "copied to the device layer by layer, and results change by rounding at most. Default "
        "device memory",
    )
    wrappers: tuple[WrapperConfig, ...] = Field(
        (),
        description="wrappers around the optimizer, innermost first: [{name: cautious}, {name: "
        "ema, decay: 0.999}]",
    )
    batch_scaling: BatchScaling = Field(
        default_factory=lambda: BatchScaling.model_validate({}),
        description="scaling of the learning rates with the batch size",
    )


SCHEDULE = {"name": "trapezoid", "warmup_steps": 40, "final_fraction": 0.05}


class OptimizerConfig(CommonConfig):
    """Settings of optimizers whose learning rate decays towards the end of a run."""

    schedule: Schedule = Field(
        default_factory=lambda: Trapezoid.model_validate(SCHEDULE),
        description="learning rate schedule",
    )

    @field_validator("schedule", mode="before")
    @classmethod
    def _rest_of_default(cls, given: Any) -> Any:
        """Setting one field of the default schedule keeps the defaults of its other fields."""
        if isinstance(given, dict) and given.get("name", "trapezoid") == "trapezoid":
            return SCHEDULE | given
        return given


class Optimizer(NamedTuple):
    """The optimizer of a run, as pure functions.

    `init(params)` returns the state.
    `update(grads, state, params, step, hyperparams)` returns the updates and the new state.
    `apply(grads, state, params, step, hyperparams, finite)` returns the new parameters and state;
    both are unchanged if `finite` is False. With `offload` only `apply` works, because large states
    are then in host memory (`optim/offload.py`).
    `groups` and `rates(step, hyperparams)`, the rates by group: the building blocks of `apply`.
    `rate(step, hyperparams)`: the learning rate to log, of the matrices if there are any.
    `hyperparams`: every number of the optimizer (peak rates and schedule). Pass it to the compiled
    step as an argument, so that a changed rate does not recompile.
    `eval_params(params, state)`: the weights to validate, sample and export.
    `metrics(state)`: the wrappers' metrics of a step.
    `averages`: whether a wrapper has its own evaluation weights, such as an average.
    `validate_trained`: whether to validate the trained weights as well as those.
    `export_trained`: whether to export the trained weights instead.
    """

    init: Callable[[Params], OptState]
    update: Callable[[Params, OptState, Params, jax.Array, Hyperparams], tuple[Updates, OptState]]
    rate: Callable[[jax.Array, Hyperparams], jax.Array]
    hyperparams: Hyperparams
    eval_params: Callable[[Params, OptState], Params]
    apply: Callable[..., tuple[Params, OptState]]
    metrics: Callable[[OptState], dict[str, jax.Array]]
    offload: bool
    groups: dict[str, UpdateGroup]
    rates: Callable[[jax.Array, Hyperparams], dict[str, Hyper]]
    averages: bool = False
    validate_trained: bool = False
    export_trained: bool = False


def single_rate_groups(
    make: Make,
    peaks: dict[str, float],
    plain: ParamGroup | None = None,
    **traits: Any,
) -> dict[str, ParamGroup]:
    """Table of an optimizer with one rate; gains and scalars use `plain`, by default no decay."""
    decayed = ParamGroup(make, peaks, **traits)
    plain = plain or decayed._replace(peaks={**peaks, "weight_decay": 0.0})
    return {"matrix": decayed, "embedding": decayed, "head": decayed} | {
        "gain": plain, "scalar": plain
    }  # fmt: skip


def per_matrix(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a stateless transformation that uses norms to each matrix [in, out] of a stack."""

    def leaf(update: Any, param: Any) -> Any:
        one = lambda u, p: tx.update(u, tx.init(p), p)[0]
        for _ in range(update.ndim - 2):
            one = jax.vmap(one)
        return one(update, param)

    return optax.stateless(lambda updates, params: jax.tree.map(leaf, updates, params))


class Moment(NamedTuple):
    """An optimizer state of one parameter: 8-bit codes and their scales, or values and None."""

    values: jax.Array
    scale: jax.Array | None


def with_hyper(
    label: str,
    make: Make,
    peaks: dict[str, float],
    state_dtype: str = "float32",
) -> Transformation:
    """A transformation that is rebuilt at each update from the current rates.

    state_dtype: storage dtype of float32 states with two or more dims. Quantized states keep
    float32 scales: these are few, and each is a factor on a whole block of values.
    """
    widen = lambda x: x.astype(jnp.float32) if x.dtype == state_dtype else x
    coded = lambda x: isinstance(x, Moment) and x.scale is not None

    def narrow(x: Any) -> Any:
        wide = not coded(x) and x.ndim > 1 and x.dtype == jnp.float32
        return x.astype(state_dtype) if wide else x

    def init(params):
        state = make(dict(peaks)).init(params)
        if state_dtype == "float32":
            return state
        return jax.tree.map(narrow, state, is_leaf=coded)

    def update(updates, state, params=None, **extra):
        now = optax.with_extra_args_support(make(extra["hyper"][label]))
        given = state if state_dtype == "float32" else jax.tree.map(widen, state)
        updates, new = now.update(updates, given, params, specs=extra["specs"])
        # without the cast, float32 rates would promote the states of bfloat16 parameters
        return updates, jax.tree.map(lambda n, o: n.astype(o.dtype), new, state)

    return optax.GradientTransformationExtraArgs(init, update)


def make_balance(h: Hyper) -> optax.GradientTransformation:
    """Lower the bias of experts whose load (their gradient) is above the mean of their layer."""
    rise = lambda load: -h["learning_rate"] * jnp.sign(load - jnp.mean(load, -1, keepdims=True))
    return optax.stateless(lambda loads, params: jax.tree.map(rise, loads))


# Groups of every optimizer: `frozen` is not updated, `router_bias` is updated by the load, and
# `router_load` only passes the load to the metrics.
BALANCE_ROWS = {
    BALANCE_GROUPS[0]: ParamGroup(make_balance, {"learning_rate": 1e-3, "weight_decay": 0.0}),
    "frozen": ParamGroup(
        lambda h: optax.set_to_zero(), {"learning_rate": 0.0, "weight_decay": 0.0}
    ),
    BALANCE_GROUPS[1]: ParamGroup(
        lambda h: optax.set_to_zero(), {"learning_rate": 0.0, "weight_decay": 0.0}
    ),
}


def label_of(
    path: tuple[Any, ...], spec: ParamSpec, table: dict[str, ParamGroup]
) -> tuple[str, float]:
    """A parameter's row of the table, and the muP factor on its learning rate."""
    name = "/".join(str(key.key) for key in path)
    label = spec.group if spec.group in table else spec.role
    if label not in table:
        raise UserError(
            f"optim: no group covers {name} (role {spec.role}); there are {', '.join(table)}"
        )
    group, ndim = table[label], len(spec.shape)
    if group.matrices and (spec.ins, spec.outs) != ((ndim - 2,), (ndim - 1,)):
        raise UserError(
            f"optim: {name} is in group {label}, which works on matrices [..., in, out], but its "
            f"declared in and out dims are {spec.ins} and {spec.outs}; declare it as a matrix, or "
            f"in another group"
        )
    if spec.wider == (1.0, 1.0):
        return label, 1.0
    if group.mup_rule is None:
        raise UserError(
            f"model.init mup: this optimizer's rates for {name} (group {label}) have no rule that "
            f"follows the width; use adamw, lion, muon, soap or sgd"
        )
    return label, MUP_RULES[group.mup_rule](*spec.wider)


def with_multipliers(
    c: CommonConfig, table: dict[str, ParamGroup], specs: Specs, factor: float
) -> dict[str, ParamGroup]:
    """The table with the configured factors on its peak rates and decays.

    A configured group without a row, which parameters declare, gets the row of its role.
    """
    roles = {spec.group: spec.role for spec in jax.tree.leaves(specs)}
    names = [*table, *(name for name in roles if name not in table)]
    changed = {"multipliers": c.multipliers, "decay_multipliers": c.decay_multipliers}
    for field, factors in changed.items():
        for name in factors:
            if name not in names:
                raise UserError(f"optim.{field}: no group {name}; there are {', '.join(names)}")
    given = {*c.multipliers, *c.decay_multipliers}
    rows = {n: table[n] if n in table else table[roles[n]] for n in names
            if n in table or n in given}  # fmt: skip

    def scaled(name: str, group: ParamGroup) -> ParamGroup:
        rate = group.peaks["learning_rate"] * factor * c.multipliers.get(name, 1.0)
        peaks = {**group.peaks, "learning_rate": rate}
        if name in c.decay_multipliers:
            peaks["weight_decay"] *= c.decay_multipliers[name]
        return group._replace(peaks=peaks)

    return {name: scaled(name, group) for name, group in rows.items()}


def make_transform(label: str, group: ParamGroup, state_dtype: str) -> Transformation:
    """The transformation of one group, with its wrappers.

    Wrapper states ignore `state_dtype`: bfloat16 would round away the steps of a slow average.
    """
    tx = with_hyper(label, group.make, group.peaks, state_dtype)
    for wrapper in group.wrappers:
        tx = wrapper.wrap(tx, label)
    return tx


def build_optimizer(
    c: CommonConfig,
    schedule: Schedule,
    table: dict[str, ParamGroup],
    specs: Specs,
    total_steps: int,
    batch_tokens: int | None = None,
    shares: Shares = (),
) -> Optimizer:
    """Build the optimizer of a parameter tree from its table of groups."""
    wrappers = make_wrappers(c.wrappers, any(group.eval_params for group in table.values()))
    restarts = schedule_restarts(wrappers, total_steps)
    clock = RateSchedule(schedule, restarts, shares, POWERS[c.batch_scaling.stage_rule])
    table = with_wrappers(wrappers, table) | BALANCE_ROWS
    table = with_multipliers(c, table, specs, c.batch_scaling.factor(batch_tokens))
    pairs = jax.tree_util.tree_map_with_path(lambda p, s: label_of(p, s, table), specs)
    is_pair = lambda x: isinstance(x, tuple)
    name = lambda pair: pair[0] if pair[1] == 1 else f"{pair[0]} x {pair[1]:g}"
    labels = jax.tree.map(name, pairs, is_leaf=is_pair)
    used = {name(pair): pair for pair in sorted(set(jax.tree.leaves(pairs, is_leaf=is_pair)))}
    transforms: dict[Any, Transformation] = {
        name: make_transform(name, table[row], c.state_dtype) for name, (row, _) in used.items()
    }
    tx = optax.partition(
        transforms,
        labels,
        mask_compatible_extra_args=True,  # each group gets its own `specs`
    )
    wholes = {n: table[row].matrices or not table[row].by_rows for n, (row, _) in used.items()}
    members: dict[str, set[str]] = {name: set() for name in used}
    for path, label in jax.tree_util.tree_leaves_with_path(labels):
        members[label].add(name_of(path))
    groups = {n: UpdateGroup(tx, members[n], wholes[n]) for n, tx in transforms.items()}
    peaks = {row: table[row].peaks for row, _ in used.values()}
    hyperparams = {**clock.values(total_steps), "groups": peaks}

    def rates(step: jax.Array, hyperparams: Hyperparams) -> dict[str, Hyper]:
        values = hyperparams["schedule"]
        step, factor = clock.at(step, hyperparams)
        hyper = {}
        position = RunPosition(
            step, values["total_steps"], lambda s: multiplier(schedule, values, s)
        )
        for name, (row, wider) in used.items():
            now = table[row].adjust(hyperparams["groups"][row], step, values)
            for wrapper in table[row].wrappers:
                now = wrapper.adjust(now, position)
            hyper[name] = apply_mup_multiplier(
                {**now, "learning_rate": now["learning_rate"] * factor}, wider
            )
        return hyper

    def update(
        grads: Params, state: OptState, params: Params, step: jax.Array, hyperparams: Hyperparams
    ) -> tuple[Updates, OptState]:
        hyper = rates(step, hyperparams)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        return tx.update(grads, state, params, hyper=hyper, specs=specs)

    def apply(
        grads: Params,
        state: OptState,
        params: Params,
        step: jax.Array,
        hyperparams: Hyperparams,
        finite: jax.Array | None = None,
    ) -> tuple[Params, OptState]:
        if c.offload:
            trees, hyper = (grads, state, params, specs), rates(step, hyperparams)
            return apply_offloaded(groups, labels, hyper, trees, finite)
        updates, new = update(grads, state, params, step, hyperparams)
        done = cast(Params, optax.apply_updates(params, updates)), new
        if finite is None:
            return done
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), done, (params, state))

    def rate(step: jax.Array, hyperparams: Hyperparams) -> jax.Array:
        groups = hyperparams["groups"]
        shown = groups.get("matrix") or groups[min(groups)]  # finetuning may train no matrix
        return shown["learning_rate"] * clock.at(step, hyperparams)[1]

    def eval_params(params: Params, state: Any) -> Params:
        for name, (row, _) in used.items():
            if average := table[row].eval_params:
                mine = jax.tree.map(functools.partial(only, name), labels, params)
                mine = average(to_device(state.inner_states[name].inner_state), mine)
                params = jax.tree.map(replace, params, mine)
        return params

    def metrics(state: Any) -> dict[str, jax.Array]:
        measure = wrappers[-1].metrics if wrappers else None
        return measure([state.inner_states[n].inner_state for n in used]) if measure else {}

    hyperparams = jax.tree.map(np.float32, hyperparams)
    return Optimizer(
        tx.init,
        update,
        rate,
        hyperparams,
        eval_params,
        apply,
        metrics,
        c.offload is not None,
        groups,
        rates,
        any(wrapper.eval_params for wrapper in wrappers),
        any(wrapper.validate_trained for wrapper in wrappers),
        any(wrapper.export_trained for wrapper in wrappers),
    )

"""Prompt and prefix tuning: trained virtual tokens before every document (`model/prefix.py`)."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.finetune.config import PrefixConfig, PromptConfig
from jaxtrain.finetune.partition import Partition, added_modules
from jaxtrain.model import Params, ParamSpec, initialize
from jaxtrain.model.init import normal, uniform
from jaxtrain.weights.params import Specs


def prompt_learning(c: PromptConfig | PrefixConfig, specs: Specs, dtype: jnp.dtype) -> Partition:
    """Freeze the whole base. A prompt starts from embeddings of random tokens, as in the paper; a
    prefix starts from its declared values, or from those of its projection."""
    partition = added_modules(c, specs, dtype)

    def from_vocabulary(base: Params, seed: int) -> tuple[Params, Params]:
        table_VD = base["embed"]
        rows_P = jax.random.randint(jax.random.key(seed), (c.virtual_tokens,), 0, len(table_VD))
        return base, {"prompt": table_VD[rows_P].astype(jnp.float32)}

    if c.name == "prompt":
        return partition._replace(init=from_vocabulary)
    if c.projection is None:
        return partition
    declared = prefix_projection(c.projection, partition.trainable["prefix"]["k"])
    return partition._replace(
        trainable={"prefix": declared},
        join=lambda params, frozen: partition.join(prefix_keys_values(params), frozen),
        init=lambda base, seed: (base, initialize({"prefix": declared}, seed)),
    )


def prefix_projection(hidden: int, table: ParamSpec) -> dict[str, ParamSpec]:
    """Declare an MLP that computes the prefix's keys and values, each [L, P, C] as `table`.

    Sizes and initial values follow peft's PrefixEncoder: embeddings N(0, 1), matrices and biases
    uniform in +-1/sqrt(in).
    """
    (L, P, C), (layers, _, heads) = table.shape, table.axes

    def linear(rows: int, stack: tuple, axes: tuple, columns: int, axis: str | None) -> Any:
        init = uniform(-1 / math.sqrt(rows), 1 / math.sqrt(rows))
        n = len(stack)
        return (
            ParamSpec((*stack, rows, columns), (*axes, None, axis), init, "matrix",
                      ins=(n,), outs=(n + 1,), group="matrix"),
            ParamSpec((*stack, columns), (*axes, axis), init, "gain", group="bias"),
        )  # fmt: skip

    found = {"embed": ParamSpec((P, C), (None, None), normal(1.0), "embedding", group="prefix")}
    found["up"], found["up_bias"] = linear(C, (), (), hidden, None)
    for name in "kv":
        found[name], found[f"{name}_bias"] = linear(hidden, (L,), (layers,), C, heads)
    return found


def prefix_keys_values(params: Params) -> Params:
    """Return the model's prefix keys and values, computed by the projection if there is one."""
    p = params["prefix"]
    if "embed" not in p:
        return params
    dtype = p["embed"].dtype
    h_PF = jnp.tanh(p["embed"] @ p["up"] + p["up_bias"][None]).astype(dtype)

    def table(name: str) -> jax.Array:
        x_LPC = jnp.einsum("pf,lfc->lpc", h_PF, p[name]) + p[f"{name}_bias"][:, None]
        return x_LPC.astype(dtype)

    return {"prefix": {name: table(name) for name in "kv"}}

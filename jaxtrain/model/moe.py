"""Mixture of experts: a float32 router, dropless dispatch, load balancing by bias and by loss.

The balancing bias is a parameter that does not enter the loss: its gradient is the number of
tokens per expert in the step (the load). That is summed over microbatches and devices like any
gradient. The optimizer's group `router_bias` lowers the bias where the load is above the mean (Wang
et al. 2024, "Auxiliary-Loss-Free Load Balancing"). The load metrics come from it too.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import jaxtrain_kernels as kernels
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain import parallel
from jaxtrain.model import remat
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.init import SCHEMES, constant
from jaxtrain.model.layers import ACTIVATIONS, GATED, FeedForward
from jaxtrain.weights.contract import computed, dequantize
from jaxtrain.weights.params import BALANCE_GROUPS, declare


class MixtureOfExperts(nnx.Module):
    """Experts of `model.moe.hidden` units each; the kinds are those of FeedForward."""

    def __init__(self, c: ResolvedModel, layers: int):
        moe = c.moe
        assert moe is not None and moe.hidden is not None
        scheme = SCHEMES[c.init](c)
        L, E, D, F = layers, moe.experts, c.width, moe.hidden
        self.config, self.kind, self.tiles = moe, c.ffn, c.ffn_tiles
        self.router = declare(
            (L, D, E), ("layers", "embed", None), scheme.up, "matrix", group="router"
        )
        group = BALANCE_GROUPS[not moe.balance_bias]
        self.bias = declare((L, E), ("layers", None), constant(0.0), "scalar", group=group)
        up = lambda: declare(
            (L, E, D, F), ("layers", "experts", "embed", "hidden"), scheme.up, "matrix",
            group="experts",
        )  # fmt: skip
        self.up = up()
        self.gate = up() if c.ffn in GATED else None
        self.down = declare(
            (L, E, F, D), ("layers", "experts", "hidden", "embed"), scheme.down, "matrix",
            group="experts",
        )  # fmt: skip
        wide = c.model_copy(update={"hidden": moe.shared_experts * F})
        self.shared = FeedForward(wide, layers) if moe.shared_experts else None

    def __call__(
        self, x_BTD: Float[Array, "B T D"], relu2_by: str | None = None, by: str | None = None
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B"]]:
        """Return the experts' output for each token, and the balance loss of each sequence.

        Whole sequences are routed, so balance loss and load do not depend on the tiles.
        """
        # Inputs and outputs of router, experts and shared experts have the same sharding. Left
        # free, XLA moves tokens over `context` or, with `tensor` as well, aborts (JAX 0.11: a check
        # fails where the shared experts' gradients multiply states that are sharded in two ways).
        here = lambda y_BTD: parallel.constrain(y_BTD, "batch", "tokens", None)
        x_BTD = gathered(x_BTD)
        array = lambda param: dequantize(param.get_value())  # the kernel groups rows by expert
        ups = tuple(array(p) for p in (self.gate, self.up) if p is not None)
        y_BTD, sizes_E, loss_B = self.experts(x_BTD, ups, array(self.down))
        y_BTD = with_load(y_BTD, self.bias[...], sizes_E / self.config.top_k)
        if self.shared is not None:
            shared = self.shared
            y_BTD += remat.tiled(lambda h: computed(shared(h, relu2_by, by)), x_BTD, self.tiles)
        return here(y_BTD), loss_B

    def experts(
        self, x_BTD: Float[Array, "B T D"], ups: Sequence[Array], down_EFD: Array
    ) -> tuple[Float[Array, "B T D"], Int[Array, "E"], Float[Array, "B"]]:
        """Return the chosen experts' weighted sum, each expert's number of tokens, and the balance
        and z loss of each sequence, weighted."""
        if self.tiles == 1 and parallel.has_whole_experts(down_EFD.shape):
            routing = self.route(kernels.moe_router_permute, x_BTD)
            y_BTD, sizes_E = parallel.moe_of_rows(self.network, routing, ups, down_EFD)
        else:
            routing = self.route(kernels.moe_router, x_BTD)
            y_BTD, sizes_E = parallel.moe_dispatch_combine(
                self.network, routing.x_BTD, routing.chosen_BTk, routing.weights_BTk, ups, down_EFD,
                self.tiles,
            )  # fmt: skip
        c, (_, T, _) = self.config, x_BTD.shape
        mean = lambda a_Bb: jnp.sum(a_Bb, axis=1) / T
        balance_B = balance_loss(mean(routing.hits_BbE) / c.top_k, mean(routing.shares_BbE))
        return y_BTD, sizes_E, c.aux_loss * balance_B + c.z_loss * mean(routing.z_Bb)

    def route[Routing](
        self, kernel: Callable[..., Routing], x_BTD: Float[Array, "B T D"]
    ) -> Routing:
        """Choose experts by score plus bias; weight their outputs by score."""
        c = self.config
        bias_E = self.bias[...] if c.balance_bias else None
        run = functools.partial(kernel, top_k=c.top_k, score_function=c.score_function)
        # Left to XLA, each device would rank the tokens of all devices.
        return parallel.shard_map_tokens(run, x_BTD, self.router[...], bias_E, tokens="tokens")

    def network(
        self,
        x_MD: Float[Array, "M D"],
        weights_M1: Float[Array, "M 1"],
        ups: Sequence[Array],
        down_EFD: Float[Array, "E F D"],
        sizes_E: Int[Array, "E"],
    ) -> Float[Array, "M D"]:
        """Run each group of rows through its expert, times the rows' weights."""
        if self.kind == "relu2":
            (up_EDF,) = ups
            return kernels.grouped_feed_forward_relu2(x_MD, up_EDF, down_EFD, weights_M1, sizes_E)
        act = ACTIVATIONS[self.kind]
        first, *second = (kernels.grouped_matmul(x_MD, up_EDF, sizes_E) for up_EDF in ups)
        h_MF = act(first) * second[0] if second else act(first)
        h_MF = (h_MF * weights_M1).astype(x_MD.dtype)
        return kernels.grouped_matmul(h_MF, down_EFD, sizes_E)


def balance_loss(hits_BE: Float[Array, "B E"], shares_BE: Float[Array, "B E"]) -> Float[Array, "B"]:
    """E sum_e f_e p_e of each sequence: expert e's share of the choices times its mean score share.

    It is 1 if the load is even. It is per sequence, not per batch, as in DeepSeek-V3, so gradient
    accumulation and sharding do not change it.
    """
    return hits_BE.shape[-1] * jnp.sum(hits_BE * shares_BE, axis=-1)


@jax.custom_vjp
def with_load(y_BTD: Array, bias_E: Array, load_E: Array) -> Array:
    """Return y; in the backward pass the bias's gradient is the load."""
    return y_BTD


with_load.defvjp(
    lambda y_BTD, bias_E, load_E: (y_BTD, load_E),
    lambda load_E, g_BTD: (g_BTD, load_E, None),
)


@jax.custom_vjp
def gathered(x_BTD: Array) -> Array:
    """Gather each sequence's tokens over `tensor`; the gradient is sharded over it again."""
    return parallel.constrain(x_BTD, "batch", "tokens", None)


gathered.defvjp(
    lambda x_BTD: (gathered(x_BTD), None),
    lambda _, g_BTD: (parallel.constrain(g_BTD, "batch", "sequence", None),),
)

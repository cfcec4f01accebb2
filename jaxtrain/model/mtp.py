"""Modules of multi-token prediction (MTP; DeepSeek-V3, arXiv:2412.19437, section 2.2).

    h' = W [norm(h at position t); norm(embed(token t + k))]    module k; h: from module k - 1
    states = final norm(layer(h'))                              the head predicts token t + k + 1

Embedding, final norm and head are shared with the model. A module's layer is like the model's, with
full attention, and without experts, value embedding or residual scales. The states of module 0 are
the model's own, which the head reads. Training adds the modules' losses (`objectives/mtp.py`).
Decoding drafts with the first module (`inference/engine/drafts.py`).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxtrain.model.attention import LayerInputs
from jaxtrain.model.block import Block, declare_norm, normed
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.fused_ops import Stream
from jaxtrain.model.init import SCHEMES
from jaxtrain.model.kv_cache import KeysValues, LayerCache
from jaxtrain.model.plan import make_plan
from jaxtrain.model.run_layers import LayerModules, run_layer
from jaxtrain.model.stack import LayerWeights, unstack
from jaxtrain.weights.contract import dense
from jaxtrain.weights.params import ParamSpec, declare

GROUP = "mtp"  # of the modules' matrices; float8, quantization and pruning skip it


class MultiTokenPrediction(nnx.Module):
    """All `model.mtp` modules, stacked."""

    def __init__(self, c: ResolvedModel):
        self.config = layer_config(c)
        self.first = c.depth  # index of the first module's layer, after the model's layers
        K, D = self.config.depth, c.width
        self.state_gain, self.state_shift = declare_norm(c, (K,))
        self.embed_gain, self.embed_shift = declare_norm(c, (K,))
        self.project = declare(
            (K, 2 * D, D), ("layers", "embed", None), SCHEMES[c.init](c).qk, "matrix"
        )
        self.block = Block(self.config, K)
        for _, node in nnx.iter_graph(self):
            if isinstance(node, nnx.Param) and node.get_metadata()["spec"].role == "matrix":
                node.set_metadata("spec", in_group(node.get_metadata()["spec"]))

    def __call__(
        self,
        module: int,
        states_BTD: Float[Array, "B T D"],
        next_BTD: Float[Array, "B T D"],
        inputs: LayerInputs,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], KeysValues | None]:
        """Output of module `module` (from 0) before the final norm, and its keys and values as a
        block returns them. states_BTD: of the previous module. next_BTD: embeddings of the tokens
        `module` + 1 positions later."""
        graphdef, stacked = nnx.split(self)
        one = nnx.merge(graphdef, unstack(stacked, self.config.depth)[module])
        state_BTD = normed(self.config, states_BTD, one.state_gain, one.state_shift)
        next_BTD = normed(self.config, next_BTD, one.embed_gain, one.embed_shift)
        x_BTD = dense(jnp.concatenate([state_BTD, next_BTD], axis=-1), one.project)
        block, weights = nnx.split(one.block)
        layer = {"index": np.int32(self.first + module), "block": weights}
        modules = LayerModules(self.config, {"block": block})
        spec = make_plan(self.config)[module]
        source, pick = LayerWeights(layer, {}), lambda source: source
        own = inputs._replace(x0_BTD=x_BTD)
        stream, kv = run_layer(modules, spec, source, pick, own, cache, False, Stream(x_BTD))
        return stream.total(), kv


def layer_config(c: ResolvedModel) -> ResolvedModel:
    """Configuration of the modules' layers."""
    assert c.mtp is not None
    plain = {"depth": c.mtp, "window_pattern": "L", "rope_base_short": None}
    plain |= dict.fromkeys(("moe", "share_layers", "share_kv", "weight_form", "adapter", "mtp"))
    plain |= dict.fromkeys(("residual_scales", "value_embeddings", "backout", "scan_layers"), False)
    plain |= dict.fromkeys(("stochastic_depth", "token_dropping", "frozen_layers"), 0)
    return c.model_copy(update=plain)


def in_group(spec: ParamSpec) -> ParamSpec:
    """The declaration with the modules' group."""
    return dataclasses.replace(spec, group=GROUP)


def tokens_later(tokens_BT: Array, distance: int) -> Array:
    """The token `distance` positions later in each row; 0 past its end."""
    return jnp.pad(tokens_BT[:, distance:], ((0, 0), (0, distance)))

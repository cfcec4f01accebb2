"""One layer: attention and feed-forward network; each reads the normed stream and adds to it."""

from typing import NamedTuple

from flax import nnx
from jaxtrain_kernels import Fp8Input
from jaxtrain_kernels.matmul.few_rows import InputNorm
from jaxtyping import Array, Float

from jaxtrain.model import remat
from jaxtrain.model.attention import (
    Attention,
    KeyValueProjection,
    LayerInputs,
    ValueEmbedding,
)
from jaxtrain.model.config import ResolvedModel
from jaxtrain.model.fused_ops import add_norm, check_cast
from jaxtrain.model.init import SCHEMES, constant
from jaxtrain.model.kv_cache import KeysValues, LayerCache
from jaxtrain.model.latent_attention import LatentAttention
from jaxtrain.model.layers import Adapter, FeedForward, layer_norm, rms_norm
from jaxtrain.model.moe import MixtureOfExperts
from jaxtrain.model.plan import LayerSpec
from jaxtrain.model.sections import FusedOps
from jaxtrain.parallel import constrain
from jaxtrain.weights.contract import DeferredNorm, PendingProduct, computed, fuses_operations
from jaxtrain.weights.params import declare


class BlockOutput(NamedTuple):
    """Outputs of a layer.

    x_BTD: the stream after attention. branch_BTD: the feed-forward output, still to be added; None
    if x_BTD contains it. kv: keys and values of these tokens, or the updated cache; None with
    kernels.qkv. balance_B: the experts' balance loss of each sequence, None without experts.
    """

    x_BTD: Array | PendingProduct
    branch_BTD: Array | None
    kv: KeysValues | None
    balance_B: Array | None = None


class Block(nnx.Module):
    """Attention and feed-forward network; each reads the normed stream and adds to it."""

    def __init__(self, c: ResolvedModel, layers: int):
        self.attention = (LatentAttention if c.mla else Attention)(c, layers)
        self.ffn = FeedForward(c, layers) if c.moe is None else None
        self.attention_adapter = Adapter(c, layers) if c.adapter else None
        self.ffn_adapter = Adapter(c, layers) if c.adapter else None
        self.config = c
        start = SCHEMES[c.init](c).branch_scale
        if start is None:
            self.attention_scale = self.ffn_scale = None
        else:
            scale = lambda: declare(
                (layers,), ("layers",), constant(start), "scalar", group="residual_scale"
            )
            self.attention_scale, self.ffn_scale = scale(), scale()
        self.attention_gain, self.attention_shift = declare_norm(c, (layers,))
        self.ffn_gain, self.ffn_shift = declare_norm(c, (layers,))
        post = lambda: declare_norm(c, (layers,)) if c.post_norm else (None, None)
        self.attention_post_gain, self.attention_post_shift = post()
        self.ffn_post_gain, self.ffn_post_shift = post()

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"] | PendingProduct,
        spec: LayerSpec,
        inputs: LayerInputs,
        value: ValueEmbedding | None = None,
        cache: LayerCache | None = None,
        h_BTD: Float[Array, "B T D"] | DeferredNorm | None = None,
        ffn: FeedForward | MixtureOfExperts | None = None,
        source: KeyValueProjection | KeysValues | None = None,
    ) -> BlockOutput:
        """h_BTD: the normed stream, if already computed. ffn: the network, if the block has none.
        source: of keys and values (see `Attention`), if the block has none.

        value: the layer's value embedding, if it has one; virtual tokens (no tokens_BT) skip it.
        """
        fused = inputs.fused
        if h_BTD is None:
            readers = () if value is not None else readers_of(self.attention, source)
            h_BTD = self.pre_norm(x_BTD, self.attention_gain, self.attention_shift, *readers)
        tokens_BT, value_BTC = inputs.tokens_BT, None
        if value is not None and tokens_BT is not None:
            assert isinstance(h_BTD, Array)
            h_BTD, value_BTC = value(h_BTD, tokens_BT)
        ends = self.attention_adapter, self.attention_scale
        last = getattr(self.attention, "out", None)  # another module has none
        adds = fused.norm == "xla" and last is not None and self.adds_residual(x_BTD, last, *ends)
        residual = (x_BTD,) if adds else ()
        see = lambda h: self.attention(h, spec, inputs, value_BTC, cache, source, *residual)
        y_BTD, kv = remat.checkpoint_sublayer("attention", see, spec.remat)(h_BTD)
        if not isinstance(y_BTD, PendingProduct):  # nothing follows those
            y_BTD = self.attention_adapter(y_BTD) if self.attention_adapter else y_BTD
            y_BTD = self.post_norm(y_BTD, self.attention_post_gain, self.attention_post_shift)
            y_BTD = scaled(y_BTD, self.attention_scale)
        network, cast = ffn or self.ffn, None
        assert network is not None
        amax = network.input_amax() if isinstance(network, FeedForward) else None
        check_cast(fused.norm, amax)
        if fused.norm == "xla":
            x_BTD = y_BTD if adds else computed(x_BTD) + computed(y_BTD)
            if not isinstance(x_BTD, PendingProduct):
                x_BTD = constrain(x_BTD, "batch", "sequence", None)
            h_BTD = self.pre_norm(x_BTD, self.ffn_gain, self.ffn_shift, *readers_of(network))
        else:
            eps = self.config.norm_eps
            branches = computed(x_BTD), computed(y_BTD)
            x_BTD, h_BTD, cast = add_norm(*branches, eps, fused.norm, amax)
        if isinstance(h_BTD, DeferredNorm):
            assert isinstance(network, FeedForward)
            adds = self.adds_residual(x_BTD, network.down, self.ffn_adapter, self.ffn_scale)
            y_BTD, balance_B = network(h_BTD, residual_BTD=x_BTD if adds else None), None
            if adds or isinstance(y_BTD, PendingProduct):
                return BlockOutput(y_BTD, None, kv)
        else:
            y_BTD, balance_B = self.feed_forward(network, h_BTD, spec.remat, fused, cast)
        y_BTD = self.ffn_adapter(y_BTD) if self.ffn_adapter else y_BTD
        y_BTD = self.post_norm(y_BTD, self.ffn_post_gain, self.ffn_post_shift)
        return BlockOutput(x_BTD, scaled(y_BTD, self.ffn_scale), kv, balance_B)

    def feed_forward(
        self,
        network: FeedForward | MixtureOfExperts,
        h_BTD: Float[Array, "B T D"],
        recomputed: str,
        fused: FusedOps,
        cast: Fp8Input | None,
    ) -> tuple[Float[Array, "B T D"], Array | None]:
        """Output of the network and, of experts, their balance loss. recomputed: `LayerSpec.remat`.
        cast: of h, in float8."""
        if isinstance(network, MixtureOfExperts):
            experts = lambda h: network(h, fused.relu2, fused.ffn)
            return remat.checkpoint_sublayer("ffn", experts, recomputed)(h_BTD)
        feed = lambda h: network(h, fused.relu2, fused.ffn, cast)
        feed = remat.checkpoint_sublayer("ffn", feed, recomputed)
        return remat.tiled(feed, h_BTD, self.config.ffn_tiles), None

    def adds_residual(
        self,
        x_BTD: Float[Array, "B T D"] | PendingProduct,
        matrix: nnx.Param,
        adapter: Adapter | None,
        scale: nnx.Param | None,
    ) -> bool:
        """Whether the kernel of a branch's last matmul adds the stream: nothing is between them."""
        between = adapter is not None or scale is not None or self.config.post_norm
        return not between and fuses_operations(x_BTD, matrix)

    def pre_norm(
        self,
        x_BTD: Float[Array, "B T D"] | PendingProduct,
        gain: nnx.Param | None,
        shift: nnx.Param | None,
        *readers: nnx.Param,
    ) -> Float[Array, "B T D"] | DeferredNorm:
        """Input of a branch: the stream, normed with `block_norm`. readers: the matrices that alone
        read it; their kernel norms a few rows."""
        c = self.config
        if not c.block_norm:
            return computed(x_BTD)
        if c.norm == "rms" and fuses_operations(x_BTD, *readers):
            return DeferredNorm(x_BTD, InputNorm(c.norm_eps, None if gain is None else gain[...]))
        return normed(c, computed(x_BTD), gain, shift)

    def post_norm(
        self, y_BTD: Float[Array, "B T D"], gain: nnx.Param | None, shift: nnx.Param | None
    ) -> Float[Array, "B T D"]:
        """Output of a branch, normed with `post_norm`."""
        return normed(self.config, y_BTD, gain, shift) if self.config.post_norm else y_BTD


def readers_of(
    module: Attention | LatentAttention | FeedForward | MixtureOfExperts,
    source: KeyValueProjection | KeysValues | None = None,
) -> tuple[nnx.Param, ...]:
    """Matrices that alone read a module's input, if a kernel can norm it for them; else ()."""
    if isinstance(module, Attention):
        return module.readers(source)
    return module.readers() if isinstance(module, FeedForward) else ()


def declare_norm(
    c: ResolvedModel, stack: tuple[int, ...]
) -> tuple[nnx.Param | None, nnx.Param | None]:
    """Declare the gain and shift of a norm, each [*stack, D] or None if the norm lacks it."""
    axes = (*("layers" for _ in stack), None)
    vector = lambda start, group: declare(
        (*stack, c.width), axes, constant(start), "gain", group=group
    )
    gain = vector(1.0, "gain") if c.norm_gain else None
    return gain, vector(0.0, "bias") if c.norm_gain and c.norm == "layer" else None


def normed(
    c: ResolvedModel, x: Float[Array, "*B D"], gain: nnx.Param | None, shift: nnx.Param | None
) -> Float[Array, "*B D"]:
    """Apply the norm that the configuration names."""
    gain_D = None if gain is None else gain[...]
    if c.norm == "rms":
        return rms_norm(x, gain_D, eps=c.norm_eps)
    return layer_norm(x, gain_D, None if shift is None else shift[...], eps=c.norm_eps)


def scaled(y_BTD: Array, scale: nnx.Param | None) -> Array:
    """A branch's output times its learned scale, if it has one."""
    return y_BTD if scale is None else (scale[...] * y_BTD).astype(y_BTD.dtype)

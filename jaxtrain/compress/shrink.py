"""`jaxtrain shrink`: cut layers, channels, heads and hidden channels out of a trained model.

Structured pruning as in Minitron (Muralidharan et al. 2024, arXiv:2407.14679): rank, cut, then
distill from the original. A layer ranks by the loss without it: the layer whose removal hurts least
goes, then the next. Heads and hidden channels rank by |sum of weight x gradient| of their output
weights over calibration rows, the first-order change of the loss without them (Molchanov et al.
2019, arXiv:1906.10771; LLM-Pruner, Ma et al. 2023, arXiv:2305.11627). A key/value head is cut
together with its query heads.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxtrain import data
from jaxtrain.compress.arguments import shrink_parser
from jaxtrain.compress.shrink_stream import (
    channel_importance,
    channels_to_keep,
    check_width,
    cut_channels,
)
from jaxtrain.finetune import unflatten
from jaxtrain.model import ResolvedModel, Transformer, split
from jaxtrain.model.config import check_decoder
from jaxtrain.objectives.base import DeviceBatch
from jaxtrain.objectives.next_token import next_token_loss
from jaxtrain.runs.saved import Saved, check_out, is_quantized, load_saved, save_model, without_mtp
from jaxtrain.settings import UserError, command
from jaxtrain.weights.contract import flatten

Arrays = Mapping[str, np.ndarray | Array]  # parameters by path
# If these parameters are zero, a layer adds nothing to the residual stream.
OUTPUTS = (
    "attention/out", "attention/out_bias", "ffn/down", "ffn/down_bias",
    "attention_post_shift", "ffn_post_shift",
)  # fmt: skip
# Block parameters with a dim of heads or of hidden channels -> the index of that dim in [L, ...].
HEADS = {"q": -1, "k": -1, "v": -1, "out": 1, "q_bias": -1, "k_bias": -1, "v_bias": -1}
HIDDEN = {"up": -1, "gate": -1, "down": 1, "up_bias": -1, "gate_bias": -1}
REFUSED = ("moe", "mla", "share_layers", "share_kv", "adapter", "prompt", "prefix")


class Size(NamedTuple):
    """Sizes of the shrunk model."""

    depth: int
    heads: int
    hidden: int
    width: int


def check_shrunk_size(c: ResolvedModel, wanted: Size) -> None:
    """Raise UserError for a model that cannot be cut, or not to the size `wanted`."""
    check_decoder(c)
    for name in REFUSED:
        if getattr(c, name):
            raise UserError(f"model.{name}: jaxtrain shrink does not support it")
    for name, count in wanted._asdict().items():
        if count > getattr(c, name):
            raise UserError(f"--{name} {count} is more than the model's {getattr(c, name)}")
    check_width(c, wanted.width)
    group = c.heads // c.kv_heads
    if wanted.heads % group:
        raise UserError(
            f"--heads {wanted.heads} is not a multiple of {group}, the query heads of each of "
            f"{c.kv_heads} key/value heads"
        )
    if c.value_embeddings and (c.depth - wanted.depth) % 2:
        raise UserError(
            f"--depth {wanted.depth} of {c.depth}: every other layer has value embeddings, so "
            "layers are removed in pairs; keep one more or one less"
        )


def resized(saved: Saved, fields: dict[str, object], arrays: Arrays) -> Saved:
    """The model with changed configuration fields and the parameters `arrays`."""
    model = ResolvedModel.model_validate(saved.config.model.model_dump() | fields)
    graphdef, specs = split(Transformer(model, saved.tokenizer.vocab_size))
    config = saved.config.model_copy(update={"model": model})
    return saved._replace(
        config=config, graphdef=graphdef, specs=specs, params=unflatten(dict(arrays))
    )


# ---- rank --------------------------------------------------------------------------------------


def training_rows(saved: Saved, count: int) -> list[data.Batch]:
    """The first `count` rows with labels of the run's training text. Raises UserError if there are
    fewer."""
    c = saved.config
    store = data.prepare(c.data).train
    store = next(iter(store.values())) if isinstance(store, dict) else store
    options = {"sequence_length": c.train.sequence_length, "segments": c.model.document_mask}
    rows = data.validation_batches(store, batch_size=1, **options)
    full = (row for row in rows if row.weights_BT.any())
    found = list(itertools.islice(full, count))
    if len(found) < count:
        raise UserError(
            f"data.train has {len(found)} rows of {c.train.sequence_length} tokens, --rows asks "
            f"for {count}"
        )
    return found


def make_loss(saved: Saved) -> Callable[..., Array]:
    """A function (arrays, mask of present layers [L], row) -> loss of the row's labels in nats."""

    def loss(arrays: Arrays, present_L: Array | np.ndarray, row: DeviceBatch) -> Array:
        def there(name: str, x: Array) -> Array:
            if name.removeprefix("blocks/") not in OUTPUTS:
                return x
            return x * present_L.reshape(-1, *(1,) * (x.ndim - 1))

        # Embeddings may be 16-bit while the matrices are float32.
        wide = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
        params = unflatten({name: there(name, x) for name, x in wide.items()})
        return next_token_loss(saved.graphdef, params, row)

    return loss


def layers_to_keep(saved: Saved, rows: Sequence[data.Batch], depth: int) -> list[int]:
    """Indices of the kept layers: the last one, and those whose removal raises the loss most.

    With value embeddings, which every other layer has, layers are removed in adjacent pairs.
    """
    c = saved.config.model
    at_a_time = 2 if c.value_embeddings else 1
    arrays, loss = flatten(saved.params), jax.jit(make_loss(saved))
    kept = list(range(c.depth))

    def loss_of(layers: Sequence[int]) -> float:
        present_L = np.isin(np.arange(c.depth), layers).astype(np.float32)
        return sum(float(loss(arrays, present_L, row)) for row in rows)

    while len(kept) > depth:
        starts = range(len(kept) - at_a_time)
        without = [kept[:i] + kept[i + at_a_time :] for i in starts]
        kept = min(without, key=loss_of)
    return kept


def width_importance(
    saved: Saved, rows: Sequence[data.Batch]
) -> tuple[Float[np.ndarray, "L K"], Float[np.ndarray, "L F"]]:
    """Importance of each key/value head with its query heads, and of each hidden channel."""
    c, loss = saved.config.model, make_loss(saved)
    arrays, whole_L = flatten(saved.params), np.ones(saved.config.model.depth, np.float32)
    names = "blocks/attention/out", "blocks/ffn/down"

    @jax.jit
    def changes(outputs: Arrays, row: data.Batch) -> tuple[Array, Array]:
        grads = jax.grad(lambda own: loss({**arrays, **own}, whole_L, row))(outputs)
        out, down = (outputs[name] * grads[name] for name in names)
        heads_LK = out.reshape(c.depth, c.kv_heads, -1).sum(-1)
        return jnp.abs(heads_LK), jnp.abs(down.sum(-1))

    outputs = {name: jnp.asarray(arrays[name], jnp.float32) for name in names}
    found = [jax.device_get(changes(outputs, row)) for row in rows]
    heads, hidden = (np.sum(parts, axis=0) for parts in zip(*found))
    return heads, hidden


def most_important(scores: Float[np.ndarray, "L N"], count: int) -> Int[np.ndarray, "L n"]:
    """Indices of the `count` largest scores of each layer, ascending."""
    return np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :count], axis=1)


# ---- cut ---------------------------------------------------------------------------------------


def cut_layers(saved: Saved, kept: Sequence[int]) -> Saved:
    """The model with only the layers `kept`, which keep their windows and value embeddings.

    A removed layer's residual scales are folded into those of the next one. With model.backout the
    middle layer is that of the new model.
    """
    c, plan = saved.config.model, Transformer(saved.config.model, saved.tokenizer.vocab_size).plan
    arrays = {name: np.asarray(x) for name, x in flatten(saved.params).items()}
    valued = [i for i, spec in enumerate(plan) if spec.value_embed]
    places = [valued.index(i) for i in kept if i in valued]
    if c.residual_scales:
        arrays |= folded_scales(arrays["residual_scale"], arrays["x0_scale"], kept)

    def cut(name: str, x: np.ndarray) -> np.ndarray:
        if name.startswith("value_embed/"):
            return x[places]
        return x[list(kept)] if name.startswith("blocks/") else x

    fields = {
        "depth": len(kept),
        "window_pattern": "".join("L" if plan[i].window is None else "S" for i in kept),
        "frozen_layers": 0,
    }
    return resized(saved, fields, {name: cut(name, x) for name, x in arrays.items()})


def folded_scales(
    stream_L: Float[np.ndarray, " L"], x0_L: Float[np.ndarray, " L"], kept: Sequence[int]
) -> dict[str, np.ndarray]:
    """Residual scales of the kept layers: each step x <- stream x + x0_scale x0 of the removed
    layers is folded into that of the next kept layer."""
    found, stream, x0 = [], 1.0, 0.0
    for i, (a, b) in enumerate(zip(stream_L, x0_L)):
        stream, x0 = stream * a, x0 * a + b
        if i in kept:
            found.append((stream, x0))
            stream, x0 = 1.0, 0.0
    both = np.asarray(found, stream_L.dtype).T
    return {"residual_scale": both[0], "x0_scale": both[1]}


def cut_width(saved: Saved, heads: Int[np.ndarray, "L K"], hidden: Int[np.ndarray, "L F"]) -> Saved:
    """The model with only these key/value heads, their query heads, and these hidden channels."""
    c = saved.config.model
    plan = Transformer(c, saved.tokenizer.vocab_size).plan
    valued = [i for i, spec in enumerate(plan) if spec.value_embed]

    def cut(name: str, x: np.ndarray) -> np.ndarray:
        module, _, leaf = name.removeprefix("blocks/").rpartition("/")
        if module == "attention" and leaf in HEADS:
            return take_parts(x, HEADS[leaf], heads, c.kv_heads)
        if module == "ffn" and leaf in HIDDEN:
            return take_parts(x, HIDDEN[leaf], hidden, c.hidden)
        return take_parts(x, -1, heads[valued], c.kv_heads) if module == "value_embed" else x

    arrays = {name: cut(name, np.asarray(x)) for name, x in flatten(saved.params).items()}
    kv_heads = heads.shape[1]
    fields = {"heads": kv_heads * (c.heads // c.kv_heads), "kv_heads": kv_heads}
    return resized(saved, fields | {"hidden": hidden.shape[1]}, arrays)


def take_parts(x: np.ndarray, axis: int, places: Int[np.ndarray, "L n"], groups: int) -> np.ndarray:
    """Select, for each layer of x [L, ...], the parts `places` of an axis split into `groups`."""
    axis %= x.ndim

    def one(layer: np.ndarray, kept: np.ndarray) -> np.ndarray:
        parts = np.split(layer, groups, axis=axis - 1)
        return np.concatenate([parts[i] for i in kept], axis=axis - 1)

    return np.stack([one(layer, kept) for layer, kept in zip(x, places, strict=True)])


def shrink(saved: Saved, rows: Sequence[data.Batch], wanted: Size) -> Saved:
    """Cut layers, then channels of the stream, then heads and hidden channels. Each is ranked in
    the model after the previous cuts."""
    check_shrunk_size(saved.config.model, wanted)
    saved = without_mtp(saved, "they read the states of the model as it was")
    kept = layers_to_keep(saved, rows, wanted.depth)
    if len(kept) < saved.config.model.depth:
        saved = cut_layers(saved, kept)
    if wanted.width < (c := saved.config.model).width:
        kept_d = channels_to_keep(c, channel_importance(saved, rows), wanted.width)
        saved = resized(saved, {"width": wanted.width}, cut_channels(saved, kept_d))
    c = saved.config.model
    if (wanted.heads, wanted.hidden) == (c.heads, c.hidden):
        return saved
    heads, hidden = width_importance(saved, rows)
    groups = wanted.heads * c.kv_heads // c.heads
    return cut_width(saved, most_important(heads, groups), most_important(hidden, wanted.hidden))


@command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after one line about what the user can fix."""
    a = shrink_parser().parse_args(argv)
    check_out(a.out)
    saved = load_saved(a.run, a.step)
    if is_quantized(saved):
        raise UserError(
            f"{a.run} is quantized; shrink the unquantized model, then quantize the result"
        )
    c = saved.config.model
    wanted = Size(a.depth or c.depth, a.heads or c.heads, a.hidden or c.hidden, a.width or c.width)
    check_shrunk_size(c, wanted)
    small = shrink(saved, training_rows(saved, a.rows), wanted)
    save_model(a.out, small.config, small.params, small.tokenizer)
    count = lambda one: sum(x.size for x in jax.tree.leaves(one.params))
    print(f"shrink   {count(saved):,} parameters to {count(small):,} in {a.out}")
    return 0

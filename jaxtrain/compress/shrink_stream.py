"""Selection of the residual-stream channels that `jaxtrain shrink --width` keeps.

Channels rank by activation norms, as in Minitron (Muralidharan et al. 2024, arXiv:2407.14679): the
2-norm of each channel's outputs of the attention and FFN norms, summed over the layers.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxtrain import data
from jaxtrain.compress.calibrate import Matrix, visit_layers
from jaxtrain.compress.calibration_text import TokenRows
from jaxtrain.model import ResolvedModel
from jaxtrain.model.attention import GATE_CHANNELS
from jaxtrain.model.transformer import SMEAR_CHANNELS
from jaxtrain.runs.saved import Saved
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import flatten

READS = ("attention/q", "attention/k", "attention/v", "ffn/up", "ffn/gate")  # read norms; [L, D, .]
NORMS = (
    "attention_gain", "ffn_gain", "attention_post_gain", "ffn_post_gain",
)  # fmt: skip
ADDS = ("attention/out", "attention/out_bias", "ffn/down", "ffn/down_bias")  # add to the stream
# The channel dim of each parameter that has one.
CHANNELS = {f"blocks/{name}": 1 for name in READS}
CHANNELS |= {f"blocks/{name}": -1 for name in (*NORMS, *ADDS)}
CHANNELS |= {"embed": -1, "position_embed": -1, "bigram/table": -1, "final_gain": -1, "head": 0}
# Parameters without one: scalars, biases inside a layer, tables and gates of the first channels.
OTHERS = (
    "_scale", "/q_bias", "/k_bias", "/v_bias", "/up_bias", "/gate_bias", "smear_gate",
    "value_embed/table", "value_embed/gate", "/q_gain", "/k_gain",
)  # fmt: skip


def check_width(c: ResolvedModel, width: int) -> None:
    """Raise UserError for a model whose norms do not allow cutting channels, or a width smaller
    than the channels that gates read."""
    if width == c.width:
        return
    why = {
        "model.norm=layer subtracts the mean of all channels": c.norm == "layer",
        "model.block_norm=false has layers that read the stream itself": not c.block_norm,
        "model.norm_gain=false with a tied head has nothing that takes up the factor of the norm":
            c.tied_head and not c.norm_gain,
        "model.post_norm without gains has nothing that takes up the factor of the norm":
            c.post_norm and not c.norm_gain,
    }  # fmt: skip
    if found := next((text for text, holds in why.items() if holds), None):
        raise UserError(f"--width: {found}; leave out --width")
    if width < first_channels(c):
        raise UserError(
            f"--width {width} is less than the {first_channels(c)} channels that gates read"
        )


def first_channels(c: ResolvedModel) -> int:
    """Number of leading channels that gates read by index; they are always kept."""
    return max(SMEAR_CHANNELS * c.smear, GATE_CHANNELS * c.value_embeddings)


def channel_importance(saved: Saved, rows: Sequence[data.Batch]) -> Float[np.ndarray, " D"]:
    """2-norm of each channel's normed activations over the rows, summed over layers."""
    scores = np.zeros(saved.config.model.width)

    def visit(index: int, matrices: dict[str, Matrix]) -> dict[str, np.ndarray]:
        for name in ("blocks/attention/q", "blocks/ffn/up"):
            scores[:] += np.sqrt(jax.device_get(matrices[name].inputs.square_K))
        return {}

    texts = [TokenRows(row.tokens_BT, row.positions_BT, row.segments_BT) for row in rows]
    visit_layers(saved, texts, visit)
    return scores


def channels_to_keep(
    c: ResolvedModel, scores_D: Float[np.ndarray, " D"], width: int
) -> Int[np.ndarray, " d"]:
    """Indices of the channels with the largest scores and of those that gates read, ascending."""
    scores = scores_D.copy()
    scores[: first_channels(c)] = math.inf
    return np.sort(np.argsort(-scores, kind="stable")[:width])


def cut_channels(saved: Saved, kept_d: Int[np.ndarray, " d"]) -> dict[str, np.ndarray]:
    """The parameters of the model with only the kept channels.

    A norm divides by the mean square over fewer channels. If the removed channels were zero, its
    output is smaller by sqrt(d / D). Gains, or the matrices that read the norm, compensate for
    that. If embeddings are normed, the whole stream is smaller, so everything added to it is scaled
    down too.
    """
    c = saved.config.model
    up = math.sqrt(c.width / len(kept_d))
    factors: dict[str, float] = {}
    if c.norm_gain:
        factors |= {f"blocks/{name}": up for name in NORMS} | {"final_gain": up}
    else:
        factors |= {f"blocks/{name}": up for name in READS} | {"head": up, "value_embed/gate": up}
    if c.embed_norm:
        added = [name for name in NORMS if "post" in name] if c.post_norm else ADDS
        for name in (*(f"blocks/{name}" for name in added), "bigram/table", "position_embed"):
            factors[name] = factors.get(name, 1.0) / up
        factors["smear_gate"] = up

    def cut(name: str, x: np.ndarray) -> np.ndarray:
        if name in CHANNELS:
            x = np.take(x, kept_d, axis=CHANNELS[name])
        elif not name.endswith(OTHERS):
            raise UserError(
                f"--width: {name} may have channels of the residual stream or not; shrink does not "
                "know it"
            )
        return np.asarray(x * factors.get(name, 1.0), x.dtype)

    return {name: cut(name, np.asarray(x)) for name, x in flatten(saved.params).items()}

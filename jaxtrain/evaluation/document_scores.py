"""Scores of each document of a text by a model, for data selection.

Means over a document's tokens: negative log-likelihood, EL2N (the L2 norm of the softmax minus the
one-hot label) and the norm of the loss's gradient with respect to the head, |p - y| |h| (GraNd of
the last layer; both of arXiv:2107.07075). Also the mean of the last states: its distance to the
nearest prototype shows how unusual a document is (arXiv:2206.14486).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from jaxtrain.config.resolve import Resolved
from jaxtrain.data import Scored
from jaxtrain.data.evaluation.branches import BranchBatch, pack_branches
from jaxtrain.evaluation.log_likelihood import AHEAD, shard_model
from jaxtrain.model import Forward, Transformer
from jaxtrain.parallel import place_batch
from jaxtrain.runs.saved import Saved
from jaxtrain.weights.params import Params

MEASURES = ("nll", "el2n", "grad_norm")  # the order of axis m


class Measured(NamedTuple):
    """Measurements of N documents. A document without tokens has NaN."""

    tokens_N: np.ndarray  # int64, predicted tokens
    means_Nm: np.ndarray  # float64, mean of each measure over the tokens
    states_ND: np.ndarray | None  # float32, the mean last state, with L2 norm 1


class Measurer(NamedTuple):
    """A model on its devices. `measure` takes documents of any length; each begins with BOS."""

    measure: Callable[[Sequence[np.ndarray]], Measured]
    tokens: int  # of a batch: documents of much fewer tokens leave devices idle


def make_measurer(saved: Saved, config: Resolved, states: bool) -> Measurer:
    """Measurer of a saved model. states: whether to compute the mean last states, too."""
    mesh, params, shape, chunk = shard_model(saved, config)
    whole = NamedSharding(mesh, PartitionSpec())
    program = jax.jit(
        lambda params, rows, chunks: measure_rows(saved.graphdef, params, rows, chunks, chunk)
    )
    pool = jax.jit(sum_by_document, static_argnums=2, out_shardings=whole)

    def run(rows: BranchBatch, owners_BT: np.ndarray) -> tuple[np.ndarray, Any]:
        """Pieces of a batch, and their sums, which the device still computes."""
        pieces, own_BT = np.unique(owners_BT, return_inverse=True)
        count = 1 << (len(pieces) - 1).bit_length()  # rounded up, to compile few programs
        chunks = -(-int((rows.labels_BM >= 0).sum(1).max()) // chunk)
        with jax.set_mesh(mesh):
            placed, own_BT = place_batch((rows, own_BT.reshape(owners_BT.shape)), mesh)
            values_BTm, x_BTD = program(params, placed, np.int32(chunks))
            return pieces, pool((values_BTm, x_BTD if states else None), own_BT, count)

    def measure(documents: Sequence[np.ndarray]) -> Measured:
        found: list[tuple[np.ndarray, Any]] = []
        pieces, owners = split_to_context(documents, shape.trunk)
        pending: deque[tuple[np.ndarray, Any]] = deque()
        for rows, owners_BT in pack_branches(([piece] for piece in pieces), shape):
            pending.append(run(rows, owners_BT))
            if len(pending) > AHEAD:
                found.append(jax.device_get(pending.popleft()))
        found += jax.device_get(list(pending))
        return per_document(documents, np.array(owners, np.int64), found)

    return Measurer(measure, shape.rows * shape.trunk)


def split_to_context(
    documents: Sequence[np.ndarray], length: int
) -> tuple[list[Scored], list[int]]:
    """Pieces of at most length + 1 tokens in which each token but the first is a label once, and
    the index of each piece's document."""
    places = [
        (number, begin)
        for number, tokens in enumerate(documents)
        for begin in range(0, len(tokens) - 1, length)
    ]
    pieces = [Scored(documents[n][begin : begin + length + 1], 1) for n, begin in places]
    return pieces, [number for number, _ in places]


def measure_rows(
    graphdef: nnx.GraphDef,
    params: Params,
    rows: PyTree,
    chunks: Array | int,
    chunk: int,
) -> tuple[Float[Array, "B T m"], Float[Array, "B T D"]]:
    """Measures of each label (0 from chunks * chunk on), and the states that predict the labels.

    A row has packed documents, so that label t belongs to position t. Logits are computed for
    `chunk` positions of a row at a time.
    """
    model = nnx.merge(graphdef, params)
    texts = rows.tokens_BT, rows.positions_BT, rows.segments_BT
    x_BTD = model(*texts, Forward(document_mask=True)).states
    B, T, D = x_BTD.shape

    def add(i, out_BTm):
        at = lambda y_BT: jax.lax.dynamic_slice_in_dim(y_BT, i * chunk, chunk, 1)
        x_ND, labels_N = at(x_BTD).reshape(-1, D), at(rows.labels_BM).reshape(-1)
        new_BTm = of_labels(model, x_ND, labels_N).reshape(B, chunk, -1)
        return jax.lax.dynamic_update_slice_in_dim(out_BTm, new_BTm, i * chunk, 1)

    begin_BTm = jnp.zeros((B, T, len(MEASURES)))
    return jax.lax.fori_loop(0, chunks, add, begin_BTm), x_BTD


def of_labels(
    model: Transformer, x_ND: Float[Array, "N D"], labels_N: Int[Array, "N"]
) -> Float[Array, "N m"]:
    """Measures of labels in float32; those of label -1 are undefined."""
    logits_NV = model.logits(x_ND)
    hot_NV = jnp.arange(logits_NV.shape[1])[None] == labels_N[:, None]
    top_N = jax.nn.logsumexp(logits_NV, axis=1)
    error_NV = jnp.exp(logits_NV - top_N[:, None]) - hot_NV
    nll_N = top_N - jnp.sum(logits_NV * hot_NV, axis=1)
    norm = lambda y_Na: jnp.sqrt(jnp.sum(jnp.square(y_Na.astype(jnp.float32)), axis=1))
    cap = model.config.logit_softcap
    slope_NV = 1.0 if cap is None else 1.0 - jnp.square(logits_NV / cap)
    grad_N = norm(error_NV * slope_NV) * norm(x_ND)
    return jnp.stack([nll_N, norm(error_NV), grad_N], axis=1)


def sum_by_document(values: PyTree, owners_BT: Int[Array, "B T"], count: int) -> PyTree:
    """Sum each array [B, T, a] in float32 over the positions of each owner: [count, a]."""
    owners_N = owners_BT.reshape(-1)

    def one(y_BTa: Array) -> Array:
        y_Na = y_BTa.reshape(-1, y_BTa.shape[-1]).astype(jnp.float32)
        return jax.ops.segment_sum(y_Na, owners_N, count)

    return jax.tree.map(one, values)


def per_document(
    documents: Sequence[np.ndarray],
    owners: np.ndarray,
    found: Sequence[tuple[np.ndarray, Any]],
) -> Measured:
    """Combine the sums of pieces to means per document."""
    N = len(documents)
    tokens_N = np.array([len(tokens) - 1 for tokens in documents], np.int64)
    means_Nm, states_ND = np.zeros((N, len(MEASURES))), None
    for pieces, (sums, states) in found:
        real = pieces >= 0
        here = owners[pieces[real]]
        np.add.at(means_Nm, here, sums[: len(pieces)][real])
        if states is not None:
            states_ND = np.zeros((N, states.shape[1])) if states_ND is None else states_ND
            np.add.at(states_ND, here, states[: len(pieces)][real])
    with np.errstate(invalid="ignore"):
        means_Nm /= tokens_N[:, None]
        if states_ND is not None:
            states_ND /= np.linalg.norm(states_ND, axis=1, keepdims=True)
            states_ND = states_ND.astype(np.float32)
    return Measured(tokens_N, means_Nm, states_ND)

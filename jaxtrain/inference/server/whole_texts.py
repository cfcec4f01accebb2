"""Full forward passes over texts: log-probs of a prompt's tokens, and embeddings.

The engine decodes; these are plain forward passes, run between its steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain.cluster.xla_flags import jit
from jaxtrain.inference.engine import TokenLogprob
from jaxtrain.weights.params import Params

WIDTH = 32  # least padded length; padding to powers of two compiles few lengths
CHUNK = 512  # tokens whose logits are in memory at a time
Pooling = Literal["mean", "last"]


class TextModel(NamedTuple):
    """A model with its parameters on the device, in the compute dtype."""

    graphdef: nnx.GraphDef
    params: Params


def pad_to_power(tokens: np.ndarray) -> Int[Array, "1 T"]:
    width = max(WIDTH, 1 << (len(tokens) - 1).bit_length())
    return jnp.asarray(np.pad(tokens.astype(np.int32), (0, width - len(tokens))))[None]


@jit("cublas", static_argnames=("graphdef", "top"))
def score_tokens(
    graphdef: nnx.GraphDef, params: Params, tokens_1T: Int[Array, "1 T"], *, top: int
) -> tuple[Float[Array, " T"], Int[Array, "T k"], Float[Array, "T k"]]:
    """Log-prob of the next token at each position, and the top tokens with theirs."""
    model = nnx.merge(graphdef, params)
    x_TD = model(tokens_1T).states[0]
    next_T = jnp.roll(tokens_1T[0], -1)
    chunk = min(CHUNK, len(x_TD))

    def score(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        x_tD, next_t = part
        logprobs_tV = jax.nn.log_softmax(model.logits(x_tD))
        best_tk, ids_tk = jax.lax.top_k(logprobs_tV, top)
        own_t = jnp.take_along_axis(logprobs_tV, next_t[:, None], axis=1)[:, 0]
        return own_t, ids_tk, best_tk

    split = lambda x: x.reshape(-1, chunk, *x.shape[1:])
    found = jax.lax.map(score, (split(x_TD), split(next_T)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


@jit("cublas", static_argnames=("graphdef", "pooling"))
def pool_states(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens_1T: Int[Array, "1 T"],
    length: Int[Array, ""],
    *,
    pooling: Pooling,
) -> Float[Array, "D"]:
    """States after the final norm, their mean or that of the last token, with L2 norm 1."""
    x_TD = nnx.merge(graphdef, params)(tokens_1T).states[0].astype(jnp.float32)
    place_T = jnp.arange(len(x_TD))
    weight_T = place_T == length - 1 if pooling == "last" else place_T < length
    x_D = weight_T.astype(jnp.float32) @ x_TD
    return x_D / jnp.maximum(jnp.linalg.norm(x_D), 1e-12)


def prompt_logprobs(model: TextModel, tokens: np.ndarray, top: int) -> tuple[TokenLogprob, ...]:
    """Log-probs of all tokens but the first, which has no context."""
    found = score_tokens(model.graphdef, model.params, pad_to_power(tokens), top=max(top, 1))
    own_T, ids_Tk, best_Tk = (np.asarray(x) for x in found)
    return tuple(
        TokenLogprob(int(token), float(own_T[i]), tuple(zip(ids, best))[:top])
        for i, (token, ids, best) in enumerate(zip(tokens[1:], ids_Tk.tolist(), best_Tk.tolist()))
    )


def embed(model: TextModel, texts: Sequence[np.ndarray], pooling: Pooling) -> list[np.ndarray]:
    """Embedding of each text, float32 [D], with L2 norm 1."""
    pool = partial(pool_states, model.graphdef, model.params, pooling=pooling)
    return [np.asarray(pool(pad_to_power(text), jnp.int32(len(text)))) for text in texts]

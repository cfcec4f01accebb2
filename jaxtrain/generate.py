"""Text from a trained model: one prefill, then a decode loop that stays on the device.

python -m jaxtrain.generate RUN --prompt "ROMEO:" [--tokens 256] [--temperature 0.8] ...
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain.data import Tokenizer
from jaxtrain.interop import Prompting
from jaxtrain.model import cast
from jaxtrain.model.config import round_up
from jaxtrain.parallel.runtime import compute_dtype, start
from jaxtrain.saved import load_saved
from jaxtrain.settings import UserError

PROMPT_MULTIPLE = 32  # prompts are padded to a multiple, so that few lengths are compiled
CACHE_MULTIPLE = 128  # of the tokens that the cache has room for, so that it can be split


def pick(
    logits_BV: Float[Array, "B V"],
    key: Array,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    top_k: int | None,
) -> Int[Array, "B"]:
    """Sample a token per row; temperature 0 takes the best one.

    top_p keeps the smallest set of best tokens with that much probability (Holtzman et al. 2020).
    """
    if top_k is not None:
        least_B1 = jax.lax.top_k(logits_BV, min(top_k, logits_BV.shape[1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    scaled_BV = logits_BV / jnp.maximum(temperature, 1e-6)
    ordered_BV = jnp.sort(scaled_BV, axis=-1, descending=True)
    before_BV = jnp.cumsum(jax.nn.softmax(ordered_BV, axis=-1), axis=-1)
    kept_B1 = jnp.sum(
        before_BV - jax.nn.softmax(ordered_BV, axis=-1) < top_p, axis=-1, keepdims=True
    )
    least_B1 = jnp.take_along_axis(ordered_BV, jnp.maximum(kept_B1 - 1, 0), axis=-1)
    scaled_BV = jnp.where(scaled_BV < least_B1, -jnp.inf, scaled_BV)
    sampled_B = jax.random.categorical(key, scaled_BV, axis=-1)
    return jnp.where(temperature == 0, jnp.argmax(logits_BV, axis=-1), sampled_B)


@functools.partial(jax.jit, static_argnames=("graphdef", "new", "top_k", "stop", "cache_dtype"))
def complete(
    graphdef: Any,
    params: Any,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, "B"],
    key: Array,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    *,
    new: int,
    top_k: int | None = None,
    stop: tuple[int, ...] = (),
    cache_dtype: str | None = None,
) -> Int[Array, "B new"]:
    """Continue prompts (padded on the right) by up to `new` tokens, or to one in `stop`.

    The first of `stop` fills ended rows.
    """
    model = nnx.merge(graphdef, params)
    B = tokens_BT.shape[0]
    capacity = round_up(tokens_BT.shape[1] + new, CACHE_MULTIPLE)
    x_BD, cache = model.prefill(tokens_BT, lengths_B, capacity, cache_dtype)
    first_B = pick(model.logits(x_BD), jax.random.fold_in(key, 0), temperature, top_p, top_k)
    out_Bn = jnp.full((B, new), stop[0] if stop else 0, jnp.int32).at[:, 0].set(first_B)
    ends = lambda token_B: jnp.isin(token_B, jnp.array(stop, jnp.int32))
    ended_B = ends(first_B)

    def going(carry):
        i, _, _, ended_B = carry
        return (i < new) & ~jnp.all(ended_B)

    def one(carry):
        i, out_Bn, cache, ended_B = carry
        x_BD, cache = model.decode(out_Bn[:, i - 1], cache)
        token_B = pick(model.logits(x_BD), jax.random.fold_in(key, i), temperature, top_p, top_k)
        if stop:
            token_B = jnp.where(ended_B, stop[0], token_B)
            ended_B = ended_B | ends(token_B)
        return i + 1, out_Bn.at[:, i].set(token_B), cache, ended_B

    return jax.lax.while_loop(going, one, (jnp.int32(1), out_Bn, cache, ended_B))[1]


def generate(
    graphdef: Any,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    cache_dtype: str | None = None,
    prompting: Prompting | None = None,
) -> list[str]:
    """Continuations of a batch of prompts (without the prompts); a document's end stops a row.

    prompting: how its checkpoint begins and ends texts; default BOS for both.
    cache_dtype: of the keys and values that are kept: int8, or None for the parameters' dtype.
    """
    begins, stop = prompting or Prompting(True, (tokenizer.bos_id,))
    bos = [tokenizer.bos_id]
    ids = [
        np.concatenate([bos if begins or not p else [], tokenizer.encode(p)]).astype(np.int32)
        for p in prompts
    ]
    lengths = np.array([len(x) for x in ids], np.int32)
    width = round_up(int(lengths.max()), PROMPT_MULTIPLE)
    padded = np.stack([np.pad(x, (0, width - len(x))) for x in ids])
    out = complete(
        graphdef, params, jnp.asarray(padded), jnp.asarray(lengths), jax.random.key(seed),
        jnp.float32(temperature), jnp.float32(1.0 if top_p is None else top_p),
        new=tokens, top_k=top_k, stop=stop, cache_dtype=cache_dtype,
    )  # fmt: skip
    rows = [row.tolist() for row in np.asarray(out)]
    ends = [next((i for i, t in enumerate(row) if t in stop), len(row)) for row in rows]
    return [tokenizer.decode(row[:end]) for row, end in zip(rows, ends)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "jaxtrain.generate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run", type=Path, help="run directory or model folder")
    parser.add_argument("--prompt", action="append", help="text to continue; may be given often")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens (default 256)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the best token")
    parser.add_argument("--top-k", type=int, help="sample among this many best tokens")
    parser.add_argument("--top-p", type=float, help="sample among this much probability")
    parser.add_argument(
        "--cache-dtype", choices=["int8"], help="of the cache; default the compute dtype"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="a checkpoint instead of the final model")
    a = parser.parse_args(argv)
    try:
        if a.tokens < 1 or a.temperature < 0:
            raise UserError("--tokens must be at least 1 and --temperature at least 0")
        start()
        saved = load_saved(a.run, a.step)
        dtype = compute_dtype(saved.config.train.precision)
        params = cast(jax.device_put(saved.params), saved.specs, dtype)
        prompts = a.prompt or [""]
        texts = generate(
            saved.graphdef, params, saved.tokenizer, prompts, tokens=a.tokens,
            temperature=a.temperature, top_k=a.top_k, top_p=a.top_p, seed=a.seed,
            cache_dtype=a.cache_dtype, prompting=saved.prompting,
        )  # fmt: skip
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n---\n".join(prompt + text for prompt, text in zip(prompts, texts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

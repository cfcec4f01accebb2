"""Text from a trained model: one prefill, then a decode loop that stays on the device.

jaxtrain generate RUN --prompt "ROMEO:" [--tokens 256] [--temperature 0.8] ...
jaxtrain generate RUN --chat [--system "Be brief."] [--prompt "Hello!"]
"""

import argparse
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtrain.cluster.processes import check_alone
from jaxtrain.cluster.runtime import compute_dtype, start
from jaxtrain.cluster.xla_flags import jit
from jaxtrain.config.resolve import Resolved
from jaxtrain.data import Chat, Tokenizer, make_chat
from jaxtrain.inference.arguments import TOKENS, generate_parser
from jaxtrain.inference.chat import chat_loop
from jaxtrain.interop.companions import Prompting
from jaxtrain.model import Cache, Decode, Prefill, ResolvedModel, Transformer, cast, split
from jaxtrain.model.config import check_decoder, round_up
from jaxtrain.model.transformer import CACHE_MULTIPLE
from jaxtrain.parallel.mesh import gather_to_host
from jaxtrain.runs.saved import Saved, load_saved, template_for
from jaxtrain.settings import UserError, command, visible
from jaxtrain.storage.disk import write_whole
from jaxtrain.weights.params import Params

PROMPT_MULTIPLE = 32  # prompts are padded to a multiple, so that few lengths are compiled


def sample_token(
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


@jit("cublas", static_argnames=("graphdef", "new", "top_k", "stop", "cache_dtype"))
def decode_tokens(
    graphdef: nnx.GraphDef,
    params: Params,
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
    x_BD, _, cache = model(tokens_BT, mode=Prefill(lengths_B, capacity, cache_dtype))
    draw = lambda x_BD, i: sample_token(
        model.logits(x_BD), jax.random.fold_in(key, i), temperature, top_p, top_k
    )
    first_B = draw(x_BD, 0)
    out_Bn = jnp.full((B, new), stop[0] if stop else 0, jnp.int32).at[:, 0].set(first_B)
    ends = lambda token_B: jnp.isin(token_B, jnp.array(stop, jnp.int32))
    going = lambda carry: (carry[0] < new) & ~jnp.all(carry[3])

    def one(carry):
        i, out_Bn, cache, ended_B = carry
        x_BD, _, cache = model(out_Bn[:, i - 1, None], mode=Decode(cache))
        token_B = draw(x_BD, i)
        if stop:
            token_B = jnp.where(ended_B, stop[0], token_B)
            ended_B = ended_B | ends(token_B)
        return i + 1, out_Bn.at[:, i].set(token_B), cache, ended_B

    return jax.lax.while_loop(going, one, (jnp.int32(1), out_Bn, cache, ends(first_B)))[1]


def kv_bytes_per_token(
    c: ResolvedModel, vocab_size: int, dtype: jnp.dtype, cache_dtype: str | None = None
) -> int:
    """Bytes of the KV cache of all layers for one token of a row. dtype: of the computation."""
    graphdef, specs = split(Transformer(c, vocab_size))
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs)
    mode = Prefill(jnp.ones(1, jnp.int32), CACHE_MULTIPLE, cache_dtype)
    run = lambda p, rows: nnx.merge(graphdef, p)(rows, mode=mode).cache.kv
    kv = jax.eval_shape(run, params, jax.ShapeDtypeStruct((1, PROMPT_MULTIPLE), jnp.int32))
    return sum(x.size // x.shape[1] * x.dtype.itemsize for x in jax.tree.leaves(kv))


class Sampling(NamedTuple):
    """How new tokens are sampled, and the maximum number of them."""

    tokens: int = TOKENS
    temperature: float | int = 0.8  # 0 takes the best token
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    cache_dtype: str | None = (
        None  # of the keys and values: int8, float8; None: the parameters' dtype
    )

    def arrays(self) -> tuple[Array, Array, Array]:
        """key, temperature and top_p, as the compiled functions take them."""
        top_p = 1.0 if self.top_p is None else self.top_p
        return jax.random.key(self.seed), jnp.float32(self.temperature), jnp.float32(top_p)


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as arguments by name."""

    tokens: int
    temperature: float | int
    top_k: int | None
    top_p: float | None
    seed: int
    cache_dtype: str | None


def generation_inputs(
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    prompting: Prompting | None = None,
    chat: Chat | None = None,
    system: str | None = None,
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """Arguments of `decode_tokens` after the model: traced arrays, and static ones by name.

    The arguments are those of `generate`.
    """
    begins, stop = prompting or Prompting(True, (tokenizer.bos_id,))
    first = [{"role": "system", "content": system}] if system else []

    def encode(prompt: str) -> np.ndarray:
        if chat and prompt:
            return chat.prompt([*first, {"role": "user", "content": prompt}])
        bos = [tokenizer.bos_id] if begins or not prompt else []
        return np.concatenate([bos, tokenizer.encode(prompt)])

    ids = [encode(prompt).astype(np.int32) for prompt in prompts]
    stop += (chat.end,) if chat and chat.end not in stop else ()
    width = round_up(max(map(len, ids)), PROMPT_MULTIPLE)
    padded = jnp.asarray(np.stack([np.pad(x, (0, width - len(x))) for x in ids]))
    lengths = jnp.asarray(np.array([len(x) for x in ids], np.int32))
    static = {"new": sampling.tokens, "top_k": sampling.top_k, "stop": stop}
    static["cache_dtype"] = sampling.cache_dtype
    return (padded, lengths, *sampling.arrays()), static


def generate(
    graphdef: nnx.GraphDef,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    prompting: Prompting | None = None,
    chat: Chat | None = None,
    system: str | None = None,
) -> list[str]:
    """Continuations of a batch of prompts (without the prompts); a document's end stops a row.

    prompting: how the checkpoint begins and ends texts; default BOS for both. chat: the prompts are
    user messages, after the message `system`; an empty prompt is continued without a question.
    """
    arrays, static = generation_inputs(tokenizer, prompts, sampling, prompting, chat, system)
    out = gather_to_host(decode_tokens(graphdef, params, *arrays, **static))
    new = [tokens_before_stop(row.tolist(), static["stop"]) for row in out]
    behind = [bool(prompt) and chat is None for prompt in prompts]
    decode = tokenizer.decode
    return [tokenizer.decode_behind(x) if b else decode(x) for x, b in zip(new, behind)]


def tokens_before_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """New tokens up to the first that ends the text."""
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def sampling_of(c: Resolved) -> Sampling:
    """A run's settings of its samples."""
    s = c.sample
    return Sampling(s.tokens, s.temperature, s.top_k, s.top_p, c.run.seed, s.kv_cache_dtype)


def compile_samples(
    graphdef: nnx.GraphDef, params: Params, tokenizer: Tokenizer, c: Resolved, chat: Chat | None
) -> None:
    """What `write_samples` will run with the same arguments, so that it need not be waited for."""
    arrays, static = generation_inputs(tokenizer, c.sample.prompts, sampling_of(c), chat=chat)
    decode_tokens.lower(graphdef, params, *arrays, **static).compile()


def write_samples(
    path: Path,
    graphdef: nnx.GraphDef,
    params: Params,
    tokenizer: Tokenizer,
    c: Resolved,
    chat: Chat | None,
) -> None:
    """A file of what follows the prompts of `sample`; all processes compute it, the first writes.

    Control characters are symbols there: the run shows the last file on the terminal.
    params: in the compute dtype. Without prompts there is no file.
    """
    if not c.sample.prompts:
        return
    texts = generate(graphdef, params, tokenizer, c.sample.prompts, sampling_of(c), chat=chat)
    if jax.process_index():
        return
    gap = "\n> " if chat else ""
    path.parent.mkdir(exist_ok=True)
    texts = (p + gap + x for p, x in zip(c.sample.prompts, texts))
    write_whole(path, visible("\n---\n".join(texts)))


@jit("cublas", static_argnames=("graphdef", "capacity", "top_k", "cache_dtype"))
def prefill(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, "B"],
    key: Array,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    *,
    capacity: int,
    top_k: int | None,
    cache_dtype: str | None,
) -> tuple[Int[Array, "B"], Cache]:
    """The first token after prompts that are padded on the right, and the cache."""
    model = nnx.merge(graphdef, params)
    x_BD, _, cache = model(tokens_BT, mode=Prefill(lengths_B, capacity, cache_dtype))
    return sample_token(
        model.logits(x_BD), jax.random.fold_in(key, 0), temperature, top_p, top_k
    ), cache


def next_token(
    graphdef: nnx.GraphDef,
    params: Params,
    token_B: Int[Array, "B"],
    cache: Cache,
    key: Array,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    *,
    top_k: int | None,
) -> tuple[Int[Array, "B"], Cache]:
    """The token after `token_B`, and the cache one token longer."""
    model = nnx.merge(graphdef, params)
    x_BD, _, cache = model(token_B[:, None], mode=Decode(cache))
    return sample_token(model.logits(x_BD), key, temperature, top_p, top_k), cache


decode_step = jit("cublas", static_argnames=("graphdef", "top_k"), donate_argnames="cache")(
    next_token
)


def stream_tokens(
    graphdef: nnx.GraphDef,
    params: Params,
    prompt: np.ndarray,
    sampling: Sampling,
    stop: Sequence[int],
) -> Iterator[int]:
    """The tokens after a prompt of token ids, one by one, up to one in `stop`; those of `generate`.

    Widths and capacities are powers of two, so that a conversation compiles few programs.
    """
    width = max(PROMPT_MULTIPLE, 1 << (len(prompt) - 1).bit_length())
    capacity = max(CACHE_MULTIPLE, 1 << (width + sampling.tokens - 1).bit_length())
    padded = np.pad(prompt.astype(np.int32), (0, width - len(prompt)))[None]
    key, *how = sampling.arrays()
    token, cache = prefill(
        graphdef, params, jnp.asarray(padded), jnp.array([len(prompt)], jnp.int32), key, *how,
        capacity=capacity, top_k=sampling.top_k, cache_dtype=sampling.cache_dtype,
    )  # fmt: skip
    for i in range(1, sampling.tokens + 1):
        found = int(token[0])
        if found in stop:
            return
        yield found
        if i < sampling.tokens:
            at = jax.random.fold_in(key, i)
            token, cache = decode_step(
                graphdef, params, token, cache, at, *how, top_k=sampling.top_k
            )


def chat_in_terminal(saved: Saved, params: Params, chat: Chat, a: argparse.Namespace) -> None:
    """Talk in the terminal, the options from the command line."""
    logging.getLogger("jaxtrain_kernels").setLevel(logging.WARNING)  # it would write between turns
    stop = (chat.end, *saved.prompting.stops)
    seeds = itertools.count(a.seed)
    context = saved.config.model.context_length
    tokens = a.tokens or min(TOKENS, context // 2)
    room = context - tokens
    if room < 1:
        raise UserError(f"--tokens {tokens} leaves no room in a context of {context}; give fewer")

    def answer(prompt: np.ndarray) -> Iterator[int]:
        sampling = asked_sampling(a)._replace(tokens=tokens, seed=next(seeds))
        return stream_tokens(saved.graphdef, params, prompt, sampling, stop)

    chat_loop(
        chat, saved.tokenizer, answer, room=room, system=a.system, typed=sys.stdin, out=sys.stdout
    )


def asked_sampling(a: argparse.Namespace) -> Sampling:
    """The sampling options of a command line."""
    return Sampling(a.tokens or TOKENS, a.temperature, a.top_k, a.top_p, a.seed, a.cache_dtype)


@command
def main(argv: list[str] | None = None) -> int:
    a = generate_parser().parse_args(argv)
    check_alone("jaxtrain generate")
    try:
        start()
        saved = load_saved(a.run, a.step)
        check_decoder(saved.config.model)
        dtype = compute_dtype(saved.config.train.precision)
        params = cast(jax.device_put(saved.params), saved.specs, dtype)
        if a.system and not a.chat:
            raise UserError("--system belongs to --chat")
        chat = make_chat(*template_for(saved), saved.tokenizer) if a.chat else None
        if chat and not a.prompt:
            chat_in_terminal(saved, params, chat, a)
            return 0
        prompts = a.prompt or [""]
        texts = generate(
            saved.graphdef, params, saved.tokenizer, prompts, asked_sampling(a),
            prompting=saved.prompting, chat=chat, system=a.system,
        )  # fmt: skip
    except KeyboardInterrupt:  # while nothing is being answered
        print()
        return 130
    gap = "\n> " if chat else ""
    print(visible("\n---\n".join(prompt + gap + text for prompt, text in zip(prompts, texts))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tiny models and requests of the engine's tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny import build, random_params

from jaxtrain.data.tokenizer.tokenizer import Tokenizer, text_of
from jaxtrain.inference.engine import Engine, EngineOptions, Request, SamplingParams

VOCAB = 61
LATENT = {
    "mla": {"kv_rank": 12, "rope_dim": 4}, "qk_norm": False, "value_embeddings": False,
}  # fmt: skip
MODELS = {  # two layers unless depth is named
    "nanochat": {},
    "grouped": {"kv_heads": 2, "attention_softcap": 5.0, "bigram_rows": 97},
    "latent": LATENT,
    "shared_kv": {
        "share_kv": "adjacent", "depth": 4, "kv_heads": 2,
        "rope_scaling": {
            "name": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0,
            "original_context": 2,
        },
    },
    "experts": {
        "moe": {"experts": 4, "top_k": 2, "hidden": 16}, "position_embedding": "learned",
        "context_length": 48,
    },
    "windows": {
        "window_pattern": "S", "last_layer_full": False, "smear": False, "value_embeddings": False,
        "backout": False, "residual_scales": False, "depth": 1,
    },
    "prompt": {"prompt": 4},
    "prefix": {"prefix": 6, "kv_heads": 2},
    "plain": {  # for what the host does
        "smear": False, "backout": False, "residual_scales": False, "value_embeddings": False,
        "window_pattern": "L", "depth": 1,
    },
}  # fmt: skip
LLAMA = MODELS["plain"] | {
    "ffn": "swiglu", "qk_norm": False, "norm_gain": True, "embed_norm": False, "kv_heads": 2,
    "init": "gpt2",
}  # fmt: skip
WITH_GAINS = ("llama", "llama 2", "qwen2", "qwen3", "gemma")
MODELS["llama"] = LLAMA
MODELS["llama 2"] = LLAMA | {"depth": 2}
MODELS["qwen2"] = LLAMA | {"qkv_bias": True, "tied_head": True}
MODELS["qwen3"] = LLAMA | {"qk_norm": True, "qk_norm_gain": True}
MODELS["gemma"] = LLAMA | {"ffn": "geglu", "post_norm": True, "qk_norm": True, "qk_norm_gain": True}
MODELS["plain prompt"] = MODELS["plain"] | {"prompt": 4}
OPTIONS = EngineOptions(slots=4, page_size=4, chunk=6, prefill_rows=2, context=48)
SINGLE = OPTIONS._replace(decode_steps=1)  # half as many programs
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_stop=True)


def letters():
    """A tokenizer of VOCAB one-byte tokens."""
    pieces = tuple(bytes([48 + i]) for i in range(VOCAB))
    return Tokenizer("bytes", b"", pieces, 0, lambda texts: [], functools.partial(text_of, pieces))


@functools.cache
def model(name):
    """Configuration, graphdef, specs and parameters; gains and biases of WITH_GAINS are random."""
    c, graphdef, specs, params = build(**MODELS[name])
    return c, graphdef, specs, random_params(specs) if name in WITH_GAINS else params


def make_engine(name="plain", options=OPTIONS, **kwargs):
    c, graphdef, _, params = model(name)
    return Engine(c, graphdef, params, letters(), options=options, **kwargs)


def prompts(*lengths, seed=0):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, VOCAB, n).tolist()) for n in lengths]


def run(engine, requests):
    """Tokens, text and reason of each request, all added at once."""
    for request in requests:
        engine.add(request)
    return finish(engine)


def finish(engine):
    found = {}
    for _ in range(10_000):
        if not engine.busy:
            return found
        for update in engine.step():
            tokens, text, _ = found.get(update.id, ((), "", None))
            found[update.id] = (
                tokens + update.tokens, text + update.text, update.finish_reason,
            )  # fmt: skip
    raise AssertionError("the engine does not end")


def tokens_of(engine, texts, sampling=GREEDY):
    """The new tokens of prompts."""
    requests = [Request(str(i), text, sampling) for i, text in enumerate(texts)]
    found = run(engine, requests)
    return [list(found[str(i)][0]) for i in range(len(texts))]


def expected(name, texts, new):
    """What the whole texts' logits continue them with: no cache of any kind."""
    _, graphdef, _, params = model(name)
    return greedy(graphdef, params, texts, new)


def greedy(graphdef, params, texts, new):
    """Greedy continuations by the full forward pass, computed again for each token."""
    lengths = np.array([len(x) for x in texts])
    tokens = np.zeros((len(texts), max(lengths) + new), np.int32)
    for row, text in zip(tokens, texts):
        row[: len(text)] = text
    whole = nnx.merge(graphdef, params)
    run = jax.jit(lambda t, at: whole.logits(whole(t).states[jnp.arange(len(at)), at]).argmax(-1))
    for i in range(new):
        tokens[np.arange(len(texts)), lengths + i] = run(tokens, lengths + i - 1)
    return [row[n : n + new].tolist() for row, n in zip(tokens, lengths)]

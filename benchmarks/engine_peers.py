"""Peers of the inference engine: transformers' compiled decoding and nanochat's Engine."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import check_nanochat, rows_of
from benchmarks.record import Record
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import vocab_size_of
from jaxtrain.model import ResolvedModel, resolve_model
from jaxtrain.model.layers import GATED
from jaxtrain.settings import UserError

SCRIPT = "peer_engine.py"
RATIOS = {"tokens_per_s": "our_ratio", "decode_tokens_per_s": "our_decode_ratio"}


class Peers(NamedTuple):
    """The peers to measure. checkout: of nanochat."""

    transformers: bool = False
    checkout: Path | None = None


def peer_rows(
    peers: Peers, name: str, overrides: Sequence[str], sizes: dict[str, Any]
) -> list[Record]:
    """The peers' rows at a configuration's size, each in its own process.

    sizes: batches, prompt, new, many, repeats. Runs before JAX allocates the GPU's memory. Raises
    UserError for a configuration that a peer has no model for.
    """
    c = load_config(find_config(name), overrides)
    model = resolve_model(c.model, c.train.sequence_length)
    asked: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = []
    if peers.transformers:
        shape, note = llama_of(name, model, vocab_size_of(c.data))
        shape |= {"max_position_embeddings": sizes["prompt"] + sizes["new"]}
        asked.append(("transformers", {"model": shape}, note, ("torch", "transformers")))
    if peers.checkout:
        check_nanochat(peers.checkout, name, c)
        if not (peers.checkout / "nanochat" / "engine.py").is_file():
            raise UserError(f"{peers.checkout}: it has no nanochat/engine.py")
        settings = {
            "model": nanochat_of(model, c.train.sequence_length, vocab_size_of(c.data)),
            "checkout": str(peers.checkout.resolve()),
        }
        note = (
            "One prompt is computed, and its keys and values are copied to all rows. Weights are "
            "kept in float32 and cast at each use. The best token is taken, not sampled."
        )
        asked.append(("nanochat", settings, note, ("torch",)))
    rows: list[Record] = []
    for kind, settings, note, needs in asked:
        for row in rows_of(SCRIPT, kind, json.dumps(sizes | settings), needs=needs):
            rate = row.get("decode_tokens_per_s")
            said = f"{rate:,.0f} tokens/s, decoding" if rate else row.get("failed", "measured")
            print(f"  {row['backend']}, {row['shape']}: {said}", file=sys.stderr, flush=True)
            rows.append(row | {"note": note})
    return rows


def llama_of(name: str, c: ResolvedModel, vocab_size: int) -> tuple[dict[str, Any], str]:
    """Arguments of transformers' LlamaConfig with equally many matmul parameters, and a note.

    An FFN without a gate has two matrices and Llama's has three, so Llama's is 2/3 as wide.
    """
    if c.moe or c.mla or not c.causal:
        raise UserError(f"--transformers: {name} has experts, latent attention or no causal mask")
    gated = c.ffn in GATED
    hidden = c.hidden if gated else round(c.hidden * 2 / 3)
    shape = {
        "hidden_size": c.width,
        "intermediate_size": hidden,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": -(-vocab_size // c.vocab_multiple) * c.vocab_multiple,
        "tie_word_embeddings": c.tied_head,
    }
    wide = "" if gated else f" and a gated FFN of {hidden}, not one without a gate of {c.hidden}"
    note = (
        f"Llama of the same depth, width, heads and vocabulary{wide}; full attention in each "
        "layer. The best token is taken, not sampled; tokens reach the host at the end."
    )
    return shape, note


def nanochat_of(c: ResolvedModel, sequence_length: int, vocab_size: int) -> dict[str, Any]:
    """Arguments of nanochat's GPTConfig."""
    return {
        "sequence_len": sequence_length,
        "vocab_size": vocab_size,
        "n_layer": c.depth,
        "n_head": c.heads,
        "n_kv_head": c.kv_heads,
        "n_embd": c.width,
    }


def with_peer_rows(rows: Sequence[Record], peers: Sequence[Record]) -> list[Record]:
    """Our rows, then the peers' rows with the ratios of our rates to theirs, if we have both.

    With several cache dtypes, our first one is compared.
    """
    ours = {(row["name"], row["shape"]): row for row in reversed(rows)}
    rated = []
    for row in peers:
        own = ours.get((row["name"], row["shape"]), {})
        both = {key: title for key, title in RATIOS.items() if row.get(key) and own.get(key)}
        rated.append(row | {title: own[key] / row[key] for key, title in both.items()})
    return [*rows, *rated]

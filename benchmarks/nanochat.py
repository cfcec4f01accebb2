"""Trains nanochat on the rows and from the weights of one of our configurations, as a run.

    python -m benchmarks nanochat CHECKOUT --config gpt_d12 run.name=nanochat data.train.path=...
    jaxtrain train --config gpt_d12 run.name=ours data.train.path=...
    python -m benchmarks race runs/ours runs/nanochat --differ env

Our loader writes the rows of every step and of the validation, our model the initial weights of
`run.seed`. A separate process trains the checkout on them (`peer_nanochat_train.py`). Rates, decay
and warm-ups are those of the configuration, which follow nanochat's rules unless set by hand.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.peers import check_nanochat, rows_of
from jaxtrain.config import find_config, load_config, save_yaml
from jaxtrain.config.resolve import Resolved, resolve
from jaxtrain.data.batches.loader import train_batches, validation_batches
from jaxtrain.data.batches.packing import Batch
from jaxtrain.data.preference.pairs import PairBatch
from jaxtrain.data.store.prepare import Prepared, prepare
from jaxtrain.data.store.store import TokenStore
from jaxtrain.model import ResolvedModel, Transformer, initialize, split
from jaxtrain.optim import MuonConfig
from jaxtrain.optim.schedule import Trapezoid
from jaxtrain.runs.environment import environment
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json
from jaxtrain.weights.params import Params

SKIPPED = 5  # steps that are not timed: the first ones compile


def train_nanochat(checkout: Path, name: str, overrides: Sequence[str]) -> Path:
    """Train nanochat on the data of a configuration; returns the run directory.

    Raises UserError if the folder is no checkout of nanochat, if nanochat's model or optimizer
    cannot follow the configuration, and if the run directory exists.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the peer needs the GPU's memory
    c = load_config(find_config(name), overrides)
    check_nanochat(checkout, name, c)
    if (folder := c.run_dir).exists():
        raise UserError(f"run.name: {folder} is there already; name another run")
    prepared = prepare(c.data)
    if (held_out := prepared.validation) is None:
        raise UserError("data.validation is none: name a split or a source to compare on")
    resolved = resolve(c, prepared.tokenizer.vocab_size, jax.devices()[:1])
    settings = settings_of(resolved)
    with tempfile.TemporaryDirectory() as temporary:
        rows = Path(temporary)
        write_json(rows / "settings.json", settings)
        write_rows(rows, resolved, prepared, held_out)
        write_weights(rows / "weights.npz", resolved, prepared.tokenizer.vocab_size)
        folder.mkdir(parents=True)
        save_yaml(folder / "config.yaml", resolved)
        lines = rows_of(
            "peer_nanochat_train.py", str(checkout.resolve()), str(rows), needs=("torch",)
        )
        facts = follow(folder / "metrics.jsonl", lines)
    if not facts:
        raise UserError("nanochat's training has ended before its first step; see above")
    write_json(folder / "env.json", environment() | {"peer": {"name": "nanochat"} | facts})
    return folder


def settings_of(c: Resolved) -> dict[str, Any]:
    """The settings of the peer's script. Raises UserError if nanochat cannot train that way."""
    if not isinstance(c.optim, MuonConfig) or not isinstance(c.optim.schedule, Trapezoid):
        raise UserError("nanochat trains with optim.name=muon and a trapezoid schedule alone")
    schedule = c.optim.schedule.model_dump(
        include={"warmup_steps", "decay_fraction", "final_fraction"}
    )
    momentum = {key: value for key, value in c.optim.model_dump().items() if "momentum" in key}
    width = (c.model.width / 768) ** 0.5  # nanochat scales these rates by itself
    rates = {
        "matrix_lr": c.optim.matrix_lr,
        "embedding_lr": c.optim.embedding_lr * width,
        "unembedding_lr": c.optim.head_lr * width,
        "scalar_lr": c.optim.x0_scale_lr,
        "weight_decay": c.optim.weight_decay,
    }
    sizes = c.train.model_dump(
        include={"steps", "batch_size", "device_batch_size", "sequence_length"}
    )
    more = {
        "depth": c.model.depth,
        "seed": c.run.seed,
        "fp8": c.model.fp8 is not None,
        "log_every": c.metrics.every,
        "eval_every": c.eval.every,
        "skip_steps": SKIPPED,
    }
    return schedule | momentum | rates | sizes | more


def write_rows(folder: Path, c: Resolved, prepared: Prepared, validation: TokenStore) -> None:
    """The rows of every step in the loader's order, and the validation split once."""
    batch, T = c.train.batch_size, c.train.sequence_length
    loader = train_batches(prepared.train, config=c.data, batch_size=batch, sequence_length=T)
    shape = (c.train.steps * batch, T + 1)
    with loader:
        rows = np.lib.format.open_memmap(folder / "train.npy", "w+", np.uint16, shape)
        for i, one in enumerate(islice(loader, c.train.steps)):
            rows[i * batch : (i + 1) * batch] = whole_rows(one)
        rows.flush()
    rows_each = c.train.device_batch_size
    held_out = list(validation_batches(validation, batch_size=rows_each, sequence_length=T))
    np.save(folder / "validation.npy", np.concatenate([whole_rows(one) for one in held_out]))
    labels = [one.weights_BT.sum(axis=1) for one in held_out]
    np.save(folder / "labels.npy", np.concatenate(labels).astype(np.int32))
    np.save(folder / "bytes.npy", np.asarray(prepared.tokenizer.token_bytes(), np.int32))


def write_weights(path: Path, c: Resolved, vocab_size: int) -> None:
    """The weights that our run of `run.seed` starts from, by nanochat's names."""
    _, specs = split(Transformer(c.model, vocab_size))
    weights: dict[str, Any] = nanochat_weights(initialize(specs, c.run.seed), c.model)
    np.savez(path, **weights)


def nanochat_weights(params: Params, c: ResolvedModel) -> dict[str, np.ndarray]:
    """Our parameters by the names of nanochat's, in float32; a linear layer is [out, in].

    nanochat rotates by minus the angle, so the halves of each head's channels of q and k change
    places: then both models are the same function.
    """
    ours = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    blocks, value = ours["blocks"], ours["value_embed"]

    def swapped(w_io: np.ndarray) -> np.ndarray:
        halves = w_io.reshape(len(w_io), -1, 2, c.head_dim // 2)
        return halves[:, :, ::-1].reshape(w_io.shape)

    named = {
        "transformer.wte.weight": ours["embed"],
        "lm_head.weight": ours["head"].T,
        "resid_lambdas": ours["residual_scale"],
        "x0_lambdas": ours["x0_scale"],
        "smear_gate.weight": ours["smear_gate"][None],
        "smear_lambda": ours["smear_scale"],
        "backout_lambda": ours["backout_scale"],
    }
    for i in range(c.depth):
        attention, ffn = ({k: x[i] for k, x in blocks[n].items()} for n in ("attention", "ffn"))
        layer = {
            "attn.c_q": swapped(attention["q"]),
            "attn.c_k": swapped(attention["k"]),
            "attn.c_v": attention["v"],
            "attn.c_proj": attention["out"],
            "mlp.c_fc": ffn["up"],
            "mlp.c_proj": ffn["down"],
        }
        if i % 2 == (c.depth - 1) % 2:
            layer["attn.ve_gate"] = value["gate"][i // 2]
            named[f"value_embeds.{i}.weight"] = value["table"][i // 2]
        named |= {f"transformer.h.{i}.{name}.weight": w_io.T for name, w_io in layer.items()}
    return named


def whole_rows(batch: Batch | PairBatch) -> np.ndarray:
    """Rows [B, T+1] of token ids: inputs, then the last target."""
    return np.concatenate([batch.tokens_BT, batch.targets_BT[:, -1:]], axis=1).astype(np.uint16)


def follow(path: Path, lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Write the peer's metrics as they arrive; returns the facts it reports about itself."""
    facts: dict[str, Any] = {}
    with path.open("w", encoding="utf-8") as file:
        for row in lines:
            if row["kind"] == "peer":
                facts = {key: value for key, value in row.items() if key != "kind"}
                continue
            print(json.dumps(row), file=file, flush=True)
            if row["kind"] == "validation":
                line = f"  nanochat  step {row['step']}  {row['bpb']:.4f} bits per byte"
                print(line, file=sys.stderr, flush=True)
    return facts

"""Train nanochat on the rows and initial weights of one of our configurations, as a run directory.

    python -m benchmarks nanochat CHECKOUT --config gpt_d12 run.name=nanochat data.train.path=...
    jaxtrain train --config gpt_d12 run.name=ours data.train.path=...
    python -m benchmarks race runs/ours runs/nanochat --baseline nanochat

Our loader writes the training and validation rows, our model the initial weights of `run.seed`. A
separate process trains the checkout on them (`peer_nanochat_train.py`). Learning rates, decay and
warm-ups come from the configuration, which follows nanochat's rules unless set by hand.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.peer_runs import Peer, train_peer
from benchmarks.peers import check_nanochat
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import Resolved
from jaxtrain.model import ResolvedModel, Transformer, initialize, split
from jaxtrain.optim import MuonConfig
from jaxtrain.optim.schedule import Trapezoid
from jaxtrain.settings import UserError
from jaxtrain.weights.params import Params


def train_nanochat(checkout: Path, name: str, overrides: Sequence[str]) -> Path:
    """Train nanochat on the data of a configuration; returns the run directory.

    Raises UserError if the folder is no checkout of nanochat, if nanochat's model or optimizer
    cannot follow the configuration, and if the run directory exists.
    """
    c = load_config(find_config(name), overrides)
    check_nanochat(checkout, name, c)
    script = "peer_nanochat_train.py"
    peer = Peer("nanochat", script, ("torch",), settings_of, (str(checkout.resolve()),))
    return train_peer(peer, c, write_weights)


def settings_of(c: Resolved, vocab_size: int) -> dict[str, Any]:
    """The settings of the peer's script. Raises UserError if nanochat cannot train that way."""
    if not isinstance(c.optim, MuonConfig) or not isinstance(c.optim.schedule, Trapezoid):
        raise UserError("nanochat trains with optim.name=muon and a trapezoid schedule alone")
    schedule = c.optim.schedule.model_dump(
        include={"warmup_steps", "decay_fraction", "final_fraction"}
    )
    momentum = {key: value for key, value in c.optim.model_dump().items() if "momentum" in key}
    width = (c.model.width / 768) ** 0.5  # undone here, since nanochat itself scales these rates
    rates = {
        "matrix_lr": c.optim.matrix_lr,
        "embedding_lr": c.optim.embedding_lr * width,
        "unembedding_lr": c.optim.head_lr * width,
        "scalar_lr": c.optim.x0_scale_lr,
        "weight_decay": c.optim.weight_decay,
    }
    more = {"depth": c.model.depth, "fp8": c.model.fp8 is not None}
    return schedule | momentum | rates | more


def write_weights(folder: Path, c: Resolved, vocab_size: int) -> None:
    """Write weights.npz: the initial weights of our run with `run.seed`, under nanochat's names."""
    _, specs = split(Transformer(c.model, vocab_size))
    weights: dict[str, Any] = nanochat_weights(initialize(specs, c.run.seed), c.model)
    np.savez(folder / "weights.npz", **weights)


def nanochat_weights(params: Params, c: ResolvedModel) -> dict[str, np.ndarray]:
    """Our parameters under nanochat's names, in float32; a linear layer is [out, in].

    nanochat rotates by minus the angle, so the halves of each head's q and k channels are swapped:
    then both models are the same function.
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

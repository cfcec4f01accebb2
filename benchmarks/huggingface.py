"""Train transformers' GPT-2 with Hugging Face Trainer on our rows, as a run directory.

    python -m benchmarks huggingface --config gpt_d12 run.name=huggingface data.train.path=... \\
        model.head_dim=64 'optim={name: adamw, learning_rate: 1.5e-3, ...}'
    python -m benchmarks race runs/ours runs/huggingface --differ model

Our loader writes the training and validation rows; `peer_huggingface_train.py` trains on them with
torch.compile, scaled-dot-product attention, bfloat16 and fused AdamW. Sizes, learning rate, decay
and warm-up come from the configuration, whose optimizer must be AdamW with a cosine schedule.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_runs import Peer, train_peer
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import Resolved
from jaxtrain.optim.adamw import AdamWConfig
from jaxtrain.optim.schedule import Cosine
from jaxtrain.settings import UserError

NEEDS = ("torch", "transformers", "accelerate")


def train_huggingface(name: str, overrides: Sequence[str]) -> Path:
    """Train GPT-2 of a configuration's sizes on its data; returns the run directory.

    Raises UserError for an optimizer that is not AdamW with a cosine schedule, and as `train_peer`
    does.
    """
    c = load_config(find_config(name), overrides)
    check_optimizer(c.optim)
    peer = Peer("huggingface", "peer_huggingface_train.py", NEEDS, settings_of)
    return train_peer(peer, c)


def check_optimizer(optim: object) -> AdamWConfig:
    """The settings of AdamW. Raises UserError for settings that the peer's script lacks."""
    if not isinstance(optim, AdamWConfig) or not isinstance(optim.schedule, Cosine):
        raise UserError(
            "optim: the peer trains with AdamW and a cosine alone: set optim='{name: adamw, "
            "learning_rate: 1e-3, schedule: {name: cosine, warmup_steps: 20}}'"
        )
    if optim.schedule.final_fraction:
        raise UserError("optim.schedule.final_fraction: Trainer's cosine ends at 0; leave it out")
    return optim


def settings_of(c: Resolved, vocab_size: int) -> dict[str, Any]:
    """The settings of the peer's script."""
    optim = check_optimizer(c.optim)
    rates = optim.model_dump(
        include={"learning_rate", "weight_decay", "b1", "b2", "eps", "clip_norm"}
    )
    model = c.model.model_dump(include={"depth", "width", "heads", "hidden"})
    multiple = c.model.vocab_multiple  # the embedding is padded like ours
    padded = {"vocab_size": -(-vocab_size // multiple) * multiple}
    return rates | model | padded | {"warmup_steps": optim.schedule.warmup_steps}

"""Train modded-nanogpt's recipe on the rows of one of our configurations, as a run directory.

    python -m benchmarks modded-nanogpt CHECKOUT --config gpt_d12 run.name=m data.train.path=...
    jaxtrain train --config gpt_d12 run.name=ours data.train.path=...
    python -m benchmarks race runs/ours runs/m --baseline ours

Our loader writes the training and validation rows. The checkout's train_gpt.py is a script: its
parts up to the hyperparameters, and from model to optimizers, are copied into a module, with our
vocabulary size and BOS instead of GPT-2's. A separate process trains with that module
(`peer_modded_nanogpt_train.py`). Steps, batch and microbatch size come from the configuration, all
else from the recipe. Its learning rates are for 8 sequences of 49,152 tokens per step, and are
scaled by the square root of the batch.

The commit is 9d9dc96 (2025-08-23), the last that uses PyTorch's own attention (flex_attention).
Later ones download FlashAttention 3 from a hub at start. The recipe has one size, 12 layers of
width 768, the same as gpt_d12.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_runs import Peer, train_peer
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import Resolved
from jaxtrain.settings import UserError

COMMIT = "9d9dc96"
SIZE = (12, 768)  # layers and width of the recipe
BLOCK = 128  # block size of its attention masks, in tokens
END_OF_TEXT, TOKENS = 50256, 50257  # GPT-2's end-of-text id and vocabulary size in train_gpt.py


def train_modded_nanogpt(checkout: Path, name: str, overrides: Sequence[str]) -> Path:
    """Train the recipe on the data of a configuration; returns the run directory.

    Raises UserError if the folder is no checkout of that commit, if the configuration has another
    size, and as `train_peer` does.
    """
    c = load_config(find_config(name), overrides)
    path = checkout / "train_gpt.py"
    if not path.is_file():
        raise UserError(f"{checkout}: no checkout of modded-nanogpt, it has no train_gpt.py")
    source = path.read_text("utf-8")
    parts(source)

    def write_recipe(folder: Path, c: Resolved, vocab_size: int) -> None:
        bos = int(np.load(folder / "train.npy", mmap_mode="r")[0, 0])
        text = recipe(source, c, vocab_size, bos)
        (folder / "modded_nanogpt.py").write_text(text, "utf-8")

    script = "peer_modded_nanogpt_train.py"
    peer = Peer("modded-nanogpt", script, ("torch", "triton"), settings_of)
    return train_peer(peer, c, write_recipe)


def parts(source: str) -> tuple[str, str]:
    """The lines of train_gpt.py up to its hyperparameters, and from its model to its compilation.

    Raises UserError if the file's structure differs from `COMMIT`, or it has no flex_attention.
    """
    tree, lines = ast.parse(source).body, source.splitlines()
    named = lambda node, name: isinstance(node, ast.Name) and node.id == name
    made = [n for n in tree if isinstance(n, ast.AnnAssign) and named(n.target, "model")]
    settings = [n for n in tree if isinstance(n, ast.ClassDef) and n.name == "Hyperparameters"]
    if "flex_attention" not in source or len(made) != 2 or len(settings) != 1:
        raise UserError(
            f"train_gpt.py is not that of commit {COMMIT}, the last with PyTorch's own "
            f"attention: git checkout {COMMIT}"
        )
    model, compiled = made
    first, last = lines[: settings[0].end_lineno], lines[model.lineno - 1 : compiled.end_lineno]
    return "\n".join(first), "\n".join(last)


def recipe(source: str, c: Resolved, vocab_size: int, bos: int) -> str:
    """The module's source: train_gpt.py without data loading, process group and training loop."""
    first, last = parts(source)
    tokens = c.train.device_batch_size * c.train.sequence_length
    ours = [
        "args = Hyperparameters()",
        "published_steps, published_tokens = args.num_iterations, args.train_seq_len",
        f"args.num_iterations = {c.train.steps}",
        f"args.train_seq_len = args.val_seq_len = {tokens}",
    ]
    text = "\n".join([first, *ours, last, ""])
    for theirs, number in ((END_OF_TEXT, bos), (TOKENS, vocab_size)):
        text = re.sub(rf"\b{theirs}\b", str(number), text)
    return text


def settings_of(c: Resolved, vocab_size: int) -> dict[str, Any]:
    """The settings of the peer's script. Raises UserError for another size than the recipe's."""
    if (found := (c.model.depth, c.model.width)) != SIZE:
        raise UserError(
            f"modded-nanogpt has {SIZE[0]} layers of width {SIZE[1]}, not {found[0]} of "
            f"{found[1]}: take gpt_d12"
        )
    tokens = c.train.device_batch_size * c.train.sequence_length
    if tokens % BLOCK:
        raise UserError(
            f"train.device_batch_size: {tokens} tokens a microbatch are no multiple of {BLOCK}, "
            "the block of modded-nanogpt's masks"
        )
    return {}

"""Command lines of `generate` and `chat`, and options shared with `serve`; no import of JAX."""

import argparse
from pathlib import Path
from typing import NamedTuple

from jaxtrain.settings import SEEDS, TINY, Parser, real, whole
from jaxtrain.storage.location import local

TOKENS = 256  # new tokens by default


class DraftOptions(NamedTuple):
    """Options of speculative decoding, named as in `EngineOptions`. drafts: draft tokens per step,
    0 for none. They come from prompt lookup, from the model of draft_run, or from the model's own
    module of multi-token prediction."""

    drafts: int = 0
    draft_run: Path | None = None
    draft_mtp: bool = False


def add_drafts(parser: Parser) -> None:
    """Add the options that `asked_drafts` reads."""
    parser.add_argument(
        "--drafts", type=whole(0, 16), default=0, metavar="N",
        help="draft tokens per step (speculative decoding; default 0), by prompt lookup",
    )  # fmt: skip
    parser.add_argument(
        "--draft-run",
        type=local,
        metavar="RUN",
        help="draft model, in the place of prompt lookup",
    )
    parser.add_argument(
        "--draft-mtp", action="store_true",
        help="draft with the model's multi-token prediction module (objective.name=mtp)",
    )  # fmt: skip


def asked_drafts(a: argparse.Namespace) -> DraftOptions:
    """Speculative decoding options of a command line."""
    return DraftOptions(a.drafts, a.draft_run, a.draft_mtp)


def generate_parser(program: str = "jaxtrain generate") -> Parser:
    """Parser of `jaxtrain generate`, which continues or answers a prompt."""
    parser = Parser(program, description="Text from a trained model.")
    parser.add_argument("run", type=local, help="run directory or model folder, also at a URL")
    parser.add_argument("--prompt", action="append", help="prompt to continue; may be repeated")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="chat in the terminal; with --prompt: answer it and stop",
    )
    parser.add_argument("--system", help="with --chat: the system message")
    parser.add_argument(
        "--tokens",
        type=whole(1, 2**20),
        help=f"new tokens (default {TOKENS}; in a chat at most half the context)",
    )
    parser.add_argument(
        "--temperature",
        type=real(0.0, "from 0 on"),
        default=0.8,
        help="sampling temperature (default 0.8); 0 is greedy",
    )
    parser.add_argument("--top-k", type=whole(1), help="sample from the K most likely tokens")
    parser.add_argument(
        "--top-p", type=real(TINY, "above 0 and at most 1", 1.0),
        help="sample from the smallest set of tokens with this probability (nucleus)",
    )  # fmt: skip
    parser.add_argument(
        "--cache-dtype",
        choices=["int8", "float8"],
        help="KV cache dtype; default the compute dtype",
    )
    add_drafts(parser)
    parser.add_argument("--seed", type=whole(0, SEEDS), default=0)
    parser.add_argument(
        "--step", type=whole(0), help="use this step's checkpoint, not the final model"
    )
    return parser


def chat_parser() -> Parser:
    """Parser of `jaxtrain chat`, which is `jaxtrain generate --chat`."""
    return generate_parser("jaxtrain chat")

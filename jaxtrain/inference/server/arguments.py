"""The command line of `serve`; nothing here imports JAX."""

import argparse
from pathlib import Path

from jaxtrain.inference.arguments import add_drafts
from jaxtrain.settings import TINY, Parser, real, whole
from jaxtrain.storage.location import local

HOST, PORT = "127.0.0.1", 8000


def serve_parser() -> Parser:
    """Parser of `jaxtrain serve`."""
    parser = Parser(
        "jaxtrain serve",
        description="Answer HTTP requests with a trained model, by OpenAI's API (extra `serve`). "
        "SIGTERM and Ctrl-C end it when the answers in flight are complete.",
    )
    parser.add_argument("run", type=local, help="run directory or model folder, also at a URL")
    parser.add_argument(
        "--step", type=whole(0), help="use this step's checkpoint, not the final model"
    )
    parser.add_argument("--name", help="the model's name in requests; default the run's name")
    parser.add_argument("--host", default=HOST, help=f"address to listen at (default {HOST})")
    parser.add_argument(
        "--port",
        type=whole(0, 65535),
        default=PORT,
        help=f"port to listen at (default {PORT}); 0: a free one",
    )
    parser.add_argument(
        "--adapter", type=named_folder, action="append", default=[], metavar="NAME=FOLDER",
        help="serve a LoRA adapter (a run or a peft folder) of the model under this name; may be "
        "repeated",
    )  # fmt: skip
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with one API key per line; each is valid",
    )
    keys.add_argument(
        "--api-key-env", metavar="VARIABLE", help="environment variable that holds the API key"
    )
    parser.add_argument(
        "--pooling", choices=["mean", "last"], default="mean",
        help="embeddings: pool final hidden states by their mean, or take the last (default mean)",
    )  # fmt: skip
    add_limits(parser)
    add_engine(parser)
    return parser


def named_folder(text: str) -> tuple[str, Path]:
    """Parse NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be NAME=FOLDER")
    return name, Path(folder)


def add_limits(parser: Parser) -> None:
    """Add the limits for clients."""
    parser.add_argument(
        "--max-tokens", type=whole(1), metavar="N", help="limit of new tokens per answer; "
        "default the context",
    )  # fmt: skip
    parser.add_argument(
        "--max-concurrency", type=whole(1), default=32, metavar="N",
        help="answers decoded at the same time, the batch size (default 32)",
    )  # fmt: skip
    parser.add_argument(
        "--max-queue", type=whole(0), default=256, metavar="N",
        help="answers that may wait in the queue; beyond it, requests get status 429 (default 256)",
    )  # fmt: skip
    parser.add_argument(
        "--max-body", type=real(TINY, "above 0"), default=4.0, metavar="MIB",
        help="size limit of a request body in MiB (default 4)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=real(TINY, "above 0"), default=600.0, metavar="SECONDS",
        help="time limit of a request, including its wait in the queue (default 600)",
    )  # fmt: skip
    parser.add_argument(
        "--drain", type=real(0.0, "from 0 on"), default=60.0, metavar="SECONDS",
        help="after SIGTERM, time for answers in flight to finish (default 60)",
    )  # fmt: skip


def add_engine(parser: Parser) -> None:
    """Add the options of the engine."""
    parser.add_argument(
        "--context", type=whole(1), metavar="N",
        help="limit of prompt and answer tokens together; default the model's context",
    )  # fmt: skip
    parser.add_argument(
        "--cache-dtype", choices=["int8", "float8"], help="KV cache dtype; default the compute "
        "dtype",
    )  # fmt: skip
    parser.add_argument(
        "--decode-steps", type=whole(1, 64), default=8, metavar="N",
        help="decode steps per call, whose tokens are sent together, while no prompt waits "
        "(default 8)",
    )  # fmt: skip
    add_drafts(parser)
    parser.add_argument(
        "--no-megakernel", action="store_true",
        help="with --max-concurrency 1 on a GPU: do not use one kernel for all layers",
    )  # fmt: skip
    parser.add_argument(
        "--tensor", type=whole(1), default=1, metavar="N", help="tensor-parallel devices "
        "(default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--no-warm-up", action="store_true",
        help="compile programs when a request first needs them, not at startup",
    )  # fmt: skip

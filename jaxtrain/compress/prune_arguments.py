"""The command line of `jaxtrain prune`; nothing here imports JAX."""

import argparse
from pathlib import Path

from jaxtrain.settings import Parser, whole

METHODS = {
    "magnitude": "the smallest weights of each matrix; reads no text",
    "wanda": "the smallest |weight| x norm of its input, of each output",
    "sparsegpt": "those with the least error, which the weights left make up for",
}


def prune_parser() -> Parser:
    """Of `jaxtrain prune`: a saved model, a share of its matrices' weights zero."""
    parser = Parser(
        "jaxtrain prune",
        description="Make weights of a trained model zero, without training. The original stays.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:16s} {what}" for name, what in METHODS.items()),
    )
    parser.add_argument("run", type=Path, help="run directory or model folder")
    parser.add_argument("--step", type=whole(0), help="a checkpoint instead of the final model")
    parser.add_argument("--method", choices=METHODS, required=True, help="how; see below")
    parser.add_argument("--sparsity", type=float, help="share of zeros in each matrix, as in 0.5")
    parser.add_argument("--pattern", metavar="N:M", help="N weights left of M inputs, as in 2:4")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new model")
    add_calibration(parser)
    parser.add_argument("overrides", nargs="*", help="data.validation.name=documents ...")
    return parser


def add_calibration(parser: Parser, name: str = "--text") -> None:
    """The text whose statistics a method reads."""
    parser.add_argument(name, type=Path, help="calibration text; default data.train's")
    parser.add_argument("--sequences", type=whole(1), default=128, help="of that text (128)")
    parser.add_argument("--length", type=whole(2), help="tokens of each; train.sequence_length")

"""The command lines of `quantize`, `prune` and `shrink`; nothing here imports JAX."""

import argparse
from pathlib import Path

from jaxtrain.cluster.arguments import add_ray
from jaxtrain.evaluation.arguments import add_model
from jaxtrain.settings import Parser, real, whole

# The entries of compress.methods.METHODS, as a test checks.
METHODS = {
    "int8": "8-bit integers, a scale a column",
    "int4": "4-bit integers, a scale a group of inputs; round to nearest",
    "gptq": "int4 whose rounding errors the inputs behind make up for; reads a calibration text",
    "awq": "int4 with inputs scaled by their size before rounding; reads a calibration text",
    "w8a8": "int8 weights and activations, smoothed (SmoothQuant); reads a calibration text",
    "nf4": "4-bit NormalFloat in blocks of 64, as QLoRA's base",
    "float8": "float8 e4m3, a scale a column",
}
# The entries of compress.sparsify.METHODS, as a test checks.
PRUNING_METHODS = {
    "magnitude": "the smallest weights of each matrix; reads no text",
    "wanda": "the smallest |weight| x norm of its input, of each output",
    "sparsegpt": "those with the least error, which the weights left make up for",
}


def compress_parser(name: str, description: str, methods: dict[str, str] | None = None) -> Parser:
    """Parser of a command that turns a saved model into another: RUN, --step, --out, --method."""
    methods = methods or {}
    parser = Parser(
        f"jaxtrain {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter if methods else argparse.HelpFormatter,
        epilog="\n".join(f"{method:16s} {what}" for method, what in methods.items()),
    )
    add_model(parser)
    if methods:
        parser.add_argument("--method", choices=methods, required=True, help="how; see below")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new model")
    return parser


def quantize_parser() -> Parser:
    """Parser of `jaxtrain quantize`: store a saved model's matrices in few bits."""
    parser = compress_parser(
        "quantize",
        "Quantize a trained model's matrices, without training. The original stays.",
        METHODS,
    )
    parser.add_argument(
        "--group-size", type=whole(2, 2**31 - 1),
        help="int4, gptq, awq: inputs that share a scale (default model.weight_form's, else 128)",
    )  # fmt: skip
    parser.add_argument("--head", action="store_true", help="quantize the head as well")
    parser.add_argument("--text", type=Path, help="text to measure on; default the run's own")
    parser.add_argument(
        "--act-order", action="store_true", help="gptq: inputs with the largest squares first"
    )
    parser.add_argument(
        "--alpha", type=real(0.0, "from 0 to 1", 1.0),
        help="w8a8: share of the inputs' sizes that moves into the weights (0.5)",
    )  # fmt: skip
    parser.add_argument("--core", action="store_true", help="CORE before and after as well")
    parser.add_argument("--bundle", type=Path, help="--core: its tasks; default $JAXTRAIN_CORE")
    parser.add_argument("--limit", type=whole(1), help="--core: examples of each task (all)")
    add_calibration(parser, "--calibration")
    add_ray(parser)
    return parser


def prune_parser() -> Parser:
    """Parser of `jaxtrain prune`: set a share of a saved model's weights to zero."""
    parser = compress_parser(
        "prune",
        "Make weights of a trained model zero, without training. The original stays.",
        PRUNING_METHODS,
    )
    parser.add_argument("--sparsity", type=float, help="share of zeros in each matrix, as in 0.5")
    parser.add_argument("--pattern", metavar="N:M", help="N weights left of M inputs, as in 2:4")
    add_calibration(parser, "--text")
    parser.add_argument("overrides", nargs="*", help="data.validation.name=documents ...")
    return parser


def add_calibration(parser: Parser, name: str) -> None:
    """Add the options of the calibration text."""
    parser.add_argument(name, type=Path, help="calibration text; default data.train's")
    parser.add_argument("--sequences", type=whole(1), default=128, help="of that text (128)")
    parser.add_argument("--length", type=whole(2), help="tokens of each; train.sequence_length")


def shrink_parser() -> Parser:
    """Parser of `jaxtrain shrink`: cut layers, channels or heads from a saved model."""
    parser = compress_parser(
        "shrink",
        "Cut layers, channels and heads that matter least out of a trained model. The original "
        "stays; train the result with objective.name=distill.",
    )
    parser.add_argument("--depth", type=whole(1), help="layers that stay; default all")
    parser.add_argument(
        "--width", type=whole(1), help="channels of the residual stream that stay; default all"
    )
    parser.add_argument("--heads", type=whole(1), help="query heads that stay; default all")
    parser.add_argument("--hidden", type=whole(1), help="hidden channels that stay; default all")
    parser.add_argument(
        "--rows", type=whole(1), default=16,
        help="rows of the run's training text that rank them (default 16)",
    )  # fmt: skip
    return parser

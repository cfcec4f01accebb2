"""The command lines of `quantize`, `prune` and `shrink`; nothing here imports JAX."""

import argparse
from pathlib import Path

from jaxtrain.cluster.arguments import add_ray
from jaxtrain.evaluation.arguments import add_model
from jaxtrain.settings import Parser, real, whole

# The entries of compress.methods.METHODS, as a test checks.
METHODS = {
    "int8": "8-bit integers, one scale per column",
    "int4": "4-bit integers, one scale per group of inputs; round to nearest",
    "gptq": "int4; later inputs absorb errors; reads a calibration text",
    "awq": "int4; scales large inputs up; reads a calibration text",
    "w8a8": "int8 weights and activations; reads a calibration text",
    "nf4": "4-bit NormalFloat in blocks of 64, as QLoRA's base",
    "float8": "float8 e4m3, one scale per column",
}
# The entries of compress.sparsify.METHODS, as a test checks.
PRUNING_METHODS = {
    "magnitude": "removes the smallest weights of each matrix; reads no text",
    "wanda": "removes the smallest |weight| x input norm of each output",
    "sparsegpt": "removes weights of least error, compensated by the remaining weights",
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
        parser.add_argument("--method", choices=methods, required=True, help="method; see below")
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
        "--act-order",
        action="store_true",
        help="gptq: quantize inputs with the largest activations first (act-order)",
    )
    parser.add_argument(
        "--alpha", type=real(0.0, "from 0 to 1", 1.0),
        help="w8a8: SmoothQuant's alpha, how much scale moves into the weights (default 0.5)",
    )  # fmt: skip
    parser.add_argument("--core", action="store_true", help="also evaluate CORE before and after")
    parser.add_argument(
        "--bundle", type=Path, help="--core: folder or archive of the tasks; default $JAXTRAIN_CORE"
    )
    parser.add_argument("--limit", type=whole(1), help="--core: examples per task (default all)")
    add_calibration(parser, "--calibration")
    add_ray(parser)
    return parser


def prune_parser() -> Parser:
    """Parser of `jaxtrain prune`: set a share of a saved model's weights to zero."""
    parser = compress_parser(
        "prune",
        "Set weights of a trained model to zero, without training. The original stays.",
        PRUNING_METHODS,
    )
    parser.add_argument("--sparsity", type=float, help="share of zeros in each matrix, such as 0.5")
    parser.add_argument(
        "--pattern", metavar="N:M", help="keep N weights of every M inputs, such as 2:4"
    )
    add_calibration(parser, "--text")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="data.validation.name=documents ..."
    )
    return parser


def add_calibration(parser: Parser, name: str) -> None:
    """Add the options of the calibration text."""
    parser.add_argument(name, type=Path, help="calibration text; default data.train's")
    parser.add_argument(
        "--sequences", type=whole(1), default=128, help="calibration sequences (default 128)"
    )
    parser.add_argument(
        "--length", type=whole(2), help="tokens per sequence; default train.sequence_length"
    )


def shrink_parser() -> Parser:
    """Parser of `jaxtrain shrink`: cut layers, channels or heads from a saved model."""
    parser = compress_parser(
        "shrink",
        "Remove the least important layers, channels and heads of a trained model. The original "
        "stays; train the result with objective.name=distill.",
    )
    parser.add_argument("--depth", type=whole(1), help="layers to keep; default all")
    parser.add_argument(
        "--width", type=whole(1), help="channels of the residual stream to keep; default all"
    )
    parser.add_argument("--heads", type=whole(1), help="query heads to keep; default all")
    parser.add_argument("--hidden", type=whole(1), help="hidden channels to keep; default all")
    parser.add_argument(
        "--rows", type=whole(1), default=16,
        help="training sequences that measure their importance (default 16)",
    )  # fmt: skip
    return parser

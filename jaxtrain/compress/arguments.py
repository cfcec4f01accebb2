"""The command line of `quantize`; nothing here imports JAX."""

import argparse
from pathlib import Path

from jaxtrain.compress.prune_arguments import add_calibration
from jaxtrain.settings import Parser, real, whole

# The rows of compress.methods.METHODS; a test checks.
METHODS = {
    "int8": "8-bit integers, a scale a column",
    "int4": "4-bit integers, a scale a group of inputs; round to nearest",
    "gptq": "int4 whose rounding errors the inputs behind make up for; reads a calibration text",
    "awq": "int4 with inputs scaled by their size before rounding; reads a calibration text",
    "w8a8": "int8 weights and activations, smoothed (SmoothQuant); reads a calibration text",
    "nf4": "4-bit NormalFloat in blocks of 64, as QLoRA's base",
    "float8": "float8 e4m3, a scale a column",
}


def quantize_parser() -> Parser:
    """Of `jaxtrain quantize`: a saved model, its matrices in few bits."""
    parser = Parser(
        "jaxtrain quantize",
        description="Quantize a trained model's matrices, without training. The original stays.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:16s} {what}" for name, what in METHODS.items()),
    )
    parser.add_argument("run", type=Path, help="run directory or model folder")
    parser.add_argument("--step", type=whole(0), help="a checkpoint instead of the final model")
    parser.add_argument("--method", choices=METHODS, required=True, help="how; see below")
    parser.add_argument(
        "--group-size", type=whole(2, 2**31 - 1),
        help="int4, gptq, awq: inputs that share a scale (default model.weight_form's, else 128)",
    )  # fmt: skip
    parser.add_argument("--head", action="store_true", help="quantize the head as well")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new model")
    parser.add_argument("--text", type=Path, help="text to measure on; default the run's own")
    parser.add_argument(
        "--act-order", action="store_true", help="gptq: inputs with the largest squares first"
    )
    parser.add_argument(
        "--alpha", type=real(0.0, "from 0 to 1", 1.0),
        help="w8a8: share of the inputs' sizes that moves into the weights (0.5)",
    )  # fmt: skip
    add_calibration(parser, "--calibration")
    return parser

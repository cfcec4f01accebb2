"""Argument parsers of `report`, `compare`, `ui`, `merge`, `import` and `export`, without JAX."""

from pathlib import Path

from jaxtrain.interop.families import FAMILIES
from jaxtrain.settings import TINY, Parser, real, whole
from jaxtrain.storage.location import local

DTYPES = ("bfloat16", "float16", "float32", "float64")  # as in `interop.tensors`; a test checks
OUTTYPES = ("f32", "f16", "bf16", "q8_0", "q4_k")  # as in `interop.gguf_file`; a test checks


def report_parser() -> Parser:
    """Parser of `jaxtrain report`: one HTML page about a run."""
    parser = Parser("jaxtrain report", description="One HTML page about a run, RUN/report.html.")
    parser.add_argument("run", type=local, help="a run directory, such as runs/NAME, also at a URL")
    return parser


def compare_parser() -> Parser:
    """Parser of `jaxtrain compare`: a table and a plot of several runs."""
    parser = Parser(
        "jaxtrain compare",
        description="Compare runs: loss at equal steps, tokens per second, seconds to equal loss, "
        "and the settings that differ. The first run is the baseline.",
    )
    parser.add_argument(
        "runs", type=local, nargs="+", metavar="RUN", help="run directories, also at URLs"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="write a plot of their loss curves"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE.html",
        help="write the comparison as an HTML page, with all curves",
    )
    return parser


def ui_parser() -> Parser:
    """Parser of `jaxtrain ui`: a page about a folder of runs."""
    parser = Parser(
        "jaxtrain ui",
        description="A page about a folder of runs, live: curves, samples, data, events, dry runs. "
        "It listens on localhost only.",
    )
    parser.add_argument(
        "runs", type=Path, nargs="?", default=Path("runs"), metavar="RUNS",
        help="a folder of run directories (default runs)",
    )  # fmt: skip
    parser.add_argument(
        "--port",
        type=whole(0, 65535),
        default=8765,
        help="port of the page (default 8765); 0: a free one",
    )
    parser.add_argument(
        "--endpoint", metavar="URL", action="append", default=[],
        help="OpenAI-compatible server to chat with, such as http://127.0.0.1:8000; may be "
        "repeated",
    )  # fmt: skip
    return parser


def merge_parser() -> Parser:
    """Parser of `jaxtrain merge`: several models become one."""
    parser = Parser(
        "jaxtrain merge",
        description="Merge models of one structure into one, without training.",
    )
    parser.add_argument(
        "models", nargs="+", metavar="MODEL",
        help="run directories or model folders; RUN@STEP is the checkpoint of a step",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder of the new model")
    parser.add_argument(
        "--method", choices=("mean", "slerp", "ties"), default="mean",
        help="mean of the weights, spherical interpolation of two models, or TIES (default mean)",
    )  # fmt: skip
    parser.add_argument(
        "--weights",
        type=real(TINY, "above 0"),
        nargs="+",
        help="one weight per model; default equal",
    )
    parser.add_argument("--base", help="ties: the base model that all were tuned from")
    parser.add_argument(
        "--density", type=real(TINY, "above 0 and at most 1", 1.0), default=0.2,
        help="ties: share of each model's largest changes to keep (default 0.2)",
    )  # fmt: skip
    parser.add_argument(
        "--scale", type=real(TINY, "above 0"), default=1.0,
        help="ties: factor on the merged change (default 1)",
    )  # fmt: skip
    return parser


def import_parser() -> Parser:
    """Parser of `jaxtrain import`: a checkpoint becomes a run directory."""
    parser = Parser("jaxtrain import", description="A Hugging Face checkpoint becomes a run.")
    parser.add_argument(
        "source", help="folder of a checkpoint, or OWNER/NAME[@REVISION] of huggingface.co"
    )
    parser.add_argument("run", type=Path, help="run directory to write")
    return parser


def export_parser() -> Parser:
    """Parser of `jaxtrain export`: a run's model becomes a checkpoint, or a file for llama.cpp."""
    parser = Parser(
        "jaxtrain export", description="A run becomes a Hugging Face checkpoint or a GGUF file."
    )
    parser.add_argument("run", type=local, help="run directory or model folder, also at a URL")
    parser.add_argument("out", help="folder to write, or the .gguf file; also at a URL")
    parser.add_argument(
        "--format", choices=("huggingface", "gguf"), default="huggingface",
        help="a checkpoint of Hugging Face, or one file for llama.cpp (default huggingface)",
    )  # fmt: skip
    parser.add_argument(
        "--outtype", choices=OUTTYPES, help="gguf: how matrices are stored (default f16)"
    )
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        metavar="NAME",
        help=f"model family: {', '.join(FAMILIES)}; default: the one that fits",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the tensors; default: as imported, or float32"
    )
    parser.add_argument(
        "--shard-bytes",
        type=whole(1, 2**63 - 1),
        help="size limit of one file in bytes (default 5 GB)",
    )
    parser.add_argument(
        "--push-to-hub", metavar="OWNER/NAME",
        help="upload the checkpoint and a model card to huggingface.co, as a private repository",
    )  # fmt: skip
    parser.add_argument(
        "--public", action="store_true", help="with --push-to-hub: as a public repository"
    )
    parser.add_argument(
        "--license",
        metavar="NAME",
        help="with --push-to-hub: licence in the model card, such as apache-2.0",
    )
    return parser

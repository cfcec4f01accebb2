"""Command lines of `prepare`, `show-data`, `filter`, `search-growth`; nothing imports JAX."""

from pathlib import Path

from jaxtrain.cluster.arguments import add_ray
from jaxtrain.settings import Parser, whole


def prepare_parser() -> Parser:
    """Build the parser of `jaxtrain prepare`, which tokenizes text into token stores."""
    parser = Parser(
        "jaxtrain prepare",
        description="Tokenize the data of a configuration. The same command again resumes.",
    )
    parser.add_argument("--config", help="a YAML file, or the bare name of a shipped config")
    add_overrides(parser)
    add_ray(parser)
    return parser


def show_data_parser() -> Parser:
    """Build the parser of `jaxtrain show-data`, which prints packed rows, decoded."""
    parser = Parser(
        "jaxtrain show-data",
        description="Decoded rows of a run's batches, as they are packed; prepares the data first.",
    )
    add_config_and_overrides(
        parser, "a run directory, a YAML file or the bare name of a shipped config"
    )
    parser.add_argument(
        "--rows", type=whole(1), default=4, help="number of rows to show (default 4)"
    )
    parser.add_argument(
        "--step", type=whole(0), default=0, help="training step of the rows (default 0)"
    )
    parser.add_argument(
        "--characters",
        type=whole(0),
        default=400,
        help="characters to show of each document (default 400)",
    )
    return parser


def filter_parser() -> Parser:
    """Build the parser of `jaxtrain filter`, which writes the text that data.train.filters keep."""
    parser = Parser(
        "jaxtrain filter",
        description="Write what data.train.filters leave of the text as JSONL, and report what "
        "they removed.",
    )
    add_config_and_overrides(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--samples",
        type=whole(0),
        default=1,
        help="removed documents to show per reason (default 1)",
    )
    add_ray(parser)
    return parser


def search_growth_parser() -> Parser:
    """Build the parser of `jaxtrain search-growth`, which finds `train.phases` by proxy runs."""
    parser = Parser(
        "jaxtrain search-growth",
        description="Train short runs of equal cost that begin with fewer layers, and write the "
        "train.phases of the best. The same command again resumes.",
    )
    add_config_and_overrides(parser)
    parser.add_argument(
        "--steps", type=whole(2), required=True, help="proxy run length, in steps of the full model"
    )
    parser.add_argument(
        "--depths",
        type=whole(1),
        nargs="+",
        required=True,
        help="initial depths to try, for example 3 6",
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.25, 0.5],
        help="shares of the steps at the initial depth (default 0.25 0.5)",
    )
    parser.add_argument(
        "--grow", nargs="+", default=["stack", "interleave"],
        choices=["stack", "interleave", "repeat_top"],
        help="growth operators to try: where new layers come from",
    )  # fmt: skip
    return parser


def add_config_and_overrides(
    parser: Parser, config: str = "a YAML file or the bare name of a shipped config"
) -> None:
    """Add the arguments for a configuration, with this help, and overrides of its fields."""
    parser.add_argument("config", help=config)
    add_overrides(parser)


def add_overrides(parser: Parser) -> None:
    """Add the arguments key.path=value, any number of them."""
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="override a field"
    )

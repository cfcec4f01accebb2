"""The command line of `shrink`; nothing here imports JAX."""

from pathlib import Path

from jaxtrain.settings import Parser, whole


def shrink_parser() -> Parser:
    """Of `jaxtrain shrink`: a saved model with fewer layers, channels or heads."""
    parser = Parser(
        "jaxtrain shrink",
        description="Cut layers, channels and heads that matter least out of a trained "
        "model. The original stays; train the result with objective.name=distill.",
    )
    parser.add_argument("run", type=Path, help="run directory or model folder")
    parser.add_argument("--step", type=whole(0), help="a checkpoint instead of the final model")
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
    parser.add_argument("--out", type=Path, required=True, help="folder of the new model")
    return parser

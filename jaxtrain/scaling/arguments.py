"""The command line of `scaling`, without JAX."""

from pathlib import Path

from jaxtrain.settings import Parser, whole

STAGES = ("run", "fit", "plan", "coordinates")


def scaling_parser() -> Parser:
    """Parser of `jaxtrain scaling`: a study of scaling laws, or a coordinate check."""
    parser = Parser(
        "jaxtrain scaling",
        description="Scaling laws. run: train the missing runs of a study, fit, predict the "
        "held-out run and train it; the same command again resumes. fit: fit the finished runs of "
        "a study, or run directories. plan: list the runs, and stop. coordinates: how large "
        "activations grow with width and depth in the first steps (muP's coordinate check).",
    )
    parser.add_argument("stage", choices=STAGES, help="action; see above")
    parser.add_argument(
        "target", nargs="+", metavar="STUDY.yaml",
        help="a study; for `fit` also run directories, for `coordinates` a configuration; then "
        "key.path=value overrides for all runs",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="folder of fit.json and scaling.html; default the study's folder, or scaling",
    )  # fmt: skip
    parser.add_argument(
        "--parameters", choices=("matrices_and_head", "matrices", "without_embeddings", "total"),
        metavar="COUNT",
        help="which parameters to count: matrices_and_head, matrices, without_embeddings or total; "
        "default as in the study",
    )  # fmt: skip
    group = parser.add_argument_group("options of coordinates")
    group.add_argument(
        "--widths", type=whole(1), nargs="+", help="model widths (default 64 128 256)"
    )
    group.add_argument("--depths", type=whole(1), nargs="+", help="depths, in the place of widths")
    group.add_argument(
        "--steps",
        type=whole(0),
        default=4,
        help="training steps before the measurement (default 4)",
    )
    group.add_argument("--seeds", type=whole(1), default=3, help="seeds per model (default 3)")
    return parser

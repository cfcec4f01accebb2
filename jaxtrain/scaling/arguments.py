"""The command line of `scaling`, without JAX."""

from pathlib import Path

from jaxtrain.settings import Parser, whole

STAGES = ("run", "fit", "plan", "coordinates")


def scaling_parser() -> Parser:
    """Parser of `jaxtrain scaling`: a study of scaling laws, or a coordinate check."""
    parser = Parser(
        "jaxtrain scaling",
        description="Scaling laws. run: train the missing runs of a study, fit, predict the "
        "held-out run and train it; the same command again resumes. fit: fit what is there, a "
        "study or run directories. plan: list the runs, and stop. coordinates: how large "
        "activations grow with width and depth in the first steps (muP's coordinate check).",
    )
    parser.add_argument("stage", choices=STAGES, help="what to do")
    parser.add_argument(
        "target", nargs="+", metavar="STUDY.yaml",
        help="a study; of `fit` also run directories, of `coordinates` a configuration; then "
        "key.path=value overrides of all runs",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="where fit.json and scaling.html go; default the study's folder, or scaling",
    )  # fmt: skip
    parser.add_argument(
        "--parameters", choices=("matrices_and_head", "matrices", "without_embeddings", "total"),
        help="what counts as a parameter; default the study's",
    )  # fmt: skip
    group = parser.add_argument_group("of coordinates")
    group.add_argument("--widths", type=whole(1), nargs="+", help="model widths (64 128 256)")
    group.add_argument("--depths", type=whole(1), nargs="+", help="depths in their place")
    group.add_argument("--steps", type=whole(0), default=4, help="training steps before (4)")
    group.add_argument("--seeds", type=whole(1), default=3, help="seeds of each model (3)")
    return parser

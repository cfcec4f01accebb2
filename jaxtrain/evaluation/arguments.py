"""Command lines of `evaluate`, `score`, `search-rope`, `lm-eval`; nothing here imports JAX."""

import argparse
from pathlib import Path

from jaxtrain.cluster.arguments import add_place, add_ray
from jaxtrain.settings import SEEDS, Parser, whole
from jaxtrain.storage.location import local

SCORES = {
    "perplexity": "e to the mean negative log-likelihood of a token",
    "el2n": "mean L2 norm of softmax - label",
    "grad_norm": "mean norm of the gradient of a token's loss by the head",
    "prototypicality": "cosine distance of the mean last state to the nearest of --clusters",
}
ENDING = ".jsonl.zst"  # of the file that `score` writes


def evaluate_parser() -> Parser:
    """Parser of `jaxtrain evaluate`: validation, or in-context tasks."""
    parser = Parser(
        "jaxtrain evaluate",
        description="Validation loss, perplexity and bits per byte of a split; or in-context "
        "tasks.",
    )
    add_model(parser)
    parser.add_argument("--tasks", help="comma-separated: core, names of its tasks, or FILE.yaml")
    parser.add_argument(
        "--needle",
        metavar="TOKENS",
        help="needle in a haystack at these lengths in tokens: 1024,4096",
    )
    parser.add_argument(
        "--bundle", type=Path, help="folder or archive of the tasks; default $JAXTRAIN_CORE"
    )
    parser.add_argument(
        "--limit",
        type=whole(1),
        help="examples per task (default all), or per length and depth of --needle (10)",
    )
    parser.add_argument(
        "--all-shots",
        action="store_true",
        help="draw few-shot examples from all examples, not only from --limit",
    )
    parser.add_argument(
        "--crop", action="store_true", help="cut the beginning of prompts longer than the context"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="file of the results; default RUN/tasks[_step_N].json, or needle...",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], help="data.validation.name=documents ..."
    )
    add_place(parser)
    add_ray(parser)
    return parser


def score_parser() -> Parser:
    """Parser of `jaxtrain score`: columns of scores for each document of a text."""
    parser = Parser(
        "jaxtrain score",
        description="Score documents with a trained model, to filter or sample them by.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:16s} {what}" for name, what in SCORES.items()),
    )
    add_model(parser)
    parser.add_argument("--score", required=True, help="names of scores (below), comma-separated")
    parser.add_argument("--out", type=Path, required=True, help=f"file to write, NAME{ENDING}")
    parser.add_argument(
        "--clusters",
        type=whole(1),
        default=100,
        help="prototypicality: number of clusters (default 100)",
    )
    parser.add_argument("overrides", nargs="*", default=[], help="data.train.path=corpus.jsonl ...")
    add_ray(parser)
    return parser


def search_rope_parser() -> Parser:
    """Parser of `jaxtrain search-rope`: LongRoPE's divisors for a trained model."""
    parser = Parser(
        "jaxtrain search-rope",
        description="Search the divisors of a model's RoPE frequencies for a longer context "
        "(LongRoPE), and write model.rope_scaling. The same command again resumes the search.",
    )
    add_model(parser)
    parser.add_argument(
        "--length", type=whole(2), required=True, help="context length to extend to, in tokens"
    )
    parser.add_argument(
        "--text", type=Path, help="plain text file to search on; default the validation text"
    )
    parser.add_argument(
        "--rows",
        type=whole(1),
        default=8,
        help="sequences of --length tokens to evaluate on (default 8)",
    )
    parser.add_argument(
        "--generations", type=whole(0), default=40, help="generations after the first (default 40)"
    )
    parser.add_argument(
        "--population", type=whole(4), default=64,
        help="candidates of the first generation (default 64); later ones have half as many",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=whole(0, SEEDS), default=0, help="seed of the search (default 0)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write; default RUN/rope_LENGTH[_step_N]"
    )
    parser.add_argument("overrides", nargs="*", default=[], help="mesh.data=8 ...")
    return parser


def lm_eval_parser() -> Parser:
    """Parser of `jaxtrain lm-eval`: tasks of EleutherAI's lm-evaluation-harness."""
    parser = Parser(
        "jaxtrain lm-eval", description="Any task of EleutherAI's lm-evaluation-harness."
    )
    add_model(parser)
    parser.add_argument("--tasks", required=True, help="task names of the harness, comma-separated")
    parser.add_argument(
        "--num-fewshot", type=whole(0), help="few-shot examples; default each task's own"
    )
    parser.add_argument("--limit", type=whole(1), help="examples of each task; default all")
    parser.add_argument("--out", type=Path, help="results as JSON; default RUN/harness.json")
    parser.add_argument("overrides", nargs="*", default=[], help="eval.batch_size=16 ...")
    return parser


def add_model(parser: Parser) -> None:
    """Add RUN and --step, which name the model."""
    parser.add_argument("run", type=local, help="run directory or model folder, also at a URL")
    parser.add_argument(
        "--step", type=whole(0), help="use this step's checkpoint, not the final model"
    )

"""The benchmarks that each option applies to; an option that nothing reads is an error."""

import argparse
import itertools

from jaxtrain.estimate.arguments import option_given
from jaxtrain.settings import UserError

# Benchmark -> its own options; --record, --out, --variant and --config are for several.
ONLY = {
    "attention": ("tune",),
    "case-study": ("data", "folder", "shrink"),
    "check": ("only",),
    "curves": ("baseline",),
    "decode": ("prompts", "batches", "cache_dtypes"),
    "finetune": ("only",),
    "engine": (
        "prompts", "batches", "cache_dtypes", "new", "drafts", "decode_steps", "few_rows",
        "profile", "peer", "transformers", "draft_mtp", "text", "weights",
    ),
    "compress": (
        "also", "shape", "core", "text", "calibration", "sequences", "recipes", "folder", "workers",
        "only",
    ),
    "serve-soak": ("clients", "minutes"),
    "step": ("profile", "switches", "flags", "peer"),
    "ladder": ("scale", "only", "remove", "steps", "workers", "time_only", "tune"),
    "loader": ("minutes",),
    "memory": ("techniques", "longest", "devices", "device", "memory", "fit"),
    "population": ("depth", "members", "steps", "note"),
    "simulate": ("note",),
    "race": ("baseline", "differ"),
    "verdicts": ("workers", "time_only", "tune"),
}  # fmt: skip


def check_options(a: argparse.Namespace) -> None:
    """Raise UserError for an option that nothing reads."""
    for option in dict.fromkeys(itertools.chain.from_iterable(ONLY.values())):
        stray = option not in ONLY.get(a.what, ()) and option_given(a, option)
        if stray:
            users = ", ".join(what for what, options in ONLY.items() if option in options)
            raise UserError(f"{stray} is for bench {users}, not for bench {a.what}")
    stray = option_given(a, *ONLY["decode"])
    if stray and a.what == "decode" and not a.config:
        raise UserError(f"{stray} is for bench decode with --config, the decode of whole models")
    if a.peer and a.flags:
        raise UserError("--peer does not go with --flags")
    stray = option_given(a, "device", *(() if a.longest else ("memory",)))
    if stray and a.devices is None and a.fit is None:
        raise UserError(f"{stray} is for --devices N or --fit N, not for what is here")

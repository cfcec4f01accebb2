"""Tokenize text into token stores ahead of training, which would otherwise do it.

jaxtrain prepare --config configs/gpt_d12.yaml data.train.path='corpus/*.jsonl.zst'
"""

import sys
import time

from rich.console import Console

from jaxtrain import data
from jaxtrain.cluster.ray_cluster import ray_cluster
from jaxtrain.config import find_config, load_config
from jaxtrain.config.overrides import check_once
from jaxtrain.data.store.progress import show_progress
from jaxtrain.settings import command
from jaxtrain.train.arguments import prepare_parser
from jaxtrain.train.run_directory import check_text


@command
def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 2 after one line about an error that the user can fix."""
    arguments = prepare_parser().parse_intermixed_args(argv)
    try:
        check_once(arguments.overrides)
        path = find_config(arguments.config) if arguments.config is not None else None
        whole = load_config(path, arguments.overrides)
        check_text(whole)
        config = whole.data
        console, begin = Console(), time.monotonic()
        with ray_cluster(arguments.ray), show_progress(console) as progress:
            prepared = data.prepare(config, progress=progress)
    except KeyboardInterrupt:
        print(
            "interrupted; the same command resumes after the last complete shard", file=sys.stderr
        )
        return 130
    stores = data.stores_of(prepared.train)
    if prepared.validation is not None:
        stores = {**stores, "validation": prepared.validation}
    for name, store in stores.items():
        print(
            f"{name:12s} {store.documents:,} documents, {store.tokens:,} tokens, "
            f"{store.bytes / max(store.tokens, 1):.2f} bytes per token, {store.directory or ''}"
        )
    for line in data.damaged_shards(prepared):
        print(f"{'left out':12s} {line}")
    if getattr(whole.objective, "cache", None):
        from jaxtrain.train.teacher_cache import write_teacher_cache  # imports JAX's programs

        print(f"{'teacher':12s} {write_teacher_cache(whole, prepared)}")
    print(f"{'vocabulary':12s} {prepared.tokenizer.vocab_size:,} tokens")
    print(f"{'ready after':12s} {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

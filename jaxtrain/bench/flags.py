"""What XLA's options bring to a step: the default, then each set of `parallel/flags.py` alone."""

import gc
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxtrain.bench.step import bench_step
from jaxtrain.parallel import SETS, known_options
from jaxtrain.settings import UserError


def bench_flags(
    name: str, overrides: Sequence[str], only: str | None = None
) -> Iterator[dict[str, Any]]:
    """A record of `bench step` for each set (or the one named), all of one process.

    A set that this XLA knows nothing of is left out. Raises UserError for an unknown one.
    """
    every = {"default": (), **{set_: (set_,) for set_ in SETS}}
    if only is not None and only not in every:
        raise UserError(f"there is no set of flags {only}; there are {', '.join(every)}")
    for set_, names in every.items():
        options = known_options(names)
        if only not in (None, set_) or (names and not options):
            continue
        line = f"train.compiler_options={json.dumps(options)}"
        yield bench_step(name, [*overrides, line], f"flags {set_}", parts=False)
        jax.clear_caches()
        gc.collect()

"""XLA options for a step: the default, then each set of `cluster/xla_flags.py` alone."""

import gc
import json
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.step import bench_step
from jaxtrain.cluster.xla_flags import SETS, known_options
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
    sets = {set_: known_options(names) for set_, names in every.items() if only in (None, set_)}
    lines = {
        set_: [*overrides, f"train.compiler_options={json.dumps(options)}"]
        for set_, options in sets.items()
        if options or not every[set_]
    }
    # One after another: programs compiled at once search among kernels on the same GPU, and ten of
    # them took longer than any call may.
    for set_, line in lines.items():
        yield from bench_step(name, line, f"flags {set_}", parts=False)
        gc.collect()

"""Benchmark of CORE's shapes with random tokens: packed rows, and one example per forward pass."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.peers import rows_of
from benchmarks.random_inputs import new_state
from benchmarks.record import describe
from benchmarks.timing import COMPILERS
from jaxtrain.cluster.xla_flags import known_options
from jaxtrain.data import Scored
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.estimate.workload import Workload, load_workload
from jaxtrain.evaluation.log_likelihood import make_scorer, scores
from jaxtrain.interop.companions import Prompting
from jaxtrain.model import cast
from jaxtrain.runs.saved import Saved

SHARE = 8  # one in SHARE of CORE's examples is measured
ONE_BY_ONE = 20  # examples of each task that are measured one by one
MULTIPLE = 128  # lengths are rounded up to this one by one, to compile fewer programs


class Shape(NamedTuple):
    """A task: examples, sequences per example, and median tokens with the GPT-2 tokenizer."""

    examples: int
    choices: int
    shared: int  # tokens of the common prefix
    tail: int  # tokens after the prefix, per sequence


CORE = {
    "hellaswag_zeroshot": Shape(10042, 4, 54, 34), "jeopardy": Shape(2117, 1, 335, 3),
    "bigbench_qa_wikidata": Shape(20321, 1, 125, 2), "arc_easy": Shape(2376, 4, 368, 4),
    "arc_challenge": Shape(1172, 4, 428, 5), "copa": Shape(100, 2, 10, 5),
    "commonsense_qa": Shape(1221, 4, 500, 1), "piqa": Shape(1838, 2, 407, 9),
    "openbook_qa": Shape(500, 4, 10, 3), "lambada_openai": Shape(5153, 1, 80, 1),
    "hellaswag": Shape(10042, 4, 868, 34), "winograd": Shape(273, 2, 13, 6),
    "winogrande": Shape(1267, 2, 15, 6), "bigbench_dyck_languages": Shape(1000, 1, 581, 3),
    "agi_eval_lsat_ar": Shape(230, 4, 867, 1), "bigbench_cs_algorithms": Shape(1320, 1, 473, 1),
    "bigbench_operators": Shape(210, 1, 415, 2),
    "bigbench_repeat_copy_logic": Shape(32, 1, 470, 14),
    "squad": Shape(1000, 1, 2044, 4), "coqa": Shape(7983, 1, 539, 3),
    "boolq": Shape(3270, 2, 1540, 1), "bigbench_language_identification": Shape(10000, 4, 1600, 1),
}  # fmt: skip


def bench_tasks(
    name: str, overrides: Sequence[str], variant: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the record of the seconds that all of CORE would take, without tokenization.

    Rows are `packed`, `one by one` and, if torch is installed, `torch, one by one`. The record is
    yielded again with each row. Speed-ups are over the slowest.
    """
    w = load_workload(name, overrides)
    record = describe("tasks", w.name, variant or w.precision, workload=w.facts()) | {"floor": {}}
    with jax.set_mesh(w.mesh):
        params = new_state(w).params
    ways = {
        "packed": lambda: packed_seconds(w, params),
        "torch, one by one": lambda: peer_seconds(w),
        "one by one": lambda: one_by_one_seconds(w, params),
    }
    examples, rows = sum(shape.examples for shape in CORE.values()), []
    for way, measure in ways.items():
        if (s := measure()) is not None:
            row = {"name": "core", "backend": way, "seconds": s, "examples_per_s": examples / s}
            rows.append(row)
        slowest = max(row["seconds"] for row in rows)
        yield record | {"rows": [row | {"speedup": slowest / row["seconds"]} for row in rows]}


def peer_seconds(w: Workload) -> float | None:
    """Seconds by the peer's script, in its own process; None if it cannot run."""
    if jax.default_backend() != "gpu":
        print("  no peer: it needs a GPU", file=sys.stderr)
        return None
    most = w.config.model.context_length
    sizes = {n: f"{s.choices}x{min(s.shared + s.tail, most)}" for n, s in CORE.items()}
    arguments = (str(w.config.model.depth), *dict.fromkeys(sizes.values()))
    ms = {}
    for row in rows_of("peer_tasks.py", *arguments, needs=("torch",)):
        print(f"  {row}", file=sys.stderr, flush=True)
        ms[row["size"]] = row["ms"]
    if len(ms) < len(set(sizes.values())):
        return None
    return sum(ms[sizes[n]] * shape.examples / 1e3 for n, shape in CORE.items())


def packed_seconds(w: Workload, params: Any) -> float:
    """Seconds as in `evaluate --tasks`, without compiling, extrapolated to all examples."""
    ends = Prompting(True, ())
    saved = Saved(w.config, w.spec.graphdef, w.spec.specs, params, byte_tokenizer(), Path(), ends)
    scorer = make_scorer(saved, w.config)
    jobs = [list(questions(w, shape, seed)) for seed, shape in enumerate(CORE.values())]
    list(scores(scorer, [job[:1] for job in jobs]))  # with and without branches
    begin = time.perf_counter()
    asked = sum(len(found.sizes) for found in scores(scorer, jobs))
    each = (time.perf_counter() - begin) / asked
    print(f"  packed: {1e3 * each:.2f} ms an example", file=sys.stderr, flush=True)
    return each * sum(shape.examples for shape in CORE.values())


def questions(w: Workload, shape: Shape, seed: int) -> Iterator[list[Scored]]:
    """Random examples of a task, from 0.7 to 1.3 times its median length."""
    generator, context = np.random.default_rng(seed), w.config.model.context_length
    for _ in range(math.ceil(shape.examples / SHARE)):
        length = min(round(shape.shared * generator.uniform(0.7, 1.3)), context - shape.tail)
        start = generator.integers(0, w.vocab_size, max(length, 1))
        ends = generator.integers(0, w.vocab_size, (shape.choices, shape.tail))
        ends[:, 0] = np.arange(shape.choices)  # sequences differ from this token on
        tokens = [np.concatenate([start, end]).astype(np.int32) for end in ends]
        yield [Scored(x, len(start)) for x in tokens]


def one_by_one_seconds(w: Workload, params: Any) -> float:
    """Seconds with an example's sequences as a batch, full logits, and a synchronization per
    example; compiled."""
    params = jax.jit(lambda p: cast(p, w.spec.specs, w.spec.dtype))(params)

    @jax.jit
    def alone(params, tokens_CT):
        model = nnx.merge(w.spec.graphdef, params)
        x_CTD = model(tokens_CT).states
        C, T, D = x_CTD.shape
        logits_CTV = model.logits(x_CTD.reshape(-1, D)).reshape(C, T, -1)
        after_CT1 = jnp.roll(tokens_CT, -1, axis=1)[..., None]
        label_CT1 = jnp.take_along_axis(logits_CTV, after_CT1, axis=2)
        nll_CT = jax.nn.logsumexp(logits_CTV, axis=2) - label_CT1[..., 0]
        return nll_CT, logits_CTV.argmax(-1)

    lengths = {name: -(-(s.shared + s.tail) // MULTIPLE) * MULTIPLE for name, s in CORE.items()}
    sizes = {
        name: (s.choices, min(lengths[name], w.config.model.context_length))
        for name, s in CORE.items()
    }
    like = lambda size: jax.ShapeDtypeStruct(size, np.int32)
    distinct = list(dict.fromkeys(sizes.values()))
    options = known_options(("cublas",))
    build = lambda size: alone.lower(params, like(size)).compile(compiler_options=options)
    with ThreadPoolExecutor(COMPILERS) as pool:
        programs = dict(zip(distinct, pool.map(build, distinct)))
    seconds = {size: seconds_of(run, params, size, w) for size, run in programs.items()}
    return sum(seconds[sizes[name]] * shape.examples for name, shape in CORE.items())


def seconds_of(run: Any, params: Any, size: tuple[int, int], w: Workload) -> float:
    """Seconds of one example of `size` = (sequences, tokens)."""
    tokens = np.random.default_rng(0).integers(0, w.vocab_size, size).astype(np.int32)
    jax.device_get(run(params, tokens))
    begin = time.perf_counter()
    for _ in range(ONE_BY_ONE):
        jax.device_get(run(params, tokens))
    each = (time.perf_counter() - begin) / ONE_BY_ONE
    print(
        f"  one by one, {size[0]} x {size[1]} tokens: {1e3 * each:.2f} ms",
        file=sys.stderr,
        flush=True,
    )
    return each

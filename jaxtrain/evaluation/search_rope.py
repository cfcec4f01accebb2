"""`jaxtrain search-rope RUN --length N`: search LongRoPE's divisors on long documents.

Ding et al. 2024, arXiv:2402.13753. The trained model does not change; only the divisors of its
rotary frequencies do. They are arguments of one compiled program, so that a candidate costs one
forward pass over the text. An interrupted search resumes, and finds the same candidate.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from jaxtrain import data
from jaxtrain.cluster.runtime import compute_dtype, start
from jaxtrain.config.resolve import Resolved, override
from jaxtrain.evaluation.arguments import search_rope_parser
from jaxtrain.evaluation.evaluate import data_for
from jaxtrain.evaluation.rope_candidates import (
    RopeCandidate,
    RopeSpace,
    best_of,
    first_generation,
    known_candidates,
    next_generation,
)
from jaxtrain.evaluation.tasks import identity
from jaxtrain.model import cast
from jaxtrain.model.config import check_decoder
from jaxtrain.model.rope import Divisors
from jaxtrain.objectives.next_token import add_sums, evaluation_sums, zero_sums
from jaxtrain.parallel import make_mesh, place_batch
from jaxtrain.parallel.mesh import num_batch_shards
from jaxtrain.runs.saved import Saved, load_saved, place_params
from jaxtrain.settings import UserError, command
from jaxtrain.storage.disk import write_json, write_whole

# Fields of the run's configuration that a command line may change.
FIELDS = (
    "data.train", "data.validation", "data.cache_dir", "data.local_cache",
    "data.prepare_workers", "data.skip_damaged", "mesh", "train.precision",
)  # fmt: skip

Evaluate = Callable[[RopeCandidate], float]


class RopeMeasures(NamedTuple):
    """Bits per byte of the same text, in rows of two lengths."""

    target: Evaluate
    original: Evaluate


class WayToStretch(NamedTuple):
    """Bits per byte of one method of scaling the frequencies."""

    name: str
    target: float
    original: float


def search_space(saved: Saved, length: int) -> RopeSpace:
    """Search space of a model. Raises UserError for a model or length that cannot be searched."""
    c = saved.config.model
    check_decoder(c)
    if c.position_embedding != "rotary":
        raise UserError(
            "search-rope scales RoPE, but this model has learned positions "
            f"(model.position_embedding={c.position_embedding})"
        )
    if c.rope_scaling is not None:
        raise UserError(
            f"model.rope_scaling is already {c.rope_scaling.name}: search from a run without it"
        )
    if length <= c.context_length:
        raise UserError(
            f"--length {length}: it must be longer than the model's context of {c.context_length} "
            "tokens"
        )
    return RopeSpace(c.rope_dim // 2, c.rope_base, length / c.context_length, c.context_length)


def long_rows(store: data.TokenStore, length: int, count: int) -> np.ndarray:
    """At most `count` rows, int32 [rows, length + 1], each BOS and a piece of one document.

    The first pieces of all documents come first, in their order, then the second pieces, and so on.
    Raises UserError if no document has so many tokens.
    """
    if store.marked or store.pairs is not None:
        raise UserError("search-rope reads documents, not conversations: give --text FILE")
    pieces = store.lengths.astype(np.int64) // length
    if not pieces.any():
        longest = int(store.lengths.max(initial=0))
        raise UserError(
            f"no document of the validation text has {length} tokens, the longest has {longest}: "
            "give longer documents (--text FILE), or a smaller --length"
        )
    places = [
        (document, piece * length)
        for piece in range(int(pieces.max()))
        for document in np.flatnonzero(pieces > piece).tolist()
    ][:count]
    texts = store.read_many((document, at, at + length) for document, at in places)
    return np.stack([np.concatenate([[store.bos_id], text]) for text in texts]).astype(np.int32)


def row_batches(rows: np.ndarray, length: int, at_once: int) -> Iterator[data.Batch]:
    """Batches of rows [N, S + 1] in pieces of `length` tokens, `at_once` per batch; the last batch
    is padded with rows of weight 0."""
    whole = (rows.shape[1] - 1) // length * length
    tokens = rows[:, :whole].reshape(-1, length)
    targets = rows[:, 1 : whole + 1].reshape(-1, length)
    for first in range(0, len(tokens), at_once):
        some = slice(first, first + at_once)
        fill = lambda x: np.pad(x, ((0, at_once - len(x)), (0, 0)))
        weights = fill(np.ones(tokens[some].shape, np.float32))
        yield data.Batch(fill(tokens[some]), fill(targets[some]), weights, None, None)


def make_measures(saved: Saved, config: Resolved, rows: np.ndarray) -> RopeMeasures:
    """Put the model on its devices, each with one row of the target length at a time."""
    mesh, bytes_V = make_mesh(config.mesh), jnp.asarray(saved.tokenizer.token_bytes())
    dtype = compute_dtype(config.train.precision)
    with jax.set_mesh(mesh):
        params = jax.jit(lambda p: cast(p, saved.specs, dtype))(place_params(saved, mesh))

    @jax.jit
    def add(params, batch, rope, sums):
        return add_sums(sums, evaluation_sums(saved.graphdef, params, batch, bytes_V, rope))

    def bits_per_byte(placed: list[data.Batch], one: RopeCandidate) -> float:
        factor = jnp.float32(one.factor)
        rope, sums = Divisors(jnp.asarray(one.divisors, jnp.float32), factor), zero_sums()
        with jax.set_mesh(mesh):
            for batch in placed:
                sums = add(params, batch, rope, sums)
        found = float(sums.nats) / (math.log(2) * max(float(sums.text_bytes), 1.0))
        return found if math.isfinite(found) else math.inf

    def at(length: int) -> Evaluate:
        at_once = num_batch_shards(mesh) * ((rows.shape[1] - 1) // length)
        with jax.set_mesh(mesh):
            placed = [place_batch(batch, mesh) for batch in row_batches(rows, length, at_once)]
        return partial(bits_per_byte, placed)

    return RopeMeasures(at(rows.shape[1] - 1), at(saved.config.model.context_length))


class SearchHistory:
    """Measured candidates, one per line of a file."""

    def __init__(self, path: Path, facts: dict[str, Any]):
        """Read an existing file. Raises UserError if it is of another search."""
        self.path, self.scores = path, dict[RopeCandidate, float]()
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # the last line may be incomplete
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = [json.dumps(facts, sort_keys=True) + "\n"]
        elif whole[0] != json.dumps(facts, sort_keys=True) + "\n":
            raise UserError(
                f"{path} belongs to another search (model, text, length, seed or population); name "
                "another folder with --out, or delete it"
            )
        for number, line in enumerate(whole[1:], 2):
            try:
                divisors, factor, score = json.loads(line)
                self.scores[RopeCandidate(tuple(divisors), factor)] = float(score)
            except (ValueError, TypeError):
                raise UserError(
                    f"{path}, line {number} is damaged: delete it from that line on"
                ) from None
        write_whole(path, "".join(whole))

    def measured(self, one: RopeCandidate, evaluate: Evaluate) -> float:
        """Bits per byte of a candidate, measured unless the file has them."""
        if one not in self.scores:
            self.scores[one] = evaluate(one)
            with self.path.open("a") as file:
                file.write(json.dumps([one.divisors, one.factor, self.scores[one]]) + "\n")
        return self.scores[one]


def search(
    space: RopeSpace,
    evaluate: Evaluate,
    history: SearchHistory,
    generations: int,
    population: int,
    seed: int,
) -> RopeCandidate:
    """Candidate with the fewest bits per byte. Prints a line for each generation."""
    scores: dict[RopeCandidate, float] = {}
    count = max(population // 2, 1)
    for number in range(generations + 1):
        if number == 0:
            drawn = first_generation(space, population, seed)
        else:
            drawn = next_generation(scores, space, count, seed, number)
        scores |= {one: history.measured(one, evaluate) for one in drawn}
        best = scores[best_of(scores, list(scores))]
        print(
            f"rope     {number}/{generations} {len(scores)} candidates, "
            f"best {best:.4f} bits per byte",
            flush=True,
        )
    return best_of(scores, list(scores))


def compared(
    space: RopeSpace, measures: RopeMeasures, history: SearchHistory, best: RopeCandidate
) -> list[WayToStretch]:
    """Bits per byte at both lengths, of the methods that need no search and of the best candidate.

    For the best candidate, rows of the original length have the short divisors, which are 1.
    """
    rows = []
    for name, one in known_candidates(space).items():
        target = history.measured(one, measures.target)
        rows.append(WayToStretch(name, target, measures.original(one)))
    short = RopeCandidate((1.0,) * space.pairs, best.factor)
    target = history.measured(best, measures.target)
    return [*rows, WayToStretch("searched", target, measures.original(short))]


def rope_table(rows: list[WayToStretch], space: RopeSpace, length: int) -> Table:
    """Bits per byte of each method, for a console."""
    table = Table(box=None, header_style="bold", title="bits per byte")
    table.add_column("tokens")
    for tokens in (length, space.context):
        table.add_column(f"{tokens:,}", justify="right")
    for row in rows:
        table.add_row(row.name, f"{row.target:.4f}", f"{row.original:.4f}")
    return table


@command
def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, 130 (interrupted), or 2 after one line on what the user can fix."""
    a = search_rope_parser().parse_intermixed_args(argv)
    try:
        start()
        saved = load_saved(a.run, a.step)
        space = search_space(saved, a.length)
        config = override(saved.config, a.overrides, FIELDS)
        if a.text:
            source = {"name": "text", "path": str(a.text)}
            given = f"data.validation={json.dumps({'name': 'source', 'source': source})}"
            config = override(config, [given])
        prepared = data.prepare(data_for(saved, config))
        if prepared.validation is None:
            raise UserError("data.validation is none: give --text FILE")
        if prepared.tokenizer.fingerprint != saved.tokenizer.fingerprint:
            raise UserError(
                "data.tokenizer differs from the tokenizer that the model was trained with"
            )
        rows = long_rows(prepared.validation, a.length, a.rows)
        measures = make_measures(saved, config, rows)
        step = "" if a.step is None else f"_step_{a.step:06d}"
        out = a.out or a.run / f"rope_{a.length}{step}"
        text = prepared.validation.fingerprint
        facts = identity(saved, config) | {"text": text, "rows": len(rows), "length": a.length}
        facts |= {"seed": a.seed, "population": a.population}
        history = SearchHistory(out / "history.jsonl", facts)
        total = a.population + a.generations * max(a.population // 2, 1)
        print(
            f"search   {total:,} candidates on {len(rows)} rows of {a.length:,} tokens", flush=True
        )
        best = search(space, measures.target, history, a.generations, a.population, a.seed)
        finish(compared(space, measures, history, best), best, space, a.length, out)
    except KeyboardInterrupt:
        print(
            "interrupted; the same command resumes after the last measured candidate",
            file=sys.stderr,
        )
        return 130
    return 0


def finish(
    rows: list[WayToStretch], best: RopeCandidate, space: RopeSpace, length: int, out: Path
) -> None:
    """Print the table and the override; write both."""
    section = best.scaling(space.ratio, space.context).model_dump(mode="json")
    text = yaml.safe_dump({"model": {"rope_scaling": section}}, sort_keys=False)
    write_whole(out / "best.yaml", text)
    write_json(out / "bits_per_byte.json", [row._asdict() for row in rows])
    Console(width=80).print(rope_table(rows, space, length), highlight=False)
    flow = yaml.safe_dump(section, default_flow_style=True, width=math.inf, sort_keys=False)
    print(f'{out / "best.yaml"}\n"model.rope_scaling={flow.strip()}"')


if __name__ == "__main__":
    sys.exit(main())

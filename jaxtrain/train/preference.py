"""Preference training outside of the step: reference log-probs, computed once, and validation."""

import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain import data
from jaxtrain.config.resolve import Resolved, eval_batch_size
from jaxtrain.data.records import DESIRABLE
from jaxtrain.model import cast
from jaxtrain.objectives import PREFERENCES, answer_logps
from jaxtrain.objectives.base import DevicePairs
from jaxtrain.parallel import place_batch
from jaxtrain.parallel.mesh import num_batch_shards, process_batch_shard
from jaxtrain.settings import UserError
from jaxtrain.train.step import StepSpec
from jaxtrain.weights.params import Params

UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile)
HELD_OUT = "held out"  # key of the validation split among the sources
LINES = {True: "prompt, completion and label", False: "prompt, chosen and rejected"}


def preference_stores(prepared: data.Prepared, c: Resolved) -> dict[str, data.TokenStore]:
    """Return the pairs by source; the validation pairs are under HELD_OUT.

    Raises UserError if the pairs are not of the kind that the objective needs.
    """
    length = c.train.sequence_length
    views = data.fit_stores(data.stores_of(prepared.train), c.data, length)[0]
    held_out = data.validation_pairs(prepared.validation, c.data, length)
    views |= {} if held_out is None else {HELD_OUT: held_out}
    labelled, labels = PREFERENCES[c.objective.name].is_labelled, set()
    for name, view in views.items():
        assert view.pairs is not None
        if ((view.pairs.kto_labels_P > 0) != labelled).any():
            raise UserError(
                f"objective.name={c.objective.name} trains on lines of {LINES[labelled]}, but "
                f"data.train has lines of {LINES[not labelled]}"
            )
        if name != HELD_OUT:  # it may be too small to have both labels
            labels |= set(view.pairs.kto_labels_P.tolist())
    if labelled and len(labels) == 1:
        known, missing = ("true", "false") if labels == {DESIRABLE} else ("false", "true")
        raise UserError(
            f"every line of data.train has label {known}: objective.name=kto also needs answers "
            f"with label {missing}"
        )
    return views


def reference_logprobs(
    spec: StepSpec,
    start: Params | None,
    frozen: Params | None,
    views: dict[str, data.TokenStore],
    c: Resolved,
    mesh: Mesh,
    file: Path,
    log: Callable[[str], None],
) -> data.References | None:
    """Return the log-probs of all answers under the model of step 0; None if the loss needs none.

    start: the parameters at step 0, whose log-probs are written to `file`. None in a resumed run,
    which reads `file`. The reference model is not kept, so that training needs no second copy of
    the trainable parameters, whether these are a part or all of the model.
    """
    if not PREFERENCES[c.objective.name].has_reference:
        return None
    if start is None:
        return read_references(file, views)

    def logps(params: Params, batch: DevicePairs, frozen: Params | None) -> jax.Array:
        params = spec.join(cast(params, spec.specs, spec.dtype), frozen)
        return answer_logps(spec.graphdef, params, batch)[0]

    score = jax.jit(logps, out_shardings=NamedSharding(mesh, PartitionSpec()))
    log(
        f"refer    {sum(len(v.lengths) for v in views.values()):,} pairs, reference log-probs "
        "before the first step"
    )
    found = {}
    for name, view in views.items():
        assert view.pairs is not None
        found[name] = np.zeros((view.pairs.numbers_P.max() + 1, 2), np.float32)
        for batch, numbers in batches(view, name, c, mesh):
            got_BP2 = np.asarray(score(start, place_batch(batch, mesh), frozen))
            for row, pairs in zip(got_BP2, numbers):
                found[name][pairs] = row[: len(pairs)]
    if jax.process_index() == 0:
        unnamed = file.with_suffix(".tmp.npz")
        np.savez(unnamed, allow_pickle=False, **found)
        unnamed.rename(file)
    return found


def read_references(file: Path, sources: Iterable[str]) -> data.References:
    """Read the log-probs of a resumed run. The file is a zip archive with a CRC-32 per array."""
    where = "the log-probs that this run compares with; set run.name to start another run"
    if not file.is_file():
        raise UserError(f"{file} is missing, {where}")
    try:
        with file.open("rb") as raw, np.load(raw) as stored:
            return {name: stored[name] for name in sources}
    except UNREADABLE as error:
        raise UserError(f"{file} is damaged ({error}), {where}") from error


def make_validation(
    spec: StepSpec,
    views: dict[str, data.TokenStore],
    references: data.References | None,
    c: Resolved,
    mesh: Mesh,
) -> Callable[..., dict[str, float]]:
    """Return (params, frozen, max_tokens) -> the objective's metrics over the held-out pairs.

    KTO's reference point is computed for each batch.
    """
    objective = spec.objective

    def add(params: Any, batch: Any, totals: Any, frozen: Any) -> Any:
        params = spec.join(cast(params, spec.specs, spec.dtype), frozen)
        one = jax.tree.map(lambda x: x[None], batch)
        shared = objective.share(spec.graphdef, params, one)
        found = objective.loss(spec.graphdef, params, batch, shared)
        return jax.tree.map(
            jnp.add, totals, (*found, objective.count(batch, jnp.asarray(spec.bytes_V))[0])
        )

    scorer = jax.jit(add)

    def validate(params: Any, frozen: Any, max_tokens: int | None) -> dict[str, float]:
        zero, seen = jnp.zeros((), jnp.float32), 0
        totals = zero, dict.fromkeys(objective.sums, zero), zero
        for batch, _ in batches(views[HELD_OUT], HELD_OUT, c, mesh, references):
            totals = scorer(params, place_batch(batch, mesh), totals, frozen)
            seen += batch.tokens_BT.size * process_batch_shard(mesh)[1]
            if max_tokens is not None and seen >= max_tokens:
                break
        loss, sums, pairs = totals
        figures = objective.metrics(loss, pairs, zero, sums, None)
        return {name: float(value) for name, value in figures.items()}

    return validate


def batches(
    view: data.TokenStore,
    name: str,
    c: Resolved,
    mesh: Mesh,
    references: data.References | None = None,
) -> Iterator[tuple[data.PairBatch, list[list[int]]]]:
    """Iterate over the pairs of a source, in batches of the validation's size."""
    shards, (index, shares) = num_batch_shards(mesh), process_batch_shard(mesh)
    rows = eval_batch_size(c, c.train.device_batch_size, shards)
    mine = rows // shares
    return data.iterate_pairs(
        view, name, batch_size=rows, sequence_length=c.train.sequence_length,
        share=range(mine * index, mine * (index + 1)), references=references,
    )  # fmt: skip

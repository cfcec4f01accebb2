"""A teacher's largest probabilities on disk, for distillation without the teacher in memory.

`jaxtrain prepare` runs the teacher over the batches of all steps and writes one file per step.
Training reads these files with the tokens. The folder records the teacher's weights (as a hash) and
the stream of batches; a run with another teacher or stream is refused.
"""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import data
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config import Config
from jaxtrain.config.resolve import Resolved, resolve
from jaxtrain.model import Forward, Transformer
from jaxtrain.objectives import StepBatch
from jaxtrain.objectives.base import DeviceBatch
from jaxtrain.objectives.distill import (
    CachedTeacher,
    DistillConfig,
    TaughtBatch,
    logits_of,
    top_and_rest,
)
from jaxtrain.parallel import MeshConfig, make_mesh
from jaxtrain.runs.saved import WEIGHTS, folder_of
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json, write_whole
from jaxtrain.storage.location import local
from jaxtrain.train.reference_model import load_frozen
from jaxtrain.weights.params import Params

FACTS = "cache.json"  # written last: a folder without it is incomplete


def teacher_hash(run: str) -> str:
    """Return the SHA-256 of the weights file's header, which has a checksum of each tensor, and of
    the configuration. UserError for a run without its final model."""
    folder = folder_of(local(run))
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"objective.teacher {run} has no {WEIGHTS}: a cache needs a finished model")
    with (folder / WEIGHTS).open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    return hashlib.sha256(header + (folder / "config.yaml").read_bytes()).hexdigest()


def cache_identity(
    c: Resolved, objective: DistillConfig, prepared: data.Prepared
) -> dict[str, Any]:
    """Return all that determines the files of a cache."""
    t = c.train
    stream = data.stream_identity(prepared.train, c.data, t.batch_size, t.sequence_length)
    return stream | {
        "document_mask": c.model.document_mask,
        "teacher": teacher_hash(objective.teacher),
        "top_k": objective.top_k,
        "temperature": objective.temperature,
    }


def step_file(folder: Path, step: int) -> Path:
    return folder / f"{step:08d}.npz"


def check_identity(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise UserError for a cache of another teacher or of other batches."""
    for key, value in json.loads(json.dumps(wanted)).items():
        if found.get(key) != value:
            raise UserError(
                f"objective.cache {folder} was made with {key} {found.get(key)}, but this run has "
                f"{value}; name another folder, and run `jaxtrain prepare` for it"
            )


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Read cache.json; None if it is missing."""
    file = folder / FACTS
    return json.loads(file.read_text()) if file.is_file() else None


def open_teacher_cache(c: Resolved, prepared: data.Prepared) -> data.Complete | None:
    """Return a function that adds the cached log-probs to batches; None if no cache is configured.

    UserError for a cache that is missing, has too few steps, or another teacher or batches.
    """
    objective = c.objective
    if not isinstance(objective, DistillConfig) or objective.cache is None:
        return None
    folder = Path(objective.cache)
    facts = read_facts(folder)
    if facts is None:
        raise UserError(
            f"objective.cache {folder} is incomplete: run `jaxtrain prepare` with the same fields"
        )
    check_identity(folder, facts, cache_identity(c, objective, prepared))
    if facts["steps"] < c.train.steps:
        raise UserError(
            f"objective.cache {folder} has {facts['steps']} steps, train.steps is {c.train.steps}: "
            "run `jaxtrain prepare` with the same fields"
        )

    def complete(step: int, first: int, batch: data.Batch) -> data.Batch:
        file = step_file(folder, step)
        if not file.is_file():
            raise UserError(f"objective.cache {folder} has no step {step + 1} of the data")
        rows = slice(first, first + len(batch.tokens_BT))
        with np.load(file) as arrays:
            return batch._replace(teacher=(arrays["ids"][rows], arrays["logp"][rows]))

    return complete


def with_cached_teacher(batch: Any) -> StepBatch:
    """Wrap the cached log-probs of microbatches on the device in a `CachedTeacher`."""
    return TaughtBatch(
        batch.tokens_BT, batch.targets_BT, batch.weights_BT, batch.segments_BT,
        batch.positions_BT, CachedTeacher(*batch.teacher),
    )  # fmt: skip


def write_teacher_cache(config: Config, prepared: data.Prepared) -> str:
    """Write the cache of all steps; existing files stay. Returns a summary to print.

    UserError for a folder with a cache of another teacher or of other batches, and for a `top_k`
    that covers the whole vocabulary.
    """
    vocab_size = prepared.tokenizer.vocab_size
    c = resolve(config, vocab_size)
    objective = c.objective
    assert isinstance(objective, DistillConfig) and objective.cache is not None
    if objective.top_k >= vocab_size:
        raise UserError(
            f"objective.top_k {objective.top_k}: the vocabulary has {vocab_size} tokens"
        )
    folder, steps = Path(objective.cache), c.train.steps
    identity = cache_identity(c, objective, prepared)
    begun = folder / "begun.json"
    if begun.is_file():
        check_identity(folder, json.loads(begun.read_text()), identity)
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"objective.cache {folder} already exists and is not empty; name another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(begun, identity)
    write_steps(c, objective, prepared, folder)
    before = read_facts(folder)
    write_json(folder / FACTS, identity | {"steps": max(steps, before["steps"] if before else 0)})
    size = sum(file.stat().st_size for file in folder.iterdir())
    return f"{steps:,} steps, {objective.top_k} tokens each, {size:,} bytes, {folder}"


def write_steps(
    c: Resolved, objective: DistillConfig, prepared: data.Prepared, folder: Path
) -> None:
    """Write a file for each step that has none."""
    mesh = make_mesh(MeshConfig.model_validate({"data": 1}), jax.devices()[:1])
    dtype = compute_dtype(c.train.precision)
    with jax.set_mesh(mesh):
        where = prepared.tokenizer, mesh, dtype
        saved, params = load_frozen("objective.teacher", objective.teacher, *where)
        cap, vocab = saved.config.model.logit_softcap, saved.tokenizer.vocab_size

        @jax.jit
        def cached(params: Params, rows: DeviceBatch) -> CachedTeacher:
            model: Transformer = nnx.merge(saved.graphdef, params)
            parts = rows.tokens_BT, rows.positions_BT, rows.segments_BT
            x_BTD = model(*parts, Forward()).states
            x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
            logits_NV = logits_of(x_ND, model.head_DV().astype(x_ND.dtype), cap, vocab)
            logp_NV = jax.nn.log_softmax(logits_NV / objective.temperature)
            ids_Nk = jax.lax.top_k(logp_NV, objective.top_k)[1]
            found = top_and_rest(logp_NV, ids_Nk)
            fit = lambda x, kind: x.reshape(*x_BTD.shape[:2], -1).astype(kind)
            kind = jnp.uint16 if vocab <= 2**16 else jnp.uint32
            return CachedTeacher(fit(ids_Nk, kind), fit(found, jnp.float16))

        stream = data.train_batches(
            prepared.train, config=c.data, batch_size=c.train.batch_size,
            sequence_length=c.train.sequence_length, segments=c.model.document_mask,
            augment=data.make_augment(c.data.augment, prepared.tokenizer, c.data.seed),
        )  # fmt: skip
        with stream:
            for step, batch in zip(range(c.train.steps), stream):
                if step_file(folder, step).is_file():
                    continue
                rows = [
                    jax.device_get(cached(params, jax.tree.map(lambda x, i=i: x[i : i + 1], batch)))
                    for i in range(len(batch.tokens_BT))
                ]
                ids, logp = (np.concatenate(x) for x in zip(*rows))
                file = io.BytesIO()
                np.savez(file, ids=ids, logp=logp)
                write_whole(step_file(folder, step), file.getvalue())

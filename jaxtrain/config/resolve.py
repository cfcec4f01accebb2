"""Values derived from the depth and the token budget; values set by hand win."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from pydantic import BaseModel

from jaxtrain.config import Config, Sections, to_yaml, validate
from jaxtrain.config.check_compatible import check_compatible
from jaxtrain.config.overrides import apply_overrides, check_once
from jaxtrain.config.scaling_fit import read_dial
from jaxtrain.data import DataConfig
from jaxtrain.data.batches.mixture import BatchSizes, batch_sizes
from jaxtrain.data.batches.ramps import batch_stages, length_stages, overlay
from jaxtrain.data.tokenizer.tokenizer import build_tokenizer
from jaxtrain.finetune import PrefixConfig, PromptLearningConfig
from jaxtrain.model import (
    ModelConfig,
    ResolvedModel,
    Transformer,
    active,
    make_plan,
    resolve_model,
    split,
)
from jaxtrain.objectives.mtp import MTPConfig
from jaxtrain.optim import DECAY, MuonConfig, Scale, resolve_optimizer, shorten_warmup
from jaxtrain.parallel import BATCH, bubble_fraction, check_context_chunks, check_stages
from jaxtrain.parallel.mesh import check_divides, make_mesh, num_batch_shards
from jaxtrain.settings import UserError
from jaxtrain.train.config import ResolvedTrain

REFERENCE_DEPTH = 12  # depth of the model that the batch and learning-rate rules start from
MOST_PARAMETERS = 10**14
MOST_STEP_TOKENS = 2**28  # several times the largest batch that anyone has trained with
BATCH_POWER = 0.383  # exponent of the best batch over training tokens (Bergsma et al. 2025)


class Resolved(Sections):
    """A configuration without open fields; a run is built from it and saved with it."""

    model: ResolvedModel
    train: ResolvedTrain


def vocab_size_of(data: DataConfig) -> int:
    """The vocabulary that the tokenizer has or will have."""
    if data.tokenizer.name != "bytes" and data.tokenizer.path is None:
        return data.tokenizer.vocab_size
    return build_tokenizer(data.tokenizer, ()).vocab_size


def horizon(model: ResolvedModel, vocab_size: int, ratio: float) -> float:
    """Training tokens: ratio x (matrices + head), nanochat's scaling parameters.

    With MoE, only the active experts count. Multi-token prediction modules do not count, so a model
    has the same horizon with and without them.
    """
    model = model.model_copy(update={"mtp": None})
    return ratio * active(model, split(Transformer(model, vocab_size))[1])


def check_size(model: ResolvedModel, vocab_size: int) -> None:
    """Raise UserError for a model larger than any machine, before integers overflow."""
    specs = split(Transformer(model, vocab_size))[1]
    count = sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs))
    if count > MOST_PARAMETERS:
        raise UserError(
            f"model: it has {count:.3g} parameters (depth {model.depth}, width {model.width}, "
            f"hidden {model.hidden}); more than {MOST_PARAMETERS:.0e} fit nowhere"
        )


def reference_model(c: ModelConfig, sequence_length: int) -> ResolvedModel:
    """The model of depth 12 with otherwise the same settings."""
    sizes = {"depth": REFERENCE_DEPTH, "width": None, "heads": None, "kv_heads": None}
    sizes |= {"share_layers": None}  # shared layers cost the FLOPs of unshared ones
    return resolve_model(c.model_copy(update={**sizes, "hidden": None}), sequence_length)


def batch_tokens(tokens: float, reference: float) -> int:
    """Tokens per step for `tokens` training tokens: the reference batch, scaled by BATCH_POWER."""
    return 2 ** round(math.log2(Scale().batch_tokens * (tokens / reference) ** BATCH_POWER))


def resolve(c: Config, vocab_size: int, devices: Sequence[Any] | None = None) -> Resolved:
    """Fill in every open field of the configuration."""
    t = c.train
    model = resolve_model(c.model.model_copy(update=inserted(c)), t.sequence_length)
    check_size(model, vocab_size)
    dial = read_dial(t.scaling_fit)
    ratio = t.tokens_per_parameter or dial.tokens_per_parameter.value
    tokens = horizon(model, vocab_size, ratio)
    reference = horizon(reference_model(c.model, t.sequence_length), vocab_size, ratio)
    mesh = make_mesh(c.mesh, devices)
    shards = num_batch_shards(mesh)
    ideal = dial.batch(tokens) or batch_tokens(tokens, reference)
    rows = max(shards, ideal // t.sequence_length)
    batch = t.batch_size or rows
    c = with_ramps(c, batch)
    check_structure(c, model, mesh)
    if batch % shards:
        raise UserError(
            f"train.batch_size {batch} does not divide over {shards} devices "
            f"(mesh {' x '.join(BATCH)}); use {max(shards, batch // shards * shards)}"
        )
    device_batch = t.device_batch_size or batch // shards
    if batch % (shards * device_batch):
        would = (
            n for n in range(1, min(device_batch, batch // shards) + 1) if not batch // shards % n
        )
        raise UserError(
            f"train.batch_size {batch} is not a multiple of {shards} devices x "
            f"train.device_batch_size {device_batch}; use {max(would)}"
        )
    check_divides("mesh.batch_overlap", c.mesh.batch_overlap, {"rows a device": device_batch})
    step_tokens = batch * t.sequence_length
    if step_tokens > MOST_STEP_TOKENS:
        raise UserError(
            f"train.batch_size {batch} x train.sequence_length {t.sequence_length} are "
            f"{step_tokens:.3g} tokens a step, and at most {MOST_STEP_TOKENS:,} can be: lower one"
        )
    eval_batch_size(c, device_batch, shards)
    sizes = step_sizes(c, batch, shards)
    for number, stage in enumerate(c.data.stages, 1):
        rows = largest_divisor((stage.batch_size or batch) // shards, device_batch)
        named = {f"rows a device in stage {number} of data.stages": rows}
        check_divides("mesh.batch_overlap", c.mesh.batch_overlap, named)
    steps = t.steps or max(1, sizes.steps(tokens))
    # muP itself scales the learning rates from its base width to this one.
    width = model.base_width if model.init == "mup" else model.width
    scale = Scale(width, step_tokens, tokens / reference, dial.rates(tokens / ratio))
    train = {"batch_size": batch, "device_batch_size": device_batch, "steps": steps}
    train |= {"tokens_per_parameter": ratio}
    optim = resolve_optimizer(c.optim, scale)
    whole = sizes.tokens(steps) // step_tokens  # equivalent number of full-batch steps
    optim = optim.model_copy(update={"schedule": shorten_warmup(optim.schedule, max(1, whole))})
    derived = {
        "model": model.model_dump(),
        "train": {**t.model_dump(), **train},
        "optim": optim.model_dump(),
    }
    if not model.causal:  # an encoder cannot generate samples
        derived["sample"] = {**c.sample.model_dump(), "prompts": ()}
    return Resolved.model_validate({**c.model_dump(), **derived})


def check_structure(c: Config | Resolved, model: ResolvedModel, mesh: Mesh) -> None:
    """Raise UserError for a model that is incompatible with the other sections or the mesh."""
    t = c.train
    check_compatible(c.model_copy(update={"model": model}), mesh.shape)
    for stage in (None, *c.data.stages):
        length = (stage and stage.sequence_length) or t.sequence_length
        what = "data.stages: sequence_length" if stage else "train.sequence_length"
        windows = (spec.window for spec in make_plan(model))
        check_context_chunks(mesh.shape["context"], what, length, windows)
    if mesh.shape["pipeline"] > 1:
        check_stages(
            mesh.shape["pipeline"], c.mesh.pipeline_repeats, make_plan(model),
            mesh.shape["context"], c.mesh.pipeline_schedule, mesh.shape["tensor"],
        )  # fmt: skip
    check_shapes(mesh, model, t.sequence_length)


def eval_batch_size(c: Config | Resolved, device_batch: int, shards: int) -> int:
    """Sequences of a batch that is evaluated, summed over all devices.

    device_batch: `train.device_batch_size`. Raises UserError for an `eval.batch_size` that does
    not divide over `shards`.
    """
    rows = c.eval.batch_size or device_batch * shards
    if rows % shards:
        raise UserError(
            f"eval.batch_size {rows} does not divide over {shards} devices "
            f"(mesh {' x '.join(BATCH)}); use {max(shards, rows // shards * shards)}"
        )
    return rows


def step_sizes(c: Config | Resolved, batch: int, shards: int = 1) -> BatchSizes:
    """The batch size of each step. Raises UserError for one that does not divide over `shards`."""
    for number, stage in enumerate(c.data.stages, 1):
        if (stage.batch_size or batch) % shards:
            raise UserError(
                f"data.stages: stage {number} has batch_size {stage.batch_size}, which does not "
                f"divide over {shards} devices (mesh {' x '.join(BATCH)})"
            )
    return batch_sizes(c.data.stages, batch, c.train.sequence_length)


def largest_divisor(rows: int, most: int) -> int:
    """Largest divisor of `rows` that is at most `most`: the rows of a device's microbatch."""
    return next(n for n in range(min(rows, most), 0, -1) if rows % n == 0)


def with_ramps(c: Config, batch: int) -> Config:
    """The configuration with `data.length_ramp` and `data.batch_ramp` expanded into `data.stages`.

    batch: sequences of a full step.
    """
    ramps = {
        "length_ramp": lambda ramp: length_stages(ramp, c.train.sequence_length),
        "batch_ramp": lambda ramp: batch_stages(ramp, batch),
    }
    given = {name: make(ramp) for name, make in ramps.items() if (ramp := getattr(c.data, name))}
    if not given:
        return c
    stages = functools.reduce(overlay, given.values())
    if c.data.stages not in ((), stages):
        name = next(iter(given))
        raise UserError(
            f"data.{name} makes the stages of the data: set data.stages=[] or data.{name}=null"
        )
    return c.model_copy(update={"data": c.data.model_copy(update={"stages": stages})})


def inserted(c: Config) -> dict[str, int]:
    """Modules that the objective or finetuning adds to the model: field -> size. Raises UserError
    if the model already has conflicting ones."""
    if isinstance(c.objective, MTPConfig):
        if c.model.mtp not in (None, c.objective.depth):
            raise UserError(
                f"objective.depth {c.objective.depth}: the model has {c.model.mtp} modules "
                f"(model.mtp); say objective.depth={c.model.mtp} to go on with those"
            )
        return {"mtp": c.objective.depth}
    if c.finetune.name == "adapter":
        size, field, before = c.finetune.width, "width", c.model.adapter
    elif isinstance(c.finetune, PromptLearningConfig):
        before = c.model.prompt if c.finetune.name == "prompt" else c.model.prefix
        size, field = c.finetune.virtual_tokens, "virtual_tokens"
    else:
        return {}
    name = c.finetune.name
    if before and isinstance(c.finetune, PrefixConfig) and c.finetune.projection:
        raise UserError(
            "finetune.projection: the model that the run starts from has a prefix already, and not "
            "the MLP that made it; set finetune.projection=null to go on with it"
        )
    if before not in (None, size):
        raise UserError(
            f"finetune.{field} {size}: the model that the run starts from has model.{name} "
            f"{before}; say finetune.{field}={before} to go on with those"
        )
    other = {"prompt": "prefix", "prefix": "prompt"}.get(name)
    if other and getattr(c.model, other):
        raise UserError(
            f"finetune.name={name}: the model that the run starts from has a {other} already; "
            f"start from the model that it was made for, or go on with finetune.name={other}"
        )
    return {name: size}


def check_shapes(mesh: Mesh, model: ResolvedModel, sequence_length: int) -> None:
    """Raise UserError for a mesh axis that does not divide the dims that it shards.

    Key/value heads need not divide: if there are fewer than `tensor` devices, they are replicated.
    """
    dims = {
        "tensor": {"model.heads": model.heads, "model.hidden": model.hidden},
        "fsdp": {"model.width": model.width},
    }
    if model.moe:
        dims["expert"] = {"model.moe.experts": model.moe.experts}
    for axis, sizes in dims.items():
        check_divides(f"mesh.{axis}", mesh.shape[axis], sizes)
    check_divides("model.ffn_tiles", model.ffn_tiles, {"train.sequence_length": sequence_length})


def override(c: Resolved, overrides: Sequence[str], used: Sequence[str] = ("",)) -> Resolved:
    """A resolved configuration with `key.path=value` overrides; nothing is derived again.

    used: path prefixes of the fields that are read. Raises UserError for any other field.
    """
    check_once(overrides)
    for given in overrides:
        key = given.partition("=")[0].strip()
        if "=" in given and not any(f"{key}.".startswith(f"{one}.") or not one for one in used):
            raise UserError(
                f"{key}: of a trained model's configuration this command takes other values of "
                f"{', '.join(used)} alone"
            )
    tree = c.model_dump(mode="json")
    apply_overrides(tree, overrides)
    return validate(Resolved, tree)


def rules(c: BaseModel, resolved: BaseModel, prefix: str = "") -> dict[str, str]:
    """Path -> rule of each field that was derived.

    The rule is the text after "default " in the field's description.
    """
    found: dict[str, str] = {}
    for name, field in type(c).model_fields.items():
        before, after = getattr(c, name), getattr(resolved, name)
        if isinstance(before, BaseModel):
            found |= rules(before, after, f"{prefix}{name}.")
        elif before is None and after is not None:
            found[prefix + name] = (field.description or "").partition("default ")[2]
    return found


def resolved_text(c: Config) -> str:
    """The resolved tree as YAML for --print-config; derived values have their rule as a comment."""
    vocab_size = vocab_size_of(c.data)
    r = resolve(c, vocab_size)
    found, path, lines = rules(c, r), [], [summary(r, vocab_size)]
    lines += [f"# {line}" for line in [fit_line(c), warmup_line(c, r)] if line]
    for line in to_yaml(r).splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.strip().partition(":")[0]]
        rule = found.get(".".join(path))
        lines.append(f"{line}  # {rule}" if rule else line)
    return "\n".join(lines)


def fit_line(c: Config) -> str | None:
    """A line about the scaling fit that sets the horizon, and the batch and learning rates if it
    has laws for them. None if the horizon is set by hand."""
    if c.train.steps or c.train.tokens_per_parameter:
        return None
    dial = read_dial(c.train.scaling_fit)
    one = dial.tokens_per_parameter
    interval = f" ({one.low:.3g} to {one.high:.3g})" if one.low and one.high else ""
    laws = {"batch": dial.batch_tokens, "rates": dial.rate_multiplier}
    more = "".join(f", {name}" for name, law in laws.items() if law)
    return (
        f"fit      train.scaling_fit {c.train.scaling_fit}: {one.value:.4g} tokens a parameter"
        f"{interval}{more}; {dial.source}"
    )


def decay_line(c: Config, r: Resolved) -> str | None:
    """A line about a derived weight decay that differs from the d12's; else None."""
    before, after = c.optim, r.optim
    if not isinstance(before, MuonConfig) or not isinstance(after, MuonConfig):
        return None
    if before.weight_decay is not None or after.weight_decay in (None, DECAY):
        return None
    return (
        f"decay    optim.weight_decay {after.weight_decay:.4g} ({DECAY} for depth "
        f"{REFERENCE_DEPTH} with {Scale().batch_tokens:,} tokens a step)"
    )


def warmup_line(c: Config, r: Resolved) -> str | None:
    """A line about a warm-up that was shortened to fit the run; else None."""
    before, after = c.optim.schedule.warmup_steps, r.optim.schedule.warmup_steps
    if before == after:
        return None
    return (
        f"warm-up  optim.schedule.warmup_steps {before} -> {after}: the run has {r.train.steps} "
        f"step{'s' * (r.train.steps > 1)}"
    )


def summary(r: Resolved, vocab_size: int) -> str:
    """A YAML comment with parameters, tokens, and microbatches per step."""
    t = r.train
    mesh = make_mesh(r.mesh)
    shards, stages = num_batch_shards(mesh), mesh.shape["pipeline"]
    micro = t.batch_size // (shards * t.device_batch_size)
    repeats, piped = r.mesh.pipeline_repeats, ""
    if stages > 1:
        chunks = f" x {repeats} chunks" if repeats > 1 else ""
        idle = bubble_fraction(stages, micro, repeats, r.model.depth)
        piped = f"; {stages} stages{chunks}, idle {idle:.0%} of the time"
    return (
        f"# {horizon(r.model, vocab_size, 1.0):,.0f} parameters in matrices and head; "
        f"{t.steps * t.batch_size * t.sequence_length:,} tokens, "
        f"{t.batch_size * t.sequence_length:,} a step: "
        f"{micro} microbatches x {t.device_batch_size} rows x {shards} devices{piped}"
    )

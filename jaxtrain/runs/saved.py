"""Trained models on disk: `model/` contains safetensors, the resolved config and the tokenizer."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config import save_yaml, validate
from jaxtrain.config.phases import config_at
from jaxtrain.config.resolve import Resolved
from jaxtrain.data import Tokenizer, load_tokenizer, training_template
from jaxtrain.finetune import PEFT, Partition, make_partition, prefix_keys_values
from jaxtrain.interop.companions import FOLDER, Prompting, chat_template, prompting, special_tokens
from jaxtrain.interop.load import origin
from jaxtrain.interop.peft import write_adapter
from jaxtrain.interop.peft_prompt import write_prompt_adapter
from jaxtrain.interop.pretrained import copy_aux_files, load_base
from jaxtrain.interop.tensors import Stored, metadata_of, read, read_header, write
from jaxtrain.model import ParamSpec, Transformer, path_name, split
from jaxtrain.parallel import partition_spec
from jaxtrain.parallel.mesh import gather_to_host, shard_from_host
from jaxtrain.runs.checkpoint import Checkpointer, decisions, saved_steps
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.runs.publish import take_checkpoint
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import why_not_writable
from jaxtrain.storage.fetch import fetch_model
from jaxtrain.storage.strict_yaml import read_saved
from jaxtrain.weights import encode_matrices
from jaxtrain.weights.contract import flatten, is_weight
from jaxtrain.weights.params import Params, Specs
from jaxtrain.weights.quantized import QuantizedWeight
from jaxtrain.weights.stored import (
    StoredForm,
    arrays_of,
    form_of,
    packed_shardings,
    rebuild,
    stored_shape,
)

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
QUANTIZED = "quantized"  # key in the file's metadata: JSON, the form of each quantized matrix


class Saved(NamedTuple):
    """A model that is ready to evaluate or to generate."""

    config: Resolved
    graphdef: nnx.GraphDef
    specs: Specs
    params: Params
    tokenizer: Tokenizer
    tokenizer_dir: Path
    prompting: Prompting


def save_result(
    directory: Path,
    config: Resolved,
    partition: Partition,
    trained: Params,
    frozen: Params | None,
    tokenizer: Tokenizer,
) -> None:
    """Write a run's result: the merged model, an adapter if PEFT trained one, and the auxiliary
    files of the base checkpoint."""
    save_model(directory, config, partition.merge(trained, frozen), tokenizer)
    if config.finetune.name in PEFT and partition.exports_adapter:
        save_adapter(directory / "adapter", config, partition.export(trained, frozen))
    if config.train.init_from and jax.process_index() == 0:
        copy_aux_files(config.train.init_from, directory)


def check_out(out: Path) -> None:
    """Raise UserError for an `--out` that holds a model, or cannot be created and written."""
    if why := why_not_writable(out):
        raise UserError(f"--out {out}: cannot be written ({why}); name another folder")
    if (out / "model").exists() or (out / "config.yaml").exists():
        raise UserError(f"--out {out}: holds a model already; name another folder")


def save_model(directory: Path, config: Resolved, params: Params, tokenizer: Tokenizer) -> None:
    """Write a self-contained model folder; the weights last, atomically. Only process 0 writes."""
    form = config.model.weight_form
    if form and form.saved == "master":
        specs = split(Transformer(config.model, tokenizer.vocab_size))[1]
        params = encode_matrices(params, specs, form.name, form.options(), jnp.dtype("float32"))
    flat = gather_to_host(flatten(params))
    if jax.process_index():
        return
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory)
    save_yaml(directory / "config.yaml", config)
    arrays: dict[str, np.ndarray] = {}
    forms: dict[str, StoredForm] = {}
    for name, x in flat.items():
        if isinstance(x, QuantizedWeight):
            forms[name] = form_of(x)
        arrays |= arrays_of(name, x) if isinstance(x, QuantizedWeight) else {name: np.asarray(x)}
    table = {name: (x.dtype, x.shape) for name, x in arrays.items()}
    metadata = {"format": "pt", "tokenizer": tokenizer.fingerprint}
    metadata |= origin(config.train.init_from)
    metadata |= {QUANTIZED: json.dumps(forms)} if forms else {}
    write(directory / WEIGHTS, table, arrays.values(), metadata)


def save_adapter(directory: Path, config: Resolved, params: Params) -> None:
    """Write a trained LoRA, prompt or prefix as a peft adapter."""
    said = origin(config.train.init_from)
    base = said.get("base_model", config.train.init_from), said.get("base_model_revision")
    if config.finetune.name in ("prompt", "prefix"):
        shown = prefix_keys_values(params) if config.finetune.name == "prefix" else params
        write_prompt_adapter(directory, config.model, shown, *base)
        return
    facts = config.finetune.model_dump(include={"rank", "alpha", "rslora", "dora"})
    facts |= dict(zip(("base", "revision"), base))
    write_adapter(directory, config.model, params, facts)


def load_saved(path: Path, step: int | None = None) -> Saved:
    """Load the model of a run directory or a `model/` folder: the final one, the newest checkpoint
    if the run has not ended, or the checkpoint of `step`."""
    folder = folder_of(path)
    config = load_resolved(folder / "config.yaml")
    tokenizer_dir = folder if (folder / WEIGHTS).is_file() else path / "tokenizer"
    tokenizer = load_tokenizer(tokenizer_dir)
    finished = step is None and (folder / WEIGHTS).is_file()
    if not finished:
        take_checkpoint(path, step)
        run = path / "config.yaml"  # `model/config.yaml` is the last phase's
        config = load_resolved(run) if run.is_file() else config
        at = max(saved_steps(path), default=0) if step is None else step
        config = config_at(config, at, decisions(path, at))
    graphdef, specs = split(Transformer(config.model, tokenizer.vocab_size))
    if finished:
        params = read_weights(folder / WEIGHTS, specs, tokenizer)
    else:
        params = load_checkpoint_params(path, config, specs, step)
    ends = prompting(tokenizer_dir, tokenizer)
    return Saved(config, graphdef, specs, params, tokenizer, tokenizer_dir, ends)


def apply_weight_form(saved: Saved) -> Saved:
    """Replace trained weights by the encoded weights that the layers multiply.

    `weight_form` is then removed from the config, unless it also rounds activations, which stored
    weights cannot express.
    """
    form = saved.config.model.weight_form
    if form is None or form.saved is None:
        return saved
    c = saved.config
    dtype = compute_dtype(c.train.precision if form.saved == "compute" else "float32")
    options = {k: v for k, v in form.options().items() if k != "activations"}
    params = encode_matrices(saved.params, saved.specs, form.name, options, dtype)
    if form.activations:
        return saved._replace(params=params)
    model = c.model.model_copy(update={"weight_form": None})
    graphdef, _ = split(Transformer(model, saved.tokenizer.vocab_size))
    config = c.model_copy(update={"model": model})
    return saved._replace(config=config, graphdef=graphdef, params=params)


def without_mtp(saved: Saved, why: str) -> Saved:
    """Drop the multi-token-prediction modules, and log a warning with the reason `why`."""
    if saved.config.model.mtp is None:
        return saved
    log.warning("model.mtp: the multi-token prediction modules are left out: %s", why)
    model = saved.config.model.model_copy(update={"mtp": None})
    graphdef, specs = split(Transformer(model, saved.tokenizer.vocab_size))
    config = saved.config.model_copy(update={"model": model})
    params = {name: x for name, x in saved.params.items() if name != "mtp"}
    return saved._replace(config=config, graphdef=graphdef, specs=specs, params=params)


def is_quantized(saved: Saved) -> bool:
    """Whether the model was written by `jaxtrain quantize`."""
    return any(is_weight(x) for x in flatten(saved.params).values())


def place_params(saved: Saved, mesh: Mesh) -> Params:
    """Shard the parameters over a mesh; quantized matrices stay packed."""
    return shard_from_host(saved.params, params_shardings(saved, mesh))


def params_shardings(saved: Saved, mesh: Mesh) -> Params:
    """Shardings of the parameters over a mesh."""

    def sharding_of(
        spec: ParamSpec, x: jax.Array | np.ndarray | QuantizedWeight
    ) -> NamedSharding | QuantizedWeight:
        if isinstance(x, QuantizedWeight):
            return packed_shardings(x, spec, mesh)
        return NamedSharding(mesh, partition_spec(spec.axes, spec.shape, mesh))

    return jax.tree.map(sharding_of, saved.specs, saved.params)


def folder_of(path: Path) -> Path:
    """The folder with a model's config.yaml: `model/` of a finished run, else `path` itself."""
    fetch_model(path)
    folder = path / "model" if (path / "model" / "config.yaml").is_file() else path
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{path} is not a run directory or a model folder: it has no config.yaml")
    return folder


def template_for(saved: Saved) -> tuple[str, dict[str, str]]:
    """A model's chat template and the special tokens it uses: the one it was trained on, or the
    one of its imported checkpoint. Raises UserError if there is neither."""
    trained = training_template(saved.config.data)
    template = chat_template(saved.tokenizer_dir)
    if trained is None and template is None:
        raise UserError(
            f"{saved.tokenizer_dir} has no chat template: it was not trained on conversations, and "
            "its checkpoint brought none; use jaxtrain generate, or /v1/completions of a server"
        )
    return trained or (template or "", special_tokens(saved.tokenizer_dir / FOLDER))


def load_resolved(path: Path) -> Resolved:
    """A run's resolved configuration. Raises UserError that names the file if it is damaged."""
    tree = read_saved(path)
    try:
        return validate(Resolved, tree)
    except UserError as error:
        raise UserError(f"{path} is damaged: {error.args[0]}") from None


def read_weights(path: Path, specs: Specs, tokenizer: Tokenizer) -> Params:
    """Read parameters from a safetensors file; each is checked against its spec and checksum.

    Raises UserError naming a tensor that is missing, damaged, not finite, or of another shape.
    """
    flat = read_header(path)
    if metadata_of(path).get("tokenizer") != tokenizer.fingerprint:
        raise UserError(f"{path} was trained with another tokenizer than the one in its folder")

    forms = json.loads(metadata_of(path).get(QUANTIZED, "{}"))

    def take(key_path: tuple[Any, ...], spec: ParamSpec) -> np.ndarray | QuantizedWeight:
        name = path_name(key_path)
        if name in forms:
            return read_quantized(path, name, spec, StoredForm(*forms[name]), flat)
        if name not in flat:
            raise UserError(
                f"{path} has no tensor {name}, which the model of its config.yaml needs"
            )
        if flat[name].shape != spec.shape:
            raise UserError(f"{path}: {name} is {flat[name].shape}, the model needs {spec.shape}")
        return read(name, flat[name])

    return jax.tree_util.tree_map_with_path(take, specs)


def read_quantized(
    path: Path, name: str, spec: ParamSpec, form: StoredForm, flat: dict[str, Stored]
) -> QuantizedWeight:
    """Read a quantized matrix in its stored form. Raises UserError as `read_weights` does."""
    parts = [part for part in flat if part.startswith(f"{name}/")]
    try:
        weight = rebuild(name, form, {part: read(part, flat[part], packed=True) for part in parts})
    except UserError as error:
        raise UserError(f"{path}: {error.args[0]}") from None
    if stored_shape(weight) != spec.shape:
        raise UserError(f"{path}: {name} is {stored_shape(weight)}, the model needs {spec.shape}")
    return weight


def load_checkpoint_params(
    run_dir: Path, config: Resolved, specs: Specs, step: int | None
) -> Params:
    """Parameters of a run's checkpoint, merged with the frozen base parameters."""
    partition = make_partition(config.finetune, specs, compute_dtype(config.train.precision))
    trained = read_checkpoint(run_dir, partition.trainable, step)
    if partition.init is None:
        return partition.merge(trained, None)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = jax.tree.map(lambda spec: here, partition.base)
    start, seed = config.train.init_from or "", config.run.seed
    base = load_base(start, partition.base, where, partition.store, seed)
    return partition.merge(trained, partition.init(base, seed)[0])


def check_finite(params: Params, path: Path) -> None:
    """Raise UserError naming the first parameter that contains NaN or infinity."""
    fine = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(params)
    for key_path, x in jax.tree_util.tree_flatten_with_path(jax.device_get(fine))[0]:
        if not x:
            raise UserError(
                f"{path}: {path_name(key_path)} holds NaN or infinite values; use an earlier "
                "checkpoint with --step"
            )


def read_checkpoint(run_dir: Path, specs: Specs, step: int | None) -> Params:
    """The parameters of a run's checkpoint (default: the newest)."""
    if not (run_dir / "checkpoints").is_dir():
        raise UserError(f"{run_dir} has neither model/ nor checkpoints/: nothing was saved yet")
    checkpointer = Checkpointer(run_dir, CheckpointConfig.model_validate({}))
    try:
        wanted = checkpointer.latest() if step is None else step
        if wanted is None or wanted not in checkpointer.steps():
            steps = ", ".join(map(str, checkpointer.steps())) or "none"
            raise UserError(f"{run_dir}: no checkpoint of step {wanted}; there are {steps}")
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), specs)
        params = checkpointer.restore_params(wanted, like)
        check_finite(params, checkpointer.directory / str(wanted))
        return params
    finally:
        checkpointer.close()

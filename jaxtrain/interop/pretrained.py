"""Starting a run from another model: one of our runs or model folders, or an HF checkpoint."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import TypeAdapter, ValidationError

from jaxtrain.data import DEFAULT_TEMPLATE, Tokenizer, chat_sources, load_tokenizer
from jaxtrain.data.tokenizer.tokenizer import FILES
from jaxtrain.interop.companions import (
    FOLDER,
    check_aux_files,
    copy_files,
    special_tokens,
    template_in,
)
from jaxtrain.interop.configs import ADDED_MODULES, EXECUTION, Json
from jaxtrain.interop.load import (
    Shardings,
    Store,
    device_copy,
    find_folder,
    is_checkpoint,
    load_checkpoint,
    open_checkpoint,
    pin_revision,
)
from jaxtrain.interop.tensors import WEIGHTS, metadata_of, read, read_header
from jaxtrain.model import ModelConfig, Params, ParamSpec, initialize, path_name
from jaxtrain.model.sections import Experts
from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import read_saved
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import Specs


def model_folder(path: str) -> Path:
    """The folder with the weights of a run, a model folder, a checkpoint or a repository."""
    folder = find_folder(path)
    return folder / "model" if (folder / "model" / "config.yaml").is_file() else folder


def sections_of(path: str) -> dict[str, Json]:
    """The config sections inherited from the model that a run starts from: model and tokenizer."""
    try:
        folder = model_folder(path)
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from error
    if is_checkpoint(folder):
        model = open_checkpoint(folder).fields
        check_aux_files(folder)
    elif (folder / "config.yaml").is_file():
        model = section_of(folder, "model")
    else:
        raise UserError(
            f"train.init_from {path}: no run, no model folder and no checkpoint of Hugging Face "
            "(there is neither config.yaml nor config.json)"
        )
    names = ("huggingface", "sentencepiece", "bytes")
    kind = next((name for name in names if (folder / FILES[name]).is_file()), None)
    if kind is None:
        raise UserError(f"train.init_from {path}: {folder} has no tokenizer")
    tokenizer = {"name": kind} | ({} if kind == "bytes" else {"path": str(folder / FILES[kind])})
    return {"model": model, "data": {"tokenizer": tokenizer}}


def section_of(folder: Path, name: str) -> Json:
    """A section of the config.yaml of one of our models."""
    section = read_saved(folder / "config.yaml").get(name)
    if not isinstance(section, dict):
        raise UserError(f"{folder / 'config.yaml'} is damaged: it has no section {name}")
    return section


def chat_of(path: str) -> tuple[str | None, dict[str, str]]:
    """The chat template of the model at `path`, if any, and the special tokens it may use."""
    folder = model_folder(path)
    if not is_checkpoint(folder):
        for source in chat_sources(section_of(folder, "data").get("train", {})):
            return source.get("template") or DEFAULT_TEMPLATE, source.get("special") or {}
        folder = folder / FOLDER
    return template_in(folder), special_tokens(folder)


# MoE fields about losses and execution, which do not change what the model computes.
MOE_TRAINING_FIELDS = {"aux_loss", "z_loss", "remat"}
# Fields that may differ from the model that a run starts from: execution, context length and RoPE
# scaling, and the modules that finetuning adds (`config.resolve.inserted` checks those).
MAY_DIFFER = EXECUTION | {
    "context_length",
    "rope_scaling",
    "vocab_multiple",
    "weight_form",
    *ADDED_MODULES,
}


def merge_sections(theirs: Json, given: Json) -> Json:
    """Merge `given` into a section; subsections merge if they have the same `name`."""

    def one(before: Any, now: Any) -> Any:
        sections = isinstance(before, dict) and isinstance(now, dict)
        same_kind = sections and now.get("name", before.get("name")) == before.get("name")
        return before | now if same_kind else now

    return theirs | {key: one(theirs.get(key), value) for key, value in given.items()}


def conflicts(theirs: Json, given: Json, whole_rows: bool) -> list[str]:
    """Given model fields that would change what the weights of `theirs` compute.

    whole_rows: the embedding has exactly `vocab_multiple` rows (an HF checkpoint). Invalid values
    are left to the validation that follows.
    """
    try:
        model = ModelConfig.model_validate(theirs)
    except ValidationError:
        return []
    derived = {"hidden": model.hidden or 4 * (model.width or 0)}
    found = []
    for name, value in given.items():
        has = derived.get(name, getattr(model, name, None))
        try:
            kind: Any = ModelConfig.model_fields[name].annotation
            now = TypeAdapter(kind).validate_python(value)
        except (KeyError, ValidationError):
            continue
        if name == "vocab_multiple" and whole_rows:
            differs = now > 0 and has % now > 0
        elif name == "rope_scaling":
            differs = now is None and has is not None
        else:
            differs = name not in MAY_DIFFER and not same(name, has, now, model)
        if differs:
            found.append(f"model.{name} {has} (given: {value})")
    return found


def same(name: str, has: Any, now: Any, model: ModelConfig) -> bool:
    """Whether two values of a field give the same function of the model."""
    says_nothing = {
        "qk_scale": not model.qk_norm,
        "rope_base": model.position_embedding == "learned",
        "short_window": "S" not in model.window_pattern,
    }
    if name == "window_pattern":
        has, now = ((pattern * model.depth)[: model.depth] for pattern in (has, now))
    if isinstance(has, Experts) and isinstance(now, Experts):
        has, now = (experts.model_dump(exclude=MOE_TRAINING_FIELDS) for experts in (has, now))
    if isinstance(has, float) and isinstance(now, float) and math.isclose(has, now, rel_tol=1e-6):
        return True
    return has == now or says_nothing.get(name, False)


TRAINED = ("sentencepiece", "huggingface", "nanochat")  # tokenizers trained if no file is given
LENGTH = 2048  # default of train.sequence_length; a shorter context replaces it


def inherit_config(tree: Json, path: str) -> None:
    """Fill a plain configuration with the inherited sections; its own values win.

    A repository is pinned to its current commit, so that a resumed run uses the same model. The
    tokenizer is inherited unless a file is named. Chat sources inherit the chat template and the
    special tokens. Raises UserError for a `model` section that would change what the weights
    compute.
    """
    tree["train"]["init_from"] = path = pin_revision(path)
    sections = sections_of(path)
    given = tree.get("model") or {}
    if isinstance(given, dict):
        tree["model"] = merge_sections(sections["model"], given)
        asked = {name: tree["model"][name] for name in given}
        if found := conflicts(sections["model"], asked, is_checkpoint(model_folder(path))):
            more = f" and {len(found) - 6} more" if len(found) > 6 else ""
            raise UserError(
                f"train.init_from {path} is a model with {', '.join(found[:6])}{more}: leave these "
                "fields out; the model section is taken from it"
            )
    train, context = tree["train"], sections["model"].get("context_length")
    if isinstance(context, int) and context < LENGTH:
        train.setdefault("sequence_length", context)
    data = tree.setdefault("data", {})
    given = data.get("tokenizer")
    # A tokenizer trained on this run's text would not match the weights.
    if not isinstance(given, dict) or (given.get("name") in TRAINED and not given.get("path")):
        data["tokenizer"] = sections["data"]["tokenizer"]
    for source in chat_sources(data):
        template, special = chat_of(path)
        source["template"] = source.get("template") or template
        source["special"] = special | (source.get("special") or {})


def check_tokenizer(path: str, tokenizer: Tokenizer) -> None:
    """Raise UserError if one of our models was trained with another tokenizer."""
    folder = model_folder(path)
    if is_checkpoint(folder) or load_tokenizer(folder).fingerprint == tokenizer.fingerprint:
        return
    raise UserError(
        f"train.init_from {path} was trained with another tokenizer than data.tokenizer: leave "
        "data.tokenizer out; it is taken from that model"
    )


def load_init_params(
    path: str, specs: Specs, shardings: Shardings, store: Store = lambda name, x: x
) -> Params:
    """Load the initial parameters onto the mesh, in the declared dtypes.

    `store(name, array)` may convert each parameter (quantize it, say) as soon as it is loaded.
    """
    folder = model_folder(path)
    if is_checkpoint(folder):
        return load_checkpoint(open_checkpoint(folder), specs, shardings, store=store)
    stored = read_header(folder / WEIGHTS)
    if "quantized" in metadata_of(folder / WEIGHTS):
        raise UserError(
            f"train.init_from {path} is quantized: start from the unquantized model; "
            "finetune.base_quantization stores a frozen base in few bits"
        )
    for name, spec in flatten(specs).items():
        if name not in stored or stored[name].shape != spec.shape:
            got = stored[name].shape if name in stored else "nothing"
            raise UserError(
                f"train.init_from {path}: the model needs {name} of shape {spec.shape}, there is "
                f"{got}; leave the model section and the tokenizer to that model"
            )

    def value(at: tuple[Any, ...], spec: ParamSpec, sharding: Any) -> Any:
        x = read(path_name(at), stored[path_name(at)])
        return store(
            path_name(at), device_copy(np.asarray(x).astype(spec.dtype, copy=False), sharding)
        )

    return jax.tree_util.tree_map_with_path(value, specs, shardings)


def load_base(
    path: str,
    specs: Specs,
    shardings: Shardings,
    store: Store = lambda name, x: x,
    seed: int = 0,
) -> Params:
    """`load_init_params`, with multi-token prediction modules initialized if the model at `path`
    has none."""
    new = {n: specs[n] for n in ("mtp",) if n in specs and not has_params(path, {n: specs[n]})}
    part = lambda tree: {name: tree[name] for name in tree if name not in new}
    base = load_init_params(path, part(specs), part(shardings), store)
    if not new:
        return base
    where = {name: shardings[name] for name in new}
    return base | jax.jit(lambda: initialize(new, seed), out_shardings=where)()


def has_params(path: str, specs: Specs) -> bool:
    """Whether one of our models has all parameters of `specs`."""
    folder = model_folder(path)
    return (
        not is_checkpoint(folder) and flatten(specs).keys() <= read_header(folder / WEIGHTS).keys()
    )


def copy_aux_files(path: str, model_dir: Path) -> None:
    """Copy a checkpoint's auxiliary files to the model that was trained from it."""
    folder = model_folder(path)
    source = folder if is_checkpoint(folder) else folder / FOLDER
    if source.is_dir():
        copy_files(source, model_dir / FOLDER)

"""Loading a Hugging Face checkpoint as our parameters, onto a mesh or into our own model file.

Tensors are loaded one at a time: read from the memory-mapped file, checked, converted to our
layout, and written into the stack over layers. Host memory never holds a second copy of the model.
"""

import functools
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import DTypeLike

from jaxtrain.interop.configs import Json, family_of, model_fields
from jaxtrain.interop.families import Family, Row
from jaxtrain.interop.keys import text_part
from jaxtrain.interop.layouts import LAYOUTS
from jaxtrain.interop.tensors import DTYPES, Stored, read, read_headers
from jaxtrain.model import Params, ParamSpec, path_name
from jaxtrain.settings import UserError, read_object
from jaxtrain.storage.fetch import fetch_model
from jaxtrain.storage.location import is_url, local
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import Specs

# Buffers in old checkpoints, and the vision tensors of Gemma 3.
IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^(model\.)?(vision_tower|multi_modal_projector)\."
)
AHEAD = 4  # layers read ahead of the one in use
REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


Shardings = dict[str, Any]  # a jax Sharding for each parameter
Store = Callable[[str, Any], Any]  # (name, array) -> the array, or a quantized form of it


class Source(NamedTuple):
    """An opened checkpoint folder: config and tensor headers, no tensor data."""

    folder: Path
    family: Family
    config: Json  # its config.json, the language model's section
    fields: Json  # fields of ModelConfig
    tensors: dict[str, Stored]  # by the family's tensor names


class TensorSlice(NamedTuple):
    """Location of one of our parameters in a checkpoint: its `Row`, and its range of columns."""

    row: Row
    start: int
    width: int | None  # None: the whole tensor


def hub_of(path: str) -> tuple[str, str | None] | None:
    """(OWNER/NAME, revision) of a repository of huggingface.co; None for a folder on disk.

    A revision (branch, tag or commit) follows after an @; the default is the main branch.
    """
    found = None if Path(path).expanduser().is_dir() else REPOSITORY.fullmatch(path)
    return found and (found[1], found[2])


@functools.cache
def folder_at(url: str) -> Path:
    """Local copy of the model at a URL, downloaded once per process."""
    folder = local(url)
    fetch_model(folder)
    return folder


def find_folder(path_or_repo: str) -> Path:
    """A folder on disk, or the local copy of a URL or of a repository of huggingface.co."""
    if is_url(path_or_repo):
        return folder_at(path_or_repo)
    repository = hub_of(path_or_repo)
    if repository is None:
        folder = Path(path_or_repo).expanduser()
        if folder.is_dir():
            return folder
        raise UserError(
            f"{path_or_repo} is not a folder, nor OWNER/NAME or OWNER/NAME@REVISION of "
            "huggingface.co"
        )
    import huggingface_hub

    name, revision = repository
    try:
        folder = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=PATTERNS)
    except Exception as error:  # hub and network errors have no common base class
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"there is no folder {path_or_repo}, and it cannot be downloaded from huggingface.co: "
            f"{first}"
        ) from error
    return Path(folder)


def pin_revision(path: str) -> str:
    """OWNER/NAME@COMMIT with the repository's current commit; a folder is returned unchanged."""
    repository = hub_of(path)
    if repository is None:
        return path
    return f"{repository[0]}@{find_folder(path).name}"  # the cache has a folder for each commit


def origin(path: str | None) -> dict[str, str]:
    """Metadata that names the pinned repository a file was made from; {} for a folder."""
    name, revision = (path and hub_of(path)) or ("", None)
    return {"base_model": name, "base_model_revision": revision} if revision else {}


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a Hugging Face checkpoint (our model folders have a config.yaml)."""
    return (folder / "config.json").is_file()


def open_checkpoint(folder: Path) -> Source:
    """Read config.json and the tensor headers. Raises UserError for an unsupported model."""
    if not is_checkpoint(folder):
        raise UserError(f"{folder} has no config.json: it is not a Hugging Face checkpoint")
    config = text_part(read_object(folder / "config.json"))
    fields, family = model_fields(config), family_of(config)
    named = {own_name(name, family): stored for name, stored in read_headers(folder).items()}
    tensors = {name: stored for name, stored in named.items() if not IGNORED.search(name)}
    if fields["tied_head"]:
        tensors.pop("lm_head.weight", None)
    return Source(folder, family, config, fields, tensors)


def own_name(name: str, family: Family) -> str:
    """A tensor's name in the family's causal LM class."""
    name = name.replace("language_model.", "", 1)
    if name.startswith((family.prefix, "lm_head.")) or IGNORED.search(name):
        return name
    return family.prefix + name


# ---- tensor locations ------------------------------------------------------------------------


def is_stacked(spec: ParamSpec) -> bool:
    return bool(spec.axes) and spec.axes[0] == "layers"


def shape_of(spec: ParamSpec) -> tuple[int, ...]:
    """The shape of one layer."""
    return spec.shape[1:] if is_stacked(spec) else spec.shape


def places(family: Family, flat: dict[str, ParamSpec]) -> dict[str, TensorSlice]:
    """Each of our parameters -> its location in the checkpoint."""
    found = {}
    for row in family.rows:
        if row.ours[0] in flat:
            widths = [shape_of(flat[name])[-1] for name in row.ours]
            for i, name in enumerate(row.ours):
                whole = len(row.ours) == 1
                found[name] = TensorSlice(row, sum(widths[:i]), None if whole else widths[i])
    return found


def expected(family: Family, flat: dict[str, ParamSpec]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor that a checkpoint of this model must have."""
    table = {}
    for row in family.rows:
        if row.ours[0] not in flat:
            continue
        spec = flat[row.ours[0]]
        shape = shape_of(spec)
        if len(row.ours) > 1:
            shape = (*shape[:-1], sum(shape_of(flat[name])[-1] for name in row.ours))
        if "linear" in row.layout:
            shape = shape[::-1]
        for i in range(spec.shape[0]) if is_stacked(spec) else [0]:
            table[row.theirs.format(i)] = shape
    return table


def check_tensors(source: Source, flat: dict[str, ParamSpec]) -> None:
    """Raise UserError for the first tensor that is missing, unexpected, misshapen or quantized."""
    wanted, got = expected(source.family, flat), source.tensors
    of = f"{source.folder}: a {source.family.model_type} model of its config.json"
    if new := sorted(flat.keys() - places(source.family, flat).keys()):
        raise UserError(f"{of} has no {new[0]}, which the model section of the run asks for")
    for name, shape in wanted.items():
        if name not in got:
            raise UserError(f"{of} needs tensor {name}, which is missing")
        if got[name].shape != shape:
            raise UserError(f"{of} needs {name} of shape {shape}, but it is {got[name].shape}")
    for name in got:
        if name not in wanted:
            raise UserError(f"{of} has no tensor {name}, but the checkpoint does")
    for name, stored in got.items():
        if stored.dtype not in DTYPES:
            read(name, stored)  # raises with advice


# ---- reading ---------------------------------------------------------------------------------


def layers_of(source: Source, part: TensorSlice, spec: ParamSpec) -> Iterator[np.ndarray]:
    """Yield the arrays of one parameter, layer by layer, in the checkpoint's dtype."""
    layout = LAYOUTS[part.row.layout]

    def layer(i: int) -> np.ndarray:
        name = part.row.theirs.format(i)
        x = layout.read(read(name, source.tensors[name]), source.fields["head_dim"])
        return x if part.width is None else x[..., part.start : part.start + part.width]

    # Read ahead a few layers: checking and transposing keep several cores busy.
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting: deque[Future[np.ndarray]] = deque()
        for i in range(spec.shape[0]) if is_stacked(spec) else [0]:
            waiting.append(pool.submit(layer, i))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def load_checkpoint(
    source: Source,
    specs: Specs,
    shardings: Shardings | None = None,
    dtype: DTypeLike | None = None,
    store: Store = lambda name, x: x,
) -> Params:
    """Load parameters onto their devices in the declared dtypes, or all but gains and scalars in
    `dtype`.

    shardings: a tree like `specs`; None: the first device. `store(name, array)` may convert each
    parameter (quantize it, say) as soon as it is loaded. Raises UserError naming a tensor that is
    missing, unexpected, misshapen, quantized or not finite.
    """
    flat = flatten(specs)
    check_tensors(source, flat)
    where = places(source.family, flat)
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def value(path: tuple[Any, ...], spec: ParamSpec, sharding: Any = one_device) -> Any:
        kind = spec.dtype if dtype is None or spec.role in ("gain", "scalar") else dtype
        layers = layers_of(source, where[path_name(path)], spec)
        if not is_stacked(spec):
            one = device_copy(np.asarray(next(layers)).astype(kind, copy=False), sharding)
            return store(path_name(path), one)
        stack = jnp.zeros(spec.shape, kind, device=sharding)
        for i, layer in enumerate(layers):
            stack = put_layer(stack, jax.device_put(layer, of_one_layer(sharding)), np.int32(i))
        return store(path_name(path), stack)

    trees = (specs,) if shardings is None else (specs, shardings)
    return jax.tree_util.tree_map_with_path(value, *trees)


def device_copy(x: np.ndarray, sharding: Sharding) -> jax.Array:
    """Copy x to device memory. On CPU an alias of the mapped file could be donated and written to,
    but those pages are read-only."""
    return jax.device_put(x, sharding, may_alias=False)


@functools.partial(jax.jit, donate_argnums=0)
def put_layer(stack: jax.Array, layer: jax.Array, at: jax.Array) -> jax.Array:
    """Write one layer into the stack; the stack is donated, so this is in place."""
    return jax.lax.dynamic_update_index_in_dim(stack, layer.astype(stack.dtype), at, 0)


def of_one_layer(sharding: Sharding) -> Sharding:
    """The sharding of one layer, from that of the stack over layers."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def our_file_layout(
    source: Source, specs: Specs
) -> tuple[dict[str, tuple[np.dtype, tuple[int, ...]]], Iterator[np.ndarray]]:
    """Our model file's table of dtypes and shapes, and its arrays in that order.

    Gains and scalars are float32, all others have the checkpoint's dtype.
    """
    flat = flatten(specs)
    check_tensors(source, flat)
    where = places(source.family, flat)
    kinds = {}
    for name, spec in flat.items():
        first = source.tensors[where[name].row.theirs.format(0)]
        small = spec.role in ("gain", "scalar")
        kinds[name] = np.dtype(np.float32) if small else DTYPES[first.dtype]
    table = {name: (kinds[name], spec.shape) for name, spec in flat.items()}
    pieces = (
        np.asarray(layer).astype(kinds[name], copy=False)
        for name, spec in flat.items()
        for layer in layers_of(source, where[name], spec)
    )
    return table, pieces

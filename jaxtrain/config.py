"""The one configuration tree: load YAML, apply dotted overrides, validate, resolve, save.

Each section's model lives beside the code that it drives; here stand the sections of the loop
itself. A wrong key or value is one line: where, what was given, what is allowed.
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from jaxtrain.checkpoint import CheckpointConfig
from jaxtrain.data import DataConfig, fill_in_chat
from jaxtrain.disk import write_whole
from jaxtrain.finetune import FinetuneConfig, fill_in
from jaxtrain.finetune.config import FullConfig
from jaxtrain.finetune.preference import NextTokenConfig, ObjectiveConfig
from jaxtrain.interop import take_over
from jaxtrain.local import LocalConfig
from jaxtrain.metrics import MetricsConfig
from jaxtrain.model import ModelConfig
from jaxtrain.optim import MuonConfig, OptimConfig
from jaxtrain.overrides import apply_overrides
from jaxtrain.parallel import MeshConfig, ProcessesConfig
from jaxtrain.parsing import END, read_yaml, shown
from jaxtrain.settings import NOT_MEANT, Settings, UserError
from jaxtrain.spikes import LossSpike


class RunConfig(Settings):
    """Where the run lives."""

    name: str = Field("run", min_length=1, description="folder of this run inside `directory`")
    directory: str = Field("runs", description="folder that holds the runs")
    seed: int = Field(42, ge=0, description="of the initial values and the samples")

    @field_validator("name")
    @classmethod
    def _is_inside(cls, name: str) -> str:
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(
                "it must be a folder inside run.directory; set run.directory for another place"
            )
        if max(len(part.encode()) for part in path.parts) > 255:
            raise ValueError("a folder's name has at most 255 bytes")
        return name


class TrainConfig(Settings):
    """Size and length of the training steps."""

    sequence_length: int = Field(
        2048,
        ge=2,
        le=2**27,
        description="tokens of context in a row, T; "
        "that of the model that the run starts from, if shorter",
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        le=2**27,
        description="rows of one step over all devices; "
        "default 2^round(log2(2^19 x (tokens / d12 tokens)^0.383)) / sequence_length",
    )
    device_batch_size: int | None = Field(
        None,
        ge=1,
        description="rows a device takes at once, the rest of its rows are accumulated; "
        "default all its rows",
    )
    fit: bool = Field(
        False,
        description="the command chooses device_batch_size and model.remat, where they are not "
        "given, so that a step fits the device by the dry run's estimate",
    )
    steps: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="optimizer steps; "
        "default tokens_per_parameter x (matrices + head) / batch tokens",
    )
    tokens_per_parameter: float = Field(
        12.0,
        gt=0,
        le=1e9,
        description="training tokens for each parameter of matrices and head",
    )
    init_from: str | None = Field(
        None,
        description="run, model folder or Hugging Face checkpoint (a folder, OWNER/NAME or "
        "OWNER/NAME@REVISION; the commit is kept in the run's configuration) to start from; "
        "its model and tokenizer are the default",
    )
    precision: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="of the compute: bfloat16 or float16 as the GPU can, float32 on a CPU"
    )
    z_loss: float = Field(0.0, ge=0, description="weight of log(Z)^2 in the loss (PaLM: 1e-4)")
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="when a loss, a gradient or an updated parameter is nan or inf: stop; skip: "
        "leave out the update of that step (where the loss and gradients are finite and the "
        "update is not, stop); rollback: go back to the newest checkpoint and leave out the "
        "batches since",
    )
    max_consecutive_skips: int = Field(
        10,
        ge=1,
        description="updates left out one after the other, or returns to one checkpoint, after "
        "which the run stops (on_nonfinite, loss_spike)",
    )
    loss_spike: LossSpike | None = Field(
        None, description="what to do about a sudden high loss; default nothing"
    )
    compiler_options: dict[str, bool | int | str] = Field(
        {}, description="options of XLA's for the step's compilation, xla_gpu_...: value"
    )
    local: LocalConfig | None = Field(
        None,
        description="devices along mesh.data train replicas that meet now and then; "
        "default all take each step together",
    )


class EvalConfig(Settings):
    """Validation during training; the last step always validates the whole split."""

    every: int | None = Field(
        250, ge=1, description="steps between validations; null: only the end"
    )
    tokens: int | None = Field(
        None,
        ge=1,
        description="validation tokens used before the last step; default the whole split",
    )
    batch_size: int | None = Field(
        None, ge=1, le=2**20, description="rows at once; default the device batch"
    )


class SampleConfig(Settings):
    """Text that the model writes while it trains, and at the end."""

    every: int | None = Field(500, ge=1, description="steps between samples; null: only the end")
    prompts: tuple[str, ...] = Field(
        ("",), description="texts to continue; an empty one starts a document; []: no samples"
    )
    tokens: int = Field(256, ge=1, le=2**20, description="new tokens of each sample")
    temperature: float = Field(0.8, ge=0, description="softmax temperature; 0 takes the best token")
    top_k: int | None = Field(None, ge=1, description="sample among this many best tokens")
    top_p: float | None = Field(None, gt=0, le=1, description="sample among this much probability")
    cache_dtype: Literal["int8"] | None = Field(
        None, description="of the keys and values kept while sampling; default the compute dtype"
    )


def section(model: type[BaseModel]) -> Any:
    return Field(default_factory=model)


class Sections(Settings):
    """What a configuration and its resolved form have in common."""

    run: RunConfig = section(RunConfig)
    data: DataConfig = section(DataConfig)
    optim: OptimConfig = section(MuonConfig)
    finetune: FinetuneConfig = section(FullConfig)
    objective: ObjectiveConfig = section(NextTokenConfig)
    mesh: MeshConfig = section(MeshConfig)
    eval: EvalConfig = section(EvalConfig)
    sample: SampleConfig = section(SampleConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    metrics: MetricsConfig = section(MetricsConfig)
    processes: ProcessesConfig = section(ProcessesConfig)

    @property
    def run_dir(self) -> Path:
        return Path(self.run.directory) / self.run.name


class Config(Sections):
    """Everything about a run; nothing in it is required."""

    model: ModelConfig = section(ModelConfig)
    train: TrainConfig = section(TrainConfig)


# ---- loading ---------------------------------------------------------------------------------


def find_config(name: str) -> Path:
    """A path, or the bare name of a shipped config."""
    here = Path(__file__).parent
    places = [
        Path(name),
        *(d / f"{Path(name).stem}.yaml" for d in (here / "configs", here.parent / "configs")),
    ]
    for place in places[:1] if Path(name).parent != Path(".") else places:
        if place.is_file():
            return place
    shipped = sorted({p.stem for d in places[1:] for p in d.parent.glob("*.yaml")})
    close = difflib.get_close_matches(Path(name).stem, shipped, n=1)
    hint = f"did you mean {close[0]}?" if close else f"shipped: {', '.join(shipped)}"
    raise UserError(f"--config {name}: no such file; {hint}")


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a YAML file (None: the defaults) with `key.path=value` overrides."""
    tree: Any = {}
    if path is not None:
        tree = read_yaml(path)
        tree = {} if tree is None else tree
        if not isinstance(tree, dict):
            raise UserError(f"{path}: expected `section: {{field: value}}`, got {shown(tree)}")
    apply_overrides(tree, overrides)
    talks = fill_in_chat(tree)
    if isinstance(tree.get("train"), dict) and tree["train"].get("init_from"):
        take_over(tree, str(tree["train"]["init_from"]))
    fill_in(tree, talks)
    return validate(Config, tree)


def validate[Tree: Sections](model: type[Tree], tree: dict[str, Any]) -> Tree:
    """A plain tree as configuration; all that is wrong with it as UserError, a line each."""
    fill_names(tree, model)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        # A field such as `int | "auto"` has an error for each alternative: show the first.
        lines = {locate(located(e)["loc"])[0]: explain(e) for e in reversed(error.errors())}
        raise UserError(*reversed(lines.values())) from None


def fill_names(tree: dict[str, Any], model: type[BaseModel]) -> None:
    """A section with variants that names none is of its default variant."""
    for key, node in tree.items():
        field = model.model_fields.get(key)
        if field is None or not isinstance(node, dict):
            continue
        variants = {tag_of(v): v for v in variants_of(field)}
        default = field.get_default(call_default_factory=True)
        if len(variants) > 1 and "name" not in node and default is not None:
            node["name"] = default.name
        chosen = (
            variants.get(str(node.get("name")))
            if len(variants) > 1
            else next(iter(variants.values()), None)
        )
        if chosen:
            fill_names(node, chosen)


# ---- messages --------------------------------------------------------------------------------


def explain(error: Any) -> str:
    """One line for one validation error."""
    error = located(error)
    where, model = locate(error["loc"])
    given = error["input"]
    if error["type"] == "extra_forbidden":
        key = str(error["loc"][-1])
        names = list(model.model_fields) if model else []
        close = difflib.get_close_matches(key, names, n=1)
        twins = [(p, variant) for p, _, variant in fields(Config) if p.split(".")[-1] == key]
        other = next((variant for path, variant in twins if path == where), None)
        if other:
            hint = f"it belongs to {where.removesuffix(key)}name={other}"
        elif close:
            hint = f"did you mean {'.'.join([*where.split('.')[:-1], close[0]])}?"
        elif twins:
            hint = f"did you mean {twins[0][0]}?"
        else:
            hint = f"there are {', '.join(names)}"
        return f"{where}: no such field; {hint}"
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        allowed = error["ctx"].get("expected_tags", "")
        if not allowed:
            return f"{where}.name: field required, it says which variant this is; see --help"
        return f"{where}.name: got {shown(error['ctx']['tag'])}, allowed are {allowed}"
    if error["type"] in ("model_type", "model_attributes_type"):
        return (
            f"{where}: got {shown(given)}, but it is a section: set its fields, {where}.KEY=value"
        )
    if error["type"] == "tuple_type":
        return f"{where}: got {shown(given)}, but it is a list: {where}='[..., ...]'"
    message = error["msg"].removeprefix("Value error, ")
    got = "" if isinstance(given, (dict, BaseModel)) else f"got {shown(given)}: "
    return f"{where}: {got}{message[0].lower() + message[1:]}"


def located(error: Any) -> Any:
    """A validation error where it is: one that `Settings` raises names its field itself."""
    if error["type"] != NOT_MEANT:
        return error
    name = error["ctx"]["field"]
    return error | {"loc": (*error["loc"], name), "input": error["input"][name]}


def locate(loc: tuple[Any, ...]) -> tuple[str, type[BaseModel] | None]:
    """A pydantic location as a dotted path (union tags left out), and the model it fell in."""
    model: type[BaseModel] | None = Config
    path: list[str] = []
    name, keyed = "", False  # the field that we are in; whether a place in its list is passed
    for part in loc:
        field = model.model_fields.get(name) if model else None
        if field and not keyed and get_origin(field.annotation) in (tuple, dict):
            path.append(str(part))
            keyed = True
            continue
        variants = variants_of(field) if field else []
        tagged = [v for v in variants if tag_of(v) == part]
        if tagged and len(variants) > 1:
            model = tagged[0]
            continue
        if field and not variants and get_origin(field.annotation) in (Union, UnionType):
            break  # `part` is the alternative that was tried, as int of int | "auto"
        if len(variants) == 1:
            model = variants[0]
        path.append(str(part))
        name, keyed = str(part), False
    return ".".join(path), model


def variants_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The section models that a field may hold."""
    return list(models_in(field.annotation))


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def tag_of(model: type[BaseModel]) -> str | None:
    """The value of `name` that selects a variant."""
    field = model.model_fields.get("name")
    choices = get_args(field.annotation) if field else ()
    return choices[0] if len(choices) == 1 else None


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, str | None]]:
    """Every field of the tree: dotted path, declaration, and the variant that it belongs to."""
    for name, field in model.model_fields.items():
        variants = variants_of(field)
        if not variants:
            yield prefix + name, field, tag_of(model) if name != "name" else None
        many = {dict: ".NAME", tuple: "[]"}.get(get_origin(field.annotation), "")
        for variant in variants:
            yield from fields(variant, f"{prefix}{name}{many}.")


# ---- output ----------------------------------------------------------------------------------


def to_yaml(config: BaseModel) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def save_yaml(path: Path, config: BaseModel) -> None:
    """Write a configuration atomically, with YAML's mark of an end: it can be seen to be whole."""
    write_whole(path, to_yaml(config) + END)


def json_schema() -> str:
    """For editors: completes and checks the YAML files."""
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"


def help_text() -> str:
    """Every field with its type, default and description, for --help."""
    lines = ["fields (a section with a `name` has variants; null means derived or off):"]
    for path, field, variant in fields(Config):
        kind = str(field.annotation).replace("typing.", "").replace("NoneType", "None")
        kind = field.annotation.__name__ if isinstance(field.annotation, type) else kind
        default = "required" if field.is_required() else f"default {field.get_default()!r}"
        of = f"[{variant}] " if variant else ""
        text = field.description or "selects this variant"
        lines.append(f"  {path}  {of}{kind}, {default}\n      {text}")
    return "\n".join(lines)


if __name__ == "__main__":  # python -m jaxtrain.config > configs/schema.json
    print(json_schema(), end="")

"""Loading, validating and saving a configuration (YAML and dotted overrides).

The error for a wrong key or value is one line: where, what was given, what is allowed.
"""

import copy
import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from jaxtrain.config.aliases import Known, right_key, same_name
from jaxtrain.config.fields import fields, tag_of, variants_of
from jaxtrain.config.overrides import apply_overrides, paths_of
from jaxtrain.config.tree import Config, Sections
from jaxtrain.data import apply_chat_defaults
from jaxtrain.finetune import apply_finetune_defaults
from jaxtrain.interop.pretrained import inherit_config
from jaxtrain.settings import NOT_MEANT, UserError
from jaxtrain.storage.disk import write_whole
from jaxtrain.storage.strict_yaml import END, read_yaml, shown

Problem = Mapping[str, Any]  # one of `ValidationError.errors()`
SECRETS = re.compile(r"(://)[^/\s'\"]*(?=@)|(://[^\s'\"?]*\?)[^\s'\"]*")  # in a URL


HERE = Path(__file__).parents[1]
SHIPPED = (HERE / "configs", HERE.parent / "configs")  # in a wheel, in a checkout


def shipped_names() -> list[str]:
    """The bare names of the shipped configs."""
    return sorted({path.stem for folder in SHIPPED for path in folder.glob("*.yaml")})


def find_config(name: str) -> Path:
    """The path of a config file, given as a path or as the bare name of a shipped config."""
    places = [Path(name), *(folder / f"{Path(name).stem}.yaml" for folder in SHIPPED)]
    for candidate in places[:1] if Path(name).parent != Path(".") else places:
        if candidate.is_file():
            return candidate
    close = difflib.get_close_matches(Path(name).stem, shipped_names(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"shipped: {', '.join(shipped_names())}"
    raise UserError(f"config {name}: no such file; {hint}")


def load_config(
    source: Path | str | dict[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Load a configuration and apply `key.path=value` overrides.

    source: a YAML file, the bare name of a shipped config, a plain tree, or None for the defaults.
    Raises UserError with one line per mistake.
    """
    tree: Any = copy.deepcopy(source) if isinstance(source, dict) else {}
    if isinstance(source, (str, Path)):
        path = find_config(source) if isinstance(source, str) else source
        tree = read_yaml(path)
        tree = {} if tree is None else tree
        if not isinstance(tree, dict):
            raise UserError(f"{path}: expected `section: {{field: value}}`, got {shown(tree)}")
    apply_overrides(tree, overrides)
    talks = apply_chat_defaults(tree)
    if isinstance(tree.get("train"), dict) and tree["train"].get("init_from"):
        inherit_config(tree, str(tree["train"]["init_from"]))
    apply_finetune_defaults(tree, talks)
    return validate(Config, tree)


def validate[Tree: Sections](model: type[Tree], tree: dict[str, Any]) -> Tree:
    """Validate a plain tree. Raises UserError with one line per mistake."""
    fill_names(tree, model)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        # A field such as `int | "auto"` has an error for each alternative: show the first.
        lines = {locate(located(e)["loc"])[0]: explain(e, tree) for e in reversed(error.errors())}
        raise UserError(*chain.from_iterable(reversed(lines.values()))) from None


def fill_names(tree: dict[str, Any], model: type[BaseModel]) -> None:
    """Set `name` of each section with variants that has none, to its default variant."""
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


def explain(error: Problem, tree: dict[str, Any]) -> list[str]:
    """The message lines of one validation error; an unknown section may have several."""
    error = located(error)
    where, model = locate(error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_key(where, error["input"], list(model.model_fields) if model else [], tree)
    return [explain_value(error, where)]


def unknown_key(where: str, given: object, names: Sequence[str], tree: dict[str, Any]) -> list[str]:
    """The message lines for an unknown path: the right key from the aliases, or else a close match.

    given: its value; each key of an unknown section gets a line. names: of its sibling fields.
    """
    known, chosen = known_fields(), chosen_variants(tree)
    lines: dict[str, str] = {}
    for path in islice(paths_of(given, where), 100):
        twins = same_name(path, known)
        if answer := right_key(path, known, chosen):
            lines[path] = answer
        elif path != where and len(twins) == 1:
            lines[path] = f"no such field; did you mean {twins[0]}?"
        elif path != where and (answer := right_key(where, known, chosen)):
            lines[where] = answer
        else:
            lines[path] = "no such field"
    if set(lines.values()) != {"no such field"}:
        return [f"{path}: {answer}" for path, answer in lines.items()]
    return [f"{where}: no such field; {nearest(where, names, known)}"]


def nearest(where: str, names: Sequence[str], known: Known) -> str:
    """A suggestion for an unknown path that the aliases lack."""
    key, twins = where.split(".")[-1], same_name(where, known)
    close = difflib.get_close_matches(key, names, n=1)
    if known.get(where):
        return f"it belongs to {where.removesuffix(key)}name={next(iter(known[where]))}"
    if close and len(twins) != 1:
        return f"did you mean {'.'.join([*where.split('.')[:-1], close[0]])}?"
    if twins:
        return f"did you mean {' or '.join(twins[:3])}?"
    return f"there are {', '.join(names)}"


@functools.cache
def known_fields() -> Known:
    """Every field's dotted path -> the variants that have it; for a `name`, all of its section."""
    known: dict[str, dict[str, None]] = {}
    for path, field, variant in fields(Config):
        tags = get_args(field.annotation) if path.endswith(".name") else (variant,)
        known.setdefault(path, {}).update({tag: None for tag in tags if isinstance(tag, str)})
    return {path: tuple(tags) for path, tags in known.items()}


def chosen_variants(tree: dict[str, Any]) -> dict[str, str]:
    """The variant of each section, from the tree or the default; for `optim` only from the tree."""
    chosen: dict[str, str] = {}
    default = Config().model_dump(exclude={"optim"})
    for section in (
        path.removesuffix(".name") for path in known_fields() if path.endswith(".name")
    ):
        for node in (default, tree):
            for part in section.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if isinstance(node, dict) and isinstance(node.get("name"), str):
                chosen[section] = node["name"]
    return chosen


def explain_value(error: Problem, where: str) -> str:
    """The message line for an invalid value of a field."""
    given = error["input"]
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        allowed = error["ctx"].get("expected_tags", "")
        if not allowed:
            return f"{where}.name: field required, it says which variant this is; see --help"
        return f"{where}.name: got {shown(error['ctx']['tag'])}, allowed are {allowed}"
    if error["type"] in ("model_type", "model_attributes_type"):
        return (
            f"{where}: got {without_secrets(given)}, but it is a section: set its fields, "
            f"{where}.KEY=value"
        )
    if error["type"] == "tuple_type":
        return f"{where}: got {shown(given)}, but it is a list: {where}='[..., ...]'"
    message = error["msg"].removeprefix("Value error, ")
    got = "" if isinstance(given, (dict, BaseModel)) else f"got {without_secrets(given)}: "
    return f"{where}: {got}{message[0].lower() + message[1:]}"


def without_secrets(value: object) -> str:
    """A value as shown in messages, without user, password and query of a URL in it."""
    return SECRETS.sub(lambda found: (found[1] or found[2]) + "...", shown(value))


def located(error: Problem) -> Problem:
    """The error with the location of its field; an error raised by `Settings` names it in `ctx`."""
    if error["type"] != NOT_MEANT:
        return error
    name = error["ctx"]["field"]
    return {**error, "loc": (*error["loc"], name), "input": error["input"][name]}


def locate(
    loc: tuple[Any, ...], root: type[BaseModel] = Config
) -> tuple[str, type[BaseModel] | None]:
    """A pydantic location as a dotted path (without union tags), and the model that contains it."""
    model: type[BaseModel] | None = root
    path: list[str] = []
    name, keyed = "", False  # the current field; whether the index into its list is consumed
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
            break  # `part` is the union alternative that was tried, such as int of int | "auto"
        if len(variants) == 1:
            model = variants[0]
        path.append(str(part))
        name, keyed = str(part), False
    return ".".join(path), model


# ---- output ----------------------------------------------------------------------------------


def to_yaml(config: BaseModel) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def save_yaml(path: Path, config: BaseModel) -> None:
    """Write a configuration atomically; YAML's end marker shows that the file is complete."""
    write_whole(path, to_yaml(config) + END)


def json_schema() -> str:
    """The JSON schema, with which editors complete and check the YAML files."""
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"

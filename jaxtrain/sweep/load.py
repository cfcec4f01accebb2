"""SWEEP.yaml with overrides, checked against the configuration of its runs before anything runs."""

import difflib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from jaxtrain.config import Config, load_config
from jaxtrain.config.load import explain_value, find_config, locate, located
from jaxtrain.config.overrides import apply_overrides, check_once, parse_override
from jaxtrain.settings import UserError
from jaxtrain.storage.strict_yaml import read_yaml, shown
from jaxtrain.sweep.config import IntRange, LogUniform, Parameter, Scalar, SweepConfig, Uniform
from jaxtrain.train.field_help import FOLDERS

Values = dict[str, Scalar]  # field of the configuration -> its value in a trial
OURS = ("run.name", "run.directory", "run.seed", "data.seed")  # the sweep sets them


def find_sweep(name: str) -> Path:
    """Path of a sweep: the path given, or the bare name of a shipped sweep."""
    shipped = {path.stem: path for folder in FOLDERS for path in folder.glob("sweeps/*.yaml")}
    if Path(name).is_file():
        return Path(name)
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(Path(name).stem, shipped, n=1)
    hint = f"did you mean {near[0]}?" if near else f"shipped: {', '.join(sorted(shipped))}"
    raise UserError(f"{name}: no such file; {hint}")


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Load the sweep of a file. `trials=40` overrides a field of it, `train.steps=200` of its runs.

    Raises UserError with a line for each thing that is wrong.
    """
    tree: Any = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `field: value`, got {shown(tree)}")
    check_once(overrides)
    own = [(parse_override(o), o) for o in overrides if is_own(o)]
    apply_overrides(tree, [o for one, o in own if one.key != "name"])
    for one, _ in own:
        if one.key == "name":  # the sweep's name; other `name` keys choose a variant
            tree["name"] = one.value
    runs = [o for o in overrides if not is_own(o)]
    if runs:
        tree["overrides"] = [*without(tree.get("overrides") or [], runs), *runs]
    for key, default in (("sampler", "tpe"), ("pruner", "none")):
        if isinstance(tree.get(key), dict):
            tree[key].setdefault("name", default)
    tree["name"] = tree.get("name") or path.stem
    try:
        c = SweepConfig.model_validate(tree)
    except ValidationError as error:
        lines = {explained(dict(e)): None for e in error.errors()}
        raise UserError(*(f"{path}: {line}" for line in lines)) from None
    check_parameters(c)
    return c


def is_own(override: str) -> bool:
    """Whether an override is for the sweep, not for its runs."""
    key = parse_override(override).key
    return key.split(".")[0] in SweepConfig.model_fields or (
        "." not in key and key not in Config.model_fields
    )


def without(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Overrides whose field no later one sets."""
    keys = {parse_override(o).key for o in later}
    return [o for o in overrides if parse_override(o).key not in keys]


def explained(error: dict[str, Any]) -> str:
    """One line for a validation error."""
    found = located(error)
    where, model = locate(found["loc"], SweepConfig)
    if found["type"] == "missing":
        return f"{where}: it is missing"
    if found["type"] == "extra_forbidden":
        names = list((model or SweepConfig).model_fields)
        near = difflib.get_close_matches(where.rpartition(".")[2], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        return f"{where}: no such field; {hint}"
    line = explain_value(found, where)
    return line.removeprefix(": ")


def check_parameters(c: SweepConfig) -> None:
    """Raise UserError for a parameter or an override that no run could have."""
    find_config(c.config)
    larger = c.transfer.overrides if c.transfer else ()
    given = {parse_override(o).key for o in (*c.overrides, *larger)}
    for key in (*c.parameters, *given):
        if key in OURS:
            raise UserError(f"{key}: the sweep sets it for each run; leave it out")
    if twice := sorted(given & c.parameters.keys()):
        raise UserError(f"parameters.{twice[0]}: overrides also sets it; keep one of the two")
    base_config(c)
    if larger:
        run_config(c, {}, "check", 1, larger)
    for key, parameter in c.parameters.items():
        for value in extremes(parameter):
            run_config(c, {key: value}, "check", 1)
    if c.pruner.name != "none" and base_config(c).eval.every is None:
        raise UserError(
            f"pruner.name={c.pruner.name} compares validations during a run, but eval.every is "
            "null: set it, for example by overrides: [eval.every=100]"
        )
    if c.sampler.name == "grid":
        grid_points(c.parameters)


def base_config(c: SweepConfig) -> Config:
    """The configuration of the runs, without the parameters of a trial."""
    return load_config(c.config, c.overrides)


def run_config(
    c: SweepConfig, values: Values, name: str, seed: int, larger: Sequence[str] = ()
) -> Config:
    """Configuration of one run. larger: overrides for another size than the sweep's."""
    own = {"run.directory": str(c.folder), "run.name": name, "run.seed": seed, "data.seed": seed}
    more = [override_text(key, value) for key, value in (values | own).items()]
    return load_config(c.config, [*without(c.overrides, larger), *larger, *more])


def override_text(key: str, value: Scalar) -> str:
    """`key=value` such that YAML reads the value back: it would read 1e-05 as a string."""
    return f"{key}={re.sub(r'^(-?[0-9]+)e', r'\1.0e', json.dumps(value))}"


def extremes(parameter: Parameter) -> Sequence[Scalar]:
    """The ends of a range, or all values of a choice."""
    if isinstance(parameter, (Uniform, LogUniform, IntRange)):
        return parameter.low, parameter.high
    return parameter.values


def values_of(key: str, parameter: Parameter) -> Sequence[Scalar]:
    """Values of a parameter in a grid."""
    if isinstance(parameter, IntRange):
        return range(parameter.low, parameter.high + 1, parameter.step)
    if isinstance(parameter, (Uniform, LogUniform)):
        if parameter.points is None:
            raise UserError(
                f"parameters.{key}.points: sampler.name=grid needs the number of values of a range"
            )
        space = np.geomspace if isinstance(parameter, LogUniform) else np.linspace
        inner = space(parameter.low, parameter.high, parameter.points)[1:-1]
        return parameter.low, *(float(f"{x:.6g}") for x in inner), parameter.high
    return parameter.values


def grid_points(parameters: dict[str, Parameter]) -> list[Values]:
    """Every combination of values, the last parameter fastest."""
    found = [values_of(key, parameter) for key, parameter in parameters.items()]
    return [dict(zip(parameters, point)) for point in itertools.product(*found)]

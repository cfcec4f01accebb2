"""Files of a study: fit.json (the fits) and prediction.json (the held-out prediction)."""

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxtrain.config.scaling_fit import Dial
from jaxtrain.runs.environment import commit
from jaxtrain.scaling.fit import (
    Fits,
    Prediction,
    bootstrap_parametric,
    fit_all,
    grid_of,
    plain,
    predict,
)
from jaxtrain.scaling.laws import Bootstrap, Interval
from jaxtrain.scaling.plan import PlannedRun
from jaxtrain.scaling.points import Point
from jaxtrain.scaling.study import Counting
from jaxtrain.settings import UserError, read_object
from jaxtrain.storage.disk import write_json


def write_prediction(
    path: Path, run: PlannedRun, points: Sequence[Point], bootstrap: Bootstrap
) -> None:
    """Write the prediction of the held-out run, with the time. Raises UserError if that run has
    begun already."""
    if (path.parent / run.name / "metrics.jsonl").exists():
        raise UserError(
            f"{path.parent / run.name} has begun and there is no {path.name}: a prediction comes "
            "first; delete that run to have it predicted and trained"
        )
    grid = grid_of(points)
    if any(p.flops >= run.flops for p in grid):
        raise UserError(
            f"held_out: {run.name} has {run.flops:.3g} FLOPs, not more than the other runs; give "
            "it a larger budget"
        )
    fit = bootstrap_parametric(grid, bootstrap)
    found = predict(fit, grid, run.name, run.parameters, run.tokens, run.flops, bootstrap)
    write_json(path, {"when": now(), "commit": commit(), **plain(found)})


def read_prediction(path: Path) -> tuple[Prediction, str] | None:
    """The prediction and the time it was made; None if there is no file."""
    if not path.is_file():
        return None
    tree = read_object(path)
    try:
        loss = Interval(*(tree["loss"][name] for name in Interval._fields))
        rest = [tree[name] for name in ("run", "parameters", "tokens", "flops")]
        one = Prediction(*rest, loss=loss, level=tree["level"], runs=tree["runs"])
        return one, tree["when"]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not a prediction: {error} is missing or wrong") from error


def record_of(
    points: Sequence[Point],
    counting: Counting,
    measure: str,
    bootstrap: Bootstrap,
    targets: int,
    facts: dict[str, Any],
    held_out: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], Fits]:
    """The content of fit.json, and the fits. facts: entries about the study."""
    fits = fit_all(points, targets, bootstrap)
    dial = dial_of(fits, counting, facts)
    tree = {
        "what": "jaxtrain scaling fit",
        "when": now(),
        "commit": commit(),
        "command": shlex.join(["jaxtrain", *sys.argv[1:]]),
        **facts,
        "measure": measure,
        "parameters": counting,
        "intervals": plain(bootstrap),
        "dial": dial.model_dump(mode="json") if dial else None,
        "fits": plain(fits),
        "held_out": held_out,
        "runs": [plain(p) for p in points],
    }
    return tree, fits


def held_out_of(
    prediction: tuple[Prediction, str] | None, point: Point | None
) -> dict[str, Any] | None:
    """Prediction and outcome of the held-out run."""
    if prediction is None:
        return None
    one, when = prediction
    found: dict[str, Any] = {"when": when, "prediction": plain(one), "loss": None, "inside": None}
    if point is not None:
        found |= {"loss": point.loss, "inside": one.loss.holds(point.loss)}
    return found


def dial_of(fits: Fits, counting: Counting, facts: dict[str, Any]) -> Dial | None:
    """Settings of the depth dial from the fits. None if they give no tokens-per-parameter ratio by
    the dial's own parameter count."""
    if counting != "matrices_and_head":
        return None
    ratio = fits.isoflop.ratio if fits.isoflop else None
    method = "isoFLOP parabolas, geometric mean of the budgets"
    if ratio is None and fits.parametric:
        ratio = fits.parametric.optimal[-1].tokens_per_parameter
        method = f"parametric law at {fits.parametric.optimal[-1].flops:.3g} FLOPs"
    if ratio is None:
        return None
    laws = {
        "batch_tokens": fits.batch.best if fits.batch else None,
        "rate_multiplier": fits.learning_rate.best if fits.learning_rate else None,
    }
    if not facts.get("rates_derived"):  # multipliers of hand-set rates do not transfer
        laws["rate_multiplier"] = None
    trees = {
        name: {"coefficient": law.coefficient.value, "exponent": law.exponent.value}
        for name, law in laws.items() if law
    }  # fmt: skip
    plain_ratio = plain(ratio)
    return Dial.model_validate(
        {"name": facts.get("name", "runs"), "source": method, **trees}
        | {"tokens_per_parameter": plain_ratio}
    )


def now() -> str:
    """The current time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")

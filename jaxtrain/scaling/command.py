"""`jaxtrain scaling run STUDY.yaml`, `fit`, `plan` and `coordinates`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain import data
from jaxtrain.data.store.progress import show_progress
from jaxtrain.scaling.arguments import scaling_parser
from jaxtrain.scaling.fit import Fits
from jaxtrain.scaling.laws import Bootstrap
from jaxtrain.scaling.plan import PlannedRun, Planner, check_data, plan_text
from jaxtrain.scaling.points import Point, has_ended, point_of, with_budgets
from jaxtrain.scaling.record import (
    held_out_of,
    read_prediction,
    record_of,
    write_prediction,
)
from jaxtrain.scaling.report import summary_lines, write_fit_report
from jaxtrain.scaling.study import Counting, Study, find_study, load_study
from jaxtrain.settings import UserError, command
from jaxtrain.storage.disk import write_json
from jaxtrain.train.loop import train

PREDICTION = "prediction.json"


@command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after one line about what the user can fix."""
    a = scaling_parser().parse_intermixed_args(argv)
    overrides = tuple(word for word in a.target if "=" in word)
    targets = [word for word in a.target if "=" not in word]
    if a.stage == "coordinates":
        from jaxtrain.scaling.coordinates import check_coordinates

        return check_coordinates(one_of(targets, "a configuration"), overrides, a)
    if a.stage == "fit" and targets and Path(targets[0]).is_dir():
        return fit_runs([Path(word) for word in targets], a.parameters, a.out)
    study = load_study(find_study(one_of(targets, "a study")), overrides)
    if a.parameters:
        study = study.model_copy(update={"parameters": a.parameters})
    planner = Planner(study)
    if a.stage == "plan":
        runs = [*planner.runs(), *filter(None, [planner.held_out()])]
        done = {run.name for run in runs if has_ended(study.folder / run.name)}
        print(plan_text(study, runs, done))
        return 0
    return (run_study if a.stage == "run" else fit_study)(study, planner, a.out)


def one_of(targets: Sequence[str], what: str) -> str:
    if len(targets) != 1:
        raise UserError(f"scaling: give {what}, one file; there are {len(targets)}")
    return targets[0]


def run_study(study: Study, planner: Planner, out: Path | None) -> int:
    """Train the missing runs, fit, predict the held-out run, train it, fit again."""
    runs, held_out = planner.runs(), planner.held_out()
    check_tokens(study, planner, [*runs, *filter(None, [held_out])])
    for number, run in enumerate(runs, 1):
        if not train_one(planner, run, f"{number}/{len(runs)}"):
            return 0
    if held_out is None:
        return fit_study(study, planner, out)
    path = study.folder / PREDICTION
    if not path.exists():
        write_prediction(path, held_out, points_of(study, runs), bootstrap_of(study))
    found = read_prediction(path)
    assert found is not None
    loss = found[0].loss
    print(
        f"scaling  {found[1]}: {held_out.name} will have {study.measure} {loss.value:.4f} "
        f"({loss.low:.4f} to {loss.high:.4f}, {found[0].level:.0%}); {path}"
    )
    if not train_one(planner, held_out, "held-out"):
        return 0
    return fit_study(study, planner, out)


def train_one(planner: Planner, run: PlannedRun, number: str) -> bool:
    """Train or resume a run; returns False if a signal stopped it."""
    folder = planner.study.folder / run.name
    if has_ended(folder):
        return True
    print(
        f"scaling  {number} {run.name}: {run.parameters:,.0f} parameters, {run.tokens:,} tokens, "
        f"{run.flops:.3g} FLOPs",
        flush=True,
    )
    result = train(planner.config(run))
    if result.stopped:
        print("scaling  stopped; the same command resumes")
        return False
    if not has_ended(folder):
        raise UserError(f"{folder}: the run ended without a validation loss")
    return True


def check_tokens(study: Study, planner: Planner, runs: Sequence[PlannedRun]) -> None:
    """Prepare the data. Raises UserError for a run that needs too many epochs."""
    config = planner.config(runs[0]).data
    with show_progress(data_console()) as progress:
        prepared = data.prepare(config, progress=progress)
    stores = data.stores_of(prepared.train).values()
    check_data(study, runs, sum(store.tokens for store in stores))


def data_console() -> Any:
    from rich.console import Console

    return Console()


def points_of(study: Study, runs: Sequence[PlannedRun]) -> list[Point]:
    """The finished runs of a study."""
    there = [run for run in runs if has_ended(study.folder / run.name)]
    return [
        point_of(study.folder / run.name, study.measure, study.parameters, run) for run in there
    ]


def bootstrap_of(study: Study) -> Bootstrap:
    one = study.intervals
    return Bootstrap(one.samples, one.level, one.seed)


def fit_study(study: Study, planner: Planner, out: Path | None) -> int:
    """Fit the finished runs of a study."""
    runs, held_out = planner.runs(), planner.held_out()
    points = points_of(study, runs)
    ends = points_of(study, [held_out]) if held_out else []
    prediction = read_prediction(study.folder / PREDICTION)
    optim = planner.config(runs[0]).optim.model_dump()
    facts = {
        "name": study.name,
        "study": study.model_dump(mode="json"),
        "missing_runs": [run.name for run in runs if run.name not in {p.name for p in points}],
        "rates_derived": all(v is None for k, v in optim.items() if k.endswith("_lr"))
        and any(k.endswith("_lr") for k in optim),
    }
    targets = study.batch_sizes.targets if study.batch_sizes else 2
    outcome = held_out_of(prediction, ends[0] if ends else None)
    tree, fits = record_of(
        points,
        study.parameters,
        study.measure,
        bootstrap_of(study),
        targets,
        facts,
        outcome,
    )
    return write_all(out or study.folder, tree, points, fits)


def fit_runs(run_dirs: Sequence[Path], counting: Counting | None, out: Path | None) -> int:
    """Fit run directories that do not belong to a study."""
    of = counting or "matrices_and_head"
    points = with_budgets([point_of(one, "loss", of) for one in run_dirs])
    tree, fits = record_of(points, of, "loss", Bootstrap(), 2, {"name": "runs"})
    return write_all(out or Path("scaling"), tree, points, fits)


def write_all(folder: Path, tree: dict[str, Any], points: Sequence[Point], fits: Fits) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "fit.json", tree)
    page = write_fit_report(folder / "scaling.html", tree, points, fits)
    print("\n".join(summary_lines(tree, fits)))
    print(f"scaling  {folder / 'fit.json'}, {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The settings of a scaling-law study, a YAML file."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from jaxtrain.config import find_config
from jaxtrain.settings import Settings, UserError
from jaxtrain.storage.strict_yaml import read_yaml

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
# Conventions of counting parameters; see `scaling.plan.model_counts`.
Counting = Literal["matrices_and_head", "matrices", "without_embeddings", "total"]


class ModelSize(Settings):
    """A model size in the study."""

    depth: int = Field(ge=1, description="number of layers")
    width: int | None = Field(
        None, ge=1, description="model dimension; default that of the depth dial"
    )


class IsoFLOP(Settings):
    """Runs with equal training FLOPs and different sizes (Hoffmann et al. 2022, approach 2)."""

    budgets: tuple[Positive, ...] = Field(min_length=1, description="training FLOPs per run")
    sizes: tuple[ModelSize, ...] = Field(min_length=1, description="models to train at each budget")


class Tokens(Settings):
    """A grid of runs: each size with each number of training tokens."""

    sizes: tuple[ModelSize, ...] = Field(min_length=1, description="model sizes")
    tokens: tuple[Positive, ...] = Field(min_length=1, description="training tokens per run")


class LearningRates(Settings):
    """Runs with different learning rates, to find the best one for each size."""

    sizes: tuple[ModelSize, ...] = Field(min_length=1, description="model sizes")
    multipliers: tuple[Positive, ...] = Field(
        min_length=3, description="factors on all learning rates of the configuration"
    )
    flops: Positive | None = Field(None, description="training FLOPs per run")
    tokens: Positive | None = Field(None, description="training tokens per run")
    tokens_per_parameter: Positive | None = Field(
        None, description="training tokens per parameter, as counted by the study's `parameters`"
    )

    @model_validator(mode="after")
    def _has_one_length(self) -> "LearningRates":
        check_run_length(self)
        return self


class BatchSizeGrid(Settings):
    """Runs with different batch sizes, to find the best one and the critical batch size
    (McCandlish et al. 2018, arXiv:1812.06162)."""

    size: ModelSize = Field(description="model size")
    tokens: tuple[Positive, ...] = Field(
        min_length=1,
        description="training tokens per run; the critical batch size is taken from the longest "
        "runs",
    )
    batch_sizes: tuple[Count, ...] = Field(
        min_length=3, description="batch sizes, in sequences per step"
    )
    multipliers: tuple[Positive, ...] = Field(
        (1.0,), min_length=1,
        description="factors on the learning rates, tried at each batch size; the best one counts",
    )  # fmt: skip
    rate_power: float = Field(
        0.5,
        ge=0,
        le=1,
        description="power of the learning rates: they grow with (batch size / the first "
        "one)^rate_power",
    )
    evaluations: int = Field(16, ge=4, description="validations during each run")
    targets: int = Field(
        4,
        ge=2,
        description="number of target losses, between the runs' final losses, at which runs are "
        "compared",
    )
    overrides: tuple[str, ...] = Field(
        (),
        description="key.path=value overrides of these runs only, such as a constant learning rate",
    )


class HeldOut(Settings):
    """A run larger than the others, whose loss is predicted before it is trained."""

    size: ModelSize = Field(description="model size")
    flops: Positive | None = Field(None, description="training FLOPs of the run")
    tokens: Positive | None = Field(None, description="training tokens of the run")
    tokens_per_parameter: Positive | None = Field(
        None, description="training tokens per parameter, as counted by the study's `parameters`"
    )

    @model_validator(mode="after")
    def _has_one_length(self) -> "HeldOut":
        check_run_length(self)
        return self


class Intervals(Settings):
    """Bootstrap confidence intervals: percentiles over resamples of the runs."""

    samples: int = Field(500, ge=10, le=100_000, description="number of resamples")
    level: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="confidence level: fraction of the resamples inside the interval",
    )
    seed: int = Field(0, ge=0, description="seed of the resamples")


class Study(Settings):
    """A scaling-law study."""

    name: str = Field(
        min_length=1, pattern=r"^[\w.-]+$", description="name of the study, and of its folder"
    )
    directory: str = Field("runs", description="folder that contains the study's folder")
    config: str = Field(
        description="configuration of the runs: a YAML file or a shipped config's name"
    )
    overrides: tuple[str, ...] = Field((), description="key.path=value overrides of all runs")
    seeds: tuple[int, ...] = Field(
        (42,), min_length=1, description="run.seed values; each run is repeated with each of them"
    )
    measure: Literal["loss", "bpb"] = Field(
        "loss", description="validation metric: loss in nats per token, or bits per byte"
    )
    parameters: Counting = Field(
        "matrices_and_head",
        description="parameters that are counted; matrices_and_head: as nanochat counts; "
        "without_embeddings: also norm gains and scalars",
    )
    isoflop: IsoFLOP | None = Field(None, description="grid of FLOP budgets and sizes")
    tokens: Tokens | None = Field(None, description="grid of training tokens and sizes")
    learning_rates: LearningRates | None = Field(
        None, description="runs that find the best learning rate"
    )
    batch_sizes: BatchSizeGrid | None = Field(
        None, description="runs that find the critical batch size"
    )
    held_out: HeldOut | None = Field(None, description="larger run, whose loss is predicted")
    intervals: Intervals = Field(
        default_factory=lambda: Intervals.model_validate({}),
        description="bootstrap confidence intervals",
    )
    least_steps: int = Field(
        50, ge=1, description="minimum steps of a run; a budget that gives fewer is an error"
    )
    most_epochs: float = Field(
        1.0, gt=0, description="maximum passes over the training data per run"
    )
    flops_per_s: Positive | None = Field(
        None, description="FLOPs per second, for the estimated run times; default unknown"
    )

    @property
    def folder(self) -> Path:
        """The folder of the runs, the fit and the page."""
        return Path(self.directory) / self.name

    @model_validator(mode="after")
    def _has_runs(self) -> "Study":
        if not any((self.isoflop, self.tokens, self.learning_rates, self.batch_sizes)):
            raise ValueError("a study has runs: set isoflop, tokens, learning_rates or batch_sizes")
        if self.held_out and not (self.isoflop or self.tokens):
            raise ValueError("held_out is predicted from isoflop or tokens: set one of them")
        return self


def check_run_length(one: LearningRates | HeldOut) -> None:
    """Raise ValueError unless exactly one of flops, tokens and tokens_per_parameter is set."""
    given = (one.flops, one.tokens, one.tokens_per_parameter)
    if sum(value is not None for value in given) != 1:
        raise ValueError("set one of flops, tokens and tokens_per_parameter")


def find_study(name: str) -> Path:
    """A path, or the bare name of a shipped study."""
    here = Path(__file__).parents[1]
    folders = [here / "configs" / "scaling", here.parent / "configs" / "scaling"]
    for candidate in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if candidate.is_file():
            return candidate
    shipped = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise UserError(f"{name}: no such study; give a YAML file, or one of {', '.join(shipped)}")


def load_study(path: Path, overrides: tuple[str, ...] = ()) -> Study:
    """Load a study from a YAML file. overrides: key.path=value of all runs, after the study's own.

    Raises UserError with one line per mistake.
    """
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `field: value`, as in `name: mine`")
    tree = {"name": path.stem, **tree}
    try:
        study = Study.model_validate(tree)
    except ValidationError as error:
        raise UserError(*(study_error(path, one) for one in error.errors())) from None
    find_config(study.config)
    return study.model_copy(update={"overrides": (*study.overrides, *overrides)})


def study_error(path: Path, error: ErrorDetails) -> str:
    """The error line of one validation error."""
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{path}: {where}: no such field; {section_fields(error['loc'])}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{path}: {where or 'the study'}: {message[0].lower()}{message[1:]}"


def section_fields(loc: tuple[Any, ...]) -> str:
    """The valid keys of the section that has an unknown key."""
    sections: dict[Any, type[Settings]] = {
        "isoflop": IsoFLOP, "tokens": Tokens, "learning_rates": LearningRates,
        "batch_sizes": BatchSizeGrid, "held_out": HeldOut, "intervals": Intervals,
    }  # fmt: skip
    inner = {"size", "sizes"} & set(loc[:-1])
    model = ModelSize if inner else sections.get(loc[0], Study) if len(loc) > 1 else Study
    return f"there are {', '.join(model.model_fields)}"

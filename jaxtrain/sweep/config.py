"""Schema of SWEEP.yaml: parameters, sampler, pruner, objectives and number of trials."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from jaxtrain.runs.config import RunConfig
from jaxtrain.settings import Settings

Scalar = bool | int | float | str | None
Metric = Literal[
    "bpb", "loss", "perplexity", "accuracy", "reward_margin", "seconds", "peak_bytes",
    "tokens_per_s",
]  # fmt: skip
Direction = Literal["minimize", "maximize"]
OF_VALIDATION = ("bpb", "loss", "perplexity", "accuracy", "reward_margin")
MAXIMIZED = ("accuracy", "reward_margin", "tokens_per_s")


# ---- parameters --------------------------------------------------------------------------------


class _Range(Settings):
    """A range of floats, both ends included."""

    low: float = Field(description="least value")
    high: float = Field(description="greatest value")
    points: int | None = Field(
        None, ge=2, description="values that the sampler `grid` takes of the range, evenly spaced"
    )

    @model_validator(mode="after")
    def _is_a_range(self) -> "_Range":
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self


class Uniform(_Range):
    """A float, uniform between two ends."""

    name: Literal["uniform"] = "uniform"


class LogUniform(_Range):
    """A float whose logarithm is uniform, as for learning rates."""

    name: Literal["log_uniform"] = "log_uniform"

    @model_validator(mode="after")
    def _is_above_zero(self) -> "LogUniform":
        if self.low <= 0:
            raise ValueError(f"low ({self.low:g}) must be above 0")
        return self


class IntRange(Settings):
    """A whole number between two ends, both included."""

    name: Literal["int"] = "int"
    low: int = Field(description="least value")
    high: int = Field(description="greatest value")
    step: int = Field(1, ge=1, description="distance of two values")

    @model_validator(mode="after")
    def _is_a_range(self) -> "IntRange":
        if not self.low < self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        if (self.high - self.low) % self.step:
            raise ValueError(f"high - low ({self.high - self.low}) must be a multiple of step")
        return self


class Choice(Settings):
    """One of several values, without an order."""

    name: Literal["choice"] = "choice"
    values: tuple[Scalar, ...] = Field(
        min_length=1, description="numbers, texts, true, false, null"
    )


Parameter = Annotated[Uniform | LogUniform | IntRange | Choice, Field(discriminator="name")]


# ---- samplers and pruners ----------------------------------------------------------------------


class _Sampler(Settings):
    seed: int = Field(0, ge=0, description="of the sampler; trial n depends on it and on n")


class GridSearch(_Sampler):
    """Every combination of the parameters' values."""

    name: Literal["grid"] = "grid"


class RandomSearch(_Sampler):
    """Independent draws."""

    name: Literal["random"] = "random"


class TPE(_Sampler):
    """Tree-structured Parzen estimator (Bergstra et al. 2011); several objectives: Ozaki et al."""

    name: Literal["tpe"] = "tpe"
    startup_trials: int = Field(10, ge=1, description="random trials before the model is used")
    multivariate: bool = Field(True, description="model the parameters jointly")


class GP(_Sampler):
    """Gaussian process with expected improvement; needs the package torch."""

    name: Literal["gp"] = "gp"
    startup_trials: int = Field(10, ge=1, description="random trials before the model is used")


class CMAES(_Sampler):
    """Covariance matrix adaptation (Hansen); numbers only, choices are drawn at random."""

    name: Literal["cmaes"] = "cmaes"


class NSGA2(_Sampler):
    """NSGA-II (Deb et al. 2002), for several objectives."""

    name: Literal["nsga2"] = "nsga2"
    population_size: int = Field(20, ge=2, description="trials of a generation")


Sampler = Annotated[
    GridSearch | RandomSearch | TPE | GP | CMAES | NSGA2, Field(discriminator="name")
]


class NoPruning(Settings):
    """Each trial runs to its end."""

    name: Literal["none"] = "none"


class ASHA(Settings):
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934)."""

    name: Literal["asha"] = "asha"
    min_steps: int = Field(ge=1, description="training steps before the first rung")
    reduction_factor: int = Field(
        4, ge=2, description="one of so many trials passes a rung; the next has so many times steps"
    )


class Hyperband(Settings):
    """Hyperband (Li et al. 2018, arXiv:1603.06560): brackets of successive halving."""

    name: Literal["hyperband"] = "hyperband"
    min_steps: int = Field(ge=1, description="training steps before the first rung")
    max_steps: int = Field(ge=2, description="training steps of a whole run")
    reduction_factor: int = Field(
        3, ge=2, description="one of so many trials passes a rung; the next has so many times steps"
    )


class MedianStopping(Settings):
    """Stop a trial that is worse than the median of the others at the same step (Vizier)."""

    name: Literal["median"] = "median"
    startup_trials: int = Field(5, ge=1, description="trials that run to their end first")
    warmup_steps: int = Field(0, ge=0, description="training steps that are never too few")


Pruner = Annotated[NoPruning | ASHA | Hyperband | MedianStopping, Field(discriminator="name")]


# ---- the sweep ---------------------------------------------------------------------------------


class Goal(Settings):
    """A metric of a run, and the direction in which it improves."""

    metric: Metric = Field(
        "bpb",
        description="of the last validation: bpb (bits per byte), loss (nats per token), "
        "perplexity, accuracy, reward_margin; of the run: seconds (of training, without "
        "validations), tokens_per_s (median), peak_bytes (of the fullest device)",
    )
    direction: Direction | None = Field(
        None, description="default: the metric's own (maximize accuracy, margin and tokens/s)"
    )

    @property
    def maximize(self) -> bool:
        """Whether more is better."""
        return (self.direction or self._usual) == "maximize"

    @property
    def _usual(self) -> Direction:
        return "maximize" if self.metric in MAXIMIZED else "minimize"


class Confirm(Settings):
    """Run the best trials again, on seeds that the search has not used."""

    best: int = Field(3, ge=1, description="trials that are run again")
    seeds: int = Field(3, ge=2, description="fresh seeds of each, the same for all of them")
    baseline: bool = Field(
        True, description="also run the configuration as it is without the sweep's parameters"
    )


class Transfer(Settings):
    """Run trials of the search again, on fresh seeds, at its own size and at another one."""

    overrides: tuple[str, ...] = Field(
        min_length=1,
        description="key.path=value of the other size, in the place of the sweep's own overrides",
    )
    best: int = Field(4, ge=1, description="of the best trials, so many")
    spread: int = Field(4, ge=0, description="of the others, so many, evenly over their ranks")
    single: bool = Field(
        True, description="also each value of the best trial by itself, the rest as it was"
    )
    seeds: int = Field(2, ge=2, description="fresh seeds of each, the same for all and both sizes")


class SweepConfig(Settings):
    """A sweep."""

    name: str = Field("", description="folder inside `directory`; default the file's name")
    directory: str = Field("runs", min_length=1, description="folder that holds the sweep's folder")
    config: str = Field(description="configuration of the runs: a YAML file or a shipped name")
    overrides: tuple[str, ...] = Field((), description="key.path=value, for all runs")
    parameters: dict[str, Parameter] = Field(
        min_length=1, description="fields of the configuration, and what values they may have"
    )
    sampler: Sampler = Field(
        default_factory=lambda: TPE.model_validate({}), description="what chooses the values"
    )
    pruner: Pruner = Field(default_factory=NoPruning, description="what stops bad trials early")
    objectives: tuple[Goal, ...] = Field(
        default_factory=lambda: (Goal.model_validate({}),),
        min_length=1,
        description="figures to improve; of several, the Pareto front",
    )
    trials: int | None = Field(
        None, ge=1, description="sets of values that are tried; a grid has as many as it has points"
    )
    seeds: int = Field(
        1,
        ge=1,
        description="runs of a trial, with run.seed and data.seed 1, 2, ...: the same for all "
        "trials (paired); the mean counts",
    )
    confirm: Confirm | None = Field(
        None, description="run the best again on fresh seeds; default no. One objective only"
    )
    transfer: Transfer | None = Field(
        None,
        description="run trials again at another size, to see what carries over; default no. One "
        "objective only",
    )
    population: int = Field(
        1,
        ge=1,
        description="trials that train at once on one device as one program (vmap); their "
        "parameters are the optimizer's rates alone",
    )
    workers: int = Field(1, ge=1, description="processes of this command that run trials")
    isolate: bool = Field(
        False,
        description="each trial in a process of its own, as the metric peak_bytes needs it: slower "
        "to start, and its memory is given back",
    )
    storage: str | None = Field(
        None,
        description="database of the study, as postgresql://..., for hosts that share no local "
        "disk; default SQLite in the sweep's folder",
    )
    heartbeat: float = Field(
        15.0,
        gt=0,
        description="seconds between signs of life of a worker; after four without one, its trial "
        "is queued again",
    )

    @field_validator("name")
    @classmethod
    def _is_a_folder(cls, name: str) -> str:
        return RunConfig.model_validate({"name": name}).name if name else name

    @model_validator(mode="after")
    def _goes_together(self) -> "SweepConfig":
        if self.sampler.name == "grid" and self.trials is not None:
            raise ValueError(
                "trials: leave it out; sampler.name=grid runs one trial per grid point"
            )
        if self.sampler.name != "grid" and self.trials is None:
            raise ValueError(f"trials: sampler.name={self.sampler.name} needs their number")
        if self.sampler.name == "nsga2" and len(self.objectives) < 2:
            raise ValueError("sampler.name=nsga2 needs several objectives; use tpe")
        if self.sampler.name == "cmaes" and len(self.objectives) > 1:
            raise ValueError("sampler.name=cmaes supports one objective; use tpe or nsga2")
        if self.pruner.name != "none":
            if len(self.objectives) > 1:
                raise ValueError(
                    "pruner: several objectives cannot be pruned; set pruner.name=none"
                )
            if self.goal.metric not in OF_VALIDATION:
                metric = self.goal.metric
                raise ValueError(f"pruner: it compares validation metrics, and {metric} is not one")
            if self.population > 1:
                raise ValueError(
                    "pruner: trials of a population end together; set pruner.name=none"
                )
        if self.population > 1 and any(g.metric not in OF_VALIDATION for g in self.objectives):
            raise ValueError("population: time and memory are measured for all its trials together")
        if (self.confirm or self.transfer) and len(self.objectives) > 1:
            raise ValueError(f"{'confirm' if self.confirm else 'transfer'}: it needs one objective")
        if len({goal.metric for goal in self.objectives}) < len(self.objectives):
            raise ValueError("objectives: a metric is named twice")
        return self

    @property
    def goal(self) -> Goal:
        """The first objective."""
        return next(iter(self.objectives))

    @property
    def folder(self) -> Path:
        """Folder of the sweep."""
        return Path(self.directory) / self.name

    @property
    def isolated(self) -> bool:
        """Whether each trial has a process of its own."""
        return self.isolate or any(goal.metric == "peak_bytes" for goal in self.objectives)

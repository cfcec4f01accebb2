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

    low: float = Field(description="lowest value")
    high: float = Field(description="highest value")
    points: int | None = Field(
        None, ge=2, description="number of evenly spaced values for the sampler `grid`"
    )

    @model_validator(mode="after")
    def _is_a_range(self) -> "_Range":
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self


class Uniform(_Range):
    """A float with a uniform distribution between two ends."""

    name: Literal["uniform"] = "uniform"


class LogUniform(_Range):
    """A float with a log-uniform distribution, such as a learning rate."""

    name: Literal["log_uniform"] = "log_uniform"

    @model_validator(mode="after")
    def _is_above_zero(self) -> "LogUniform":
        if self.low <= 0:
            raise ValueError(f"low ({self.low:g}) must be above 0")
        return self


class IntRange(Settings):
    """An integer range, both ends included."""

    name: Literal["int"] = "int"
    low: int = Field(description="lowest value")
    high: int = Field(description="highest value")
    step: int = Field(1, ge=1, description="difference between two adjacent values")

    @model_validator(mode="after")
    def _is_a_range(self) -> "IntRange":
        if not self.low < self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        if (self.high - self.low) % self.step:
            raise ValueError(f"high - low ({self.high - self.low}) must be a multiple of step")
        return self


class Choice(Settings):
    """One of several unordered values (categorical)."""

    name: Literal["choice"] = "choice"
    values: tuple[Scalar, ...] = Field(
        min_length=1, description="allowed values: numbers, strings, true, false, null"
    )


Parameter = Annotated[Uniform | LogUniform | IntRange | Choice, Field(discriminator="name")]


# ---- samplers and pruners ----------------------------------------------------------------------


class _Sampler(Settings):
    seed: int = Field(0, ge=0, description="seed of the sampler; trial n depends on it and on n")


class GridSearch(_Sampler):
    """Every combination of the parameters' values."""

    name: Literal["grid"] = "grid"


class RandomSearch(_Sampler):
    """Independent random draws."""

    name: Literal["random"] = "random"


class TPE(_Sampler):
    """Tree-structured Parzen estimator (Bergstra et al. 2011; several objectives: Ozaki et al.)."""

    name: Literal["tpe"] = "tpe"
    startup_trials: int = Field(
        10, ge=1, description="number of random trials before the model is used"
    )
    multivariate: bool = Field(True, description="model the parameters jointly")


class GP(_Sampler):
    """Gaussian process with expected improvement. Needs the package torch."""

    name: Literal["gp"] = "gp"
    startup_trials: int = Field(
        10, ge=1, description="number of random trials before the model is used"
    )


class CMAES(_Sampler):
    """CMA-ES, covariance matrix adaptation (Hansen), for numbers; choices are drawn at random."""

    name: Literal["cmaes"] = "cmaes"


class NSGA2(_Sampler):
    """NSGA-II (Deb et al. 2002), for several objectives."""

    name: Literal["nsga2"] = "nsga2"
    population_size: int = Field(20, ge=2, description="trials per generation")


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
        4,
        ge=2,
        description="one of this many trials passes each rung; the next rung has this many times "
        "the steps",
    )


class Hyperband(Settings):
    """Hyperband (Li et al. 2018, arXiv:1603.06560): brackets of successive halving."""

    name: Literal["hyperband"] = "hyperband"
    min_steps: int = Field(ge=1, description="training steps before the first rung")
    max_steps: int = Field(ge=2, description="training steps of a full run")
    reduction_factor: int = Field(
        3,
        ge=2,
        description="one of this many trials passes each rung; the next rung has this many times "
        "the steps",
    )


class MedianStopping(Settings):
    """Stops a trial that is worse than the median of the others at the same step (Vizier)."""

    name: Literal["median"] = "median"
    startup_trials: int = Field(
        5, ge=1, description="number of trials that run to their end before any is stopped"
    )
    warmup_steps: int = Field(0, ge=0, description="training steps before a trial may be stopped")


Pruner = Annotated[NoPruning | ASHA | Hyperband | MedianStopping, Field(discriminator="name")]


# ---- the sweep ---------------------------------------------------------------------------------


class Goal(Settings):
    """A metric of a run, and the direction of improvement."""

    metric: Metric = Field(
        "bpb",
        description="metric of the last validation: bpb (bits per byte), loss (nats per token), "
        "perplexity, accuracy, reward_margin; or of the run: seconds (training time without "
        "validations), tokens_per_s (median), peak_bytes (of the device with the highest peak)",
    )
    direction: Direction | None = Field(
        None,
        description="maximize or minimize; default maximize for accuracy, reward_margin and "
        "tokens_per_s, else minimize",
    )

    @property
    def maximize(self) -> bool:
        """Whether more is better."""
        return (self.direction or self._usual) == "maximize"

    @property
    def _usual(self) -> Direction:
        return "maximize" if self.metric in MAXIMIZED else "minimize"


class Confirm(Settings):
    """Reruns the best trials on seeds that the search has not used."""

    best: int = Field(3, ge=1, description="number of best trials to rerun")
    seeds: int = Field(3, ge=2, description="new seeds per trial, the same for all trials")
    baseline: bool = Field(
        True, description="also run the configuration without the sweep's parameters"
    )


class Transfer(Settings):
    """Reruns trials of the search on new seeds, at the sweep's own model size and at another."""

    overrides: tuple[str, ...] = Field(
        min_length=1,
        description="key.path=value overrides that set the other size, used instead of the "
        "sweep's overrides",
    )
    best: int = Field(4, ge=1, description="number of best trials to rerun")
    spread: int = Field(
        4, ge=0, description="number of other trials to rerun, evenly spaced over their ranks"
    )
    single: bool = Field(
        True,
        description="also run each parameter of the best trial by itself, with the others as in "
        "the baseline",
    )
    seeds: int = Field(
        2, ge=2, description="new seeds per trial, the same for all trials and both sizes"
    )


class SweepConfig(Settings):
    """A sweep: a hyperparameter search over the fields of a configuration."""

    name: str = Field(
        "", description="folder of the sweep inside `directory`; default the file's name"
    )
    directory: str = Field(
        "runs", min_length=1, description="folder that contains the sweep's folder"
    )
    config: str = Field(
        description="configuration of the runs: a YAML file or a shipped config's name"
    )
    overrides: tuple[str, ...] = Field((), description="key.path=value overrides of all runs")
    parameters: dict[str, Parameter] = Field(
        min_length=1,
        description="search space: fields of the configuration and their values or ranges",
    )
    sampler: Sampler = Field(
        default_factory=lambda: TPE.model_validate({}),
        description="sampler that chooses the parameter values",
    )
    pruner: Pruner = Field(default_factory=NoPruning, description="early stopping of bad trials")
    objectives: tuple[Goal, ...] = Field(
        default_factory=lambda: (Goal.model_validate({}),),
        min_length=1,
        description="metrics to optimize; with several, the result is the Pareto front",
    )
    trials: int | None = Field(None, ge=1, description="number of trials; a grid has one per point")
    seeds: int = Field(
        1,
        ge=1,
        description="runs per trial, with run.seed and data.seed 1, 2, ..., the same for all "
        "trials (paired). The objective is their mean",
    )
    confirm: Confirm | None = Field(
        None, description="rerun the best trials on new seeds; default off. Only with one objective"
    )
    transfer: Transfer | None = Field(
        None,
        description="rerun trials at another model size, to test whether results transfer; "
        "default off. Only with one objective",
    )
    population: int = Field(
        1,
        ge=1,
        description="trials that train together on one device as one program (vmap); they may "
        "differ only in the optimizer's hyperparameters",
    )
    workers: int = Field(
        1, ge=1, description="number of processes that run trials, started by this command"
    )
    isolate: bool = Field(
        False,
        description="run each trial in its own process, which the metric peak_bytes needs; slower "
        "to start, but its memory is freed",
    )
    storage: str | None = Field(
        None,
        description="database URL of the study, such as postgresql://..., for hosts without a "
        "shared disk; default SQLite in the sweep's folder",
    )
    heartbeat: float = Field(
        15.0,
        gt=0,
        description="seconds between heartbeats of a worker; after four missed ones its trial is "
        "queued again",
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

"""The configuration tree. Each section's model is defined next to the code that it configures."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from jaxtrain.cluster.processes import ProcessesConfig
from jaxtrain.config.fields import tag_of
from jaxtrain.data import DataConfig
from jaxtrain.evaluation.config import EvalConfig
from jaxtrain.finetune import FinetuneConfig
from jaxtrain.finetune.config import FullConfig
from jaxtrain.inference.config import SampleConfig
from jaxtrain.model import ModelConfig
from jaxtrain.objectives import NextTokenConfig, ObjectiveConfig
from jaxtrain.optim import MuonConfig, OptimConfig
from jaxtrain.parallel import MeshConfig
from jaxtrain.runs.config import CheckpointConfig, MetricsConfig, RunConfig
from jaxtrain.settings import Settings
from jaxtrain.train.config import TrainConfig


def section(model: type[BaseModel]) -> Any:
    """A section with `model` as its default; the schema shows the default variant's name."""
    tag = tag_of(model)
    return Field(
        default_factory=model, json_schema_extra={"default": {"name": tag}} if tag else None
    )


class Sections(Settings):
    """Sections that are the same in a configuration and in its resolved form."""

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
        return self.run.folder / self.run.name


class Config(Sections):
    """All settings of a run. None is required."""

    model: ModelConfig = section(ModelConfig)
    train: TrainConfig = section(TrainConfig)

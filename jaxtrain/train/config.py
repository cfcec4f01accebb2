"""Configuration of training: batch and run length, guards, phases, local SGD."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from jaxtrain.settings import Settings, derived_field


class DiLoCo(Settings):
    """DiLoCo (Douillard et al. 2023): every H steps, and at the last, Nesterov on the replicas'
    mean way."""

    name: Literal["diloco"] = "diloco"
    every: int = Field(50, ge=1, description="inner steps H between two meetings")
    outer_lr: float = Field(0.7, gt=0, description="outer learning rate")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="outer Nesterov momentum")
    compress: Literal["int8", "fp8"] | None = Field(
        None, description="of what the replicas exchange, a scale for each 256; default float32"
    )
    fragments: int = Field(
        1, ge=1, description="parts of the parameters, which meet one after the other (streaming)"
    )


class Gossip(Settings):
    """Each replica averages with its two neighbours on a ring (of two replicas, with the other);
    there is no meeting of all."""

    name: Literal["gossip"] = "gossip"
    every: int = Field(1, ge=1, description="steps between two averages")


LocalConfig = Annotated[DiLoCo | Gossip, Field(discriminator="name")]


class LossSpike(Settings):
    """What is a spike of the loss, and what is done about it."""

    action: Literal["rollback", "skip"] = Field(
        "rollback",
        description="rollback: go back to a checkpoint and leave out the batches around the spike "
        "(PaLM); skip: leave out the update of a step whose loss or gradient norm is a spike "
        "(OLMo, MaxText)",
    )
    deviations: float = Field(
        6.0, gt=0, description="standard deviations above the window's mean that make a spike"
    )
    window: int = Field(
        128, ge=4, description="last steps that count; half of them must be there for a first spike"
    )
    rollback_steps: int = Field(
        100, ge=1, description="rollback: steps before the spike that the checkpoint is, at least"
    )
    skip_batches: int = Field(
        200,
        ge=1,
        description="rollback: batches that are left out, from `rollback_steps` steps before the "
        "spike on; the spike's own at least",
    )


class AutoFreeze(Settings):
    """AutoFreeze (Liu et al. 2021, arXiv:2102.01386): layers stop training from the bottom up when
    the norm of their gradient changes less than that of the others."""

    every: int = Field(
        100,
        ge=1,
        description="steps of an interval; at its end its gradient norms are compared with those "
        "of the interval before",
    )
    percentile: float = Field(
        50.0,
        gt=0,
        lt=100,
        description="of the relative changes of all layers that train; layers below it, with none "
        "above it under them, freeze",
    )
    max_layers: int | None = Field(
        None, ge=1, description="layers that freeze in the end, at most; default all but one"
    )


class PhaseConfig(Settings):
    """A part of a run that trains the model with other values of some fields. It begins where the
    phase before ends. After the last phase the model is the run's own."""

    until: int = Field(ge=1, description="step after which the phase ends")
    model: dict[str, JsonValue] = Field(
        description="fields of the model that differ in this phase: {depth: 6}",
    )
    grow: Literal["stack", "interleave", "repeat_top"] = Field(
        "stack",
        description="where the next phase's additional layers come from; stack: a copy of the "
        "whole stack on top (G_stack, Du et al. 2024); interleave: a copy of each layer behind it; "
        "repeat_top: copies of the last layers on top (gradual stacking, Reddi et al. 2023)",
    )


class TrainFields[Size: int | None, Ratio: float | None](Settings):
    """Fields of TrainConfig, whose Size and Ratio fields may be None, and of ResolvedTrain, whose
    fields are all set."""

    sequence_length: int = Field(
        2048,
        ge=2,
        le=2**27,
        description="tokens of context in a row, T; "
        "that of the model that the run starts from, if shorter",
    )
    batch_size: Size = derived_field(
        "rows of one step over all devices; "
        "default 2^round(log2(2^19 x (tokens / d12 tokens)^0.383)) / sequence_length",
        ge=1,
        le=2**27,
    )
    device_batch_size: Size = derived_field(
        "rows a device takes at once, the rest of its rows are accumulated; default all its rows",
        ge=1,
    )
    fit: bool = Field(
        False,
        description="the command chooses device_batch_size and model.remat, where they are not "
        "given, so that a step fits the device by the dry run's estimate",
    )
    steps: Size = derived_field(
        "optimizer steps; default tokens_per_parameter x (matrices + head) / batch tokens",
        ge=1,
        le=2**31 - 1,
    )
    tokens_per_parameter: Ratio = derived_field(
        "training tokens for each parameter of matrices and head; default that of scaling_fit",
        gt=0,
        le=1e9,
    )
    scaling_fit: str = Field(
        "nanochat",
        min_length=1,
        description="the fit of scaling laws that horizon, batch and learning rates follow: a "
        "fit.json of `jaxtrain scaling`, or the name of a shipped one",
    )
    init_from: str | None = Field(
        None,
        description="run, model folder or Hugging Face checkpoint (a folder, an s3://, gs:// or "
        "other URL of one, OWNER/NAME or OWNER/NAME@REVISION; the commit is kept in the run's "
        "configuration) to start from; its model and tokenizer are the default",
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
    phases: tuple[PhaseConfig, ...] = Field(
        (),
        description="parts of the run with another model, as in progressive stacking; each phase "
        "continues from the state of the one before",
    )
    autofreeze: AutoFreeze | None = Field(
        None,
        description="freeze layers that have converged, by their gradient norms; default none",
    )
    local_sgd: LocalConfig | None = Field(
        None,
        description="devices along mesh.data train replicas that meet now and then; "
        "default all take each step together",
    )


class TrainConfig(TrainFields[int | None, float | None]):
    """Size and length of the training steps."""


class ResolvedTrain(TrainFields[int, float]):
    """Train settings with all derived fields set."""

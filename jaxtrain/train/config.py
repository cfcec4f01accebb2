"""Configuration of training: batch and run length, guards, phases, local SGD."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from jaxtrain.settings import Settings, derived_field


class DiLoCo(Settings):
    """DiLoCo (Douillard et al. 2023): every `every` steps, and at the last, replicas average their
    parameter deltas and take an outer Nesterov step."""

    name: Literal["diloco"] = "diloco"
    every: int = Field(50, ge=1, description="inner steps H between two outer steps")
    outer_lr: float = Field(0.7, gt=0, description="outer learning rate")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="outer Nesterov momentum")
    compress: Literal["int8", "fp8"] | None = Field(
        None,
        description="dtype of the exchanged deltas, with a scale per 256 values; default float32",
    )
    fragments: int = Field(
        1,
        ge=1,
        description="parts of the parameters that are synchronized in turn (Streaming DiLoCo)",
    )


class Gossip(Settings):
    """Each replica averages its parameters with its two neighbours on a ring (of two replicas, with
    the other one). There is no global average."""

    name: Literal["gossip"] = "gossip"
    every: int = Field(1, ge=1, description="steps between two averages")


LocalConfig = Annotated[DiLoCo | Gossip, Field(discriminator="name")]


class LossSpike(Settings):
    """Detection of loss spikes, and the response to one."""

    action: Literal["rollback", "skip"] = Field(
        "rollback",
        description="rollback: return to a checkpoint and skip the batches around the spike "
        "(PaLM); skip: skip the update of a step whose loss or gradient norm is a spike (OLMo, "
        "MaxText)",
    )
    deviations: float = Field(
        6.0,
        gt=0,
        description="standard deviations above the window's mean from which a loss is a spike",
    )
    window: int = Field(
        128,
        ge=4,
        description="number of previous steps in the mean; half of them are needed before a first "
        "spike",
    )
    rollback_steps: int = Field(
        100, ge=1, description="rollback: minimum steps from the checkpoint to the spike"
    )
    skip_batches: int = Field(
        200,
        ge=1,
        description="rollback: batches to skip, from `rollback_steps` steps before the spike on; "
        "at least up to the spike",
    )


class AutoFreeze(Settings):
    """AutoFreeze (Liu et al. 2021, arXiv:2102.01386): freezes layers from the bottom up when their
    gradient norms change less than those of the others."""

    every: int = Field(
        100,
        ge=1,
        description="steps per interval, at whose end its gradient norms are compared with the "
        "previous interval's",
    )
    percentile: float = Field(
        50.0,
        gt=0,
        lt=100,
        description="percentile of the relative changes of all trainable layers; a layer below it "
        "freezes if all layers under it do",
    )
    max_layers: int | None = Field(
        None, ge=1, description="maximum number of frozen layers; default all but one"
    )


class PhaseConfig(Settings):
    """A part of the run that trains a model with some other fields. It begins where the previous
    phase ends; after the last phase the model is the run's own."""

    until: int = Field(ge=1, description="last step of the phase")
    model: dict[str, JsonValue] = Field(
        description="model fields that differ in this phase, such as {depth: 6}",
    )
    grow: Literal["stack", "interleave", "repeat_top"] = Field(
        "stack",
        description="initialization of the next phase's additional layers. stack: a copy of the "
        "whole stack on top (G_stack, Du et al. 2024); interleave: a copy of each layer after it; "
        "repeat_top: copies of the last layers on top (gradual stacking, Reddi et al. 2023)",
    )


class TrainFields[Size: int | None, Ratio: float | None](Settings):
    """Fields of TrainConfig, whose Size and Ratio fields may be None, and of ResolvedTrain, whose
    fields are all set."""

    sequence_length: int = Field(
        2048,
        ge=2,
        le=2**27,
        description="sequence length T in tokens; default 2048, or the context of the init_from "
        "model if that is shorter",
    )
    batch_size: Size = derived_field(
        "sequences per optimizer step over all devices; default 2^round(log2(2^19 x (tokens / d12 "
        "tokens)^0.383)) / sequence_length",
        ge=1,
        le=2**27,
    )
    device_batch_size: Size = derived_field(
        "sequences per device and microbatch; with fewer than its share of batch_size, gradients "
        "are accumulated. Default all its share",
        ge=1,
    )
    fit: bool = Field(
        False,
        description="choose device_batch_size and model.remat, where they are not set, so that a "
        "step fits in device memory by the dry run's estimate",
    )
    steps: Size = derived_field(
        "optimizer steps; default tokens_per_parameter x (matrices + head) / batch tokens",
        ge=1,
        le=2**31 - 1,
    )
    tokens_per_parameter: Ratio = derived_field(
        "training tokens per parameter of matrices and head; default that of scaling_fit",
        gt=0,
        le=1e9,
    )
    scaling_fit: str = Field(
        "nanochat",
        min_length=1,
        description="scaling-law fit that sets steps, batch size and learning rates: a fit.json "
        "of `jaxtrain scaling`, or the name of a shipped one",
    )
    init_from: str | None = Field(
        None,
        description="pretrained model to start from: a run, a model folder, or a Hugging Face "
        "checkpoint (a folder, its s3://, gs:// or other URL, OWNER/NAME or OWNER/NAME@REVISION, "
        "whose commit is saved in the run's configuration). Its model and tokenizer are the "
        "defaults",
    )
    precision: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="compute dtype; auto: bfloat16 or float16, whichever the GPU supports, and "
        "float32 on a CPU",
    )
    z_loss: float = Field(0.0, ge=0, description="weight of the z-loss, log(Z)^2 (PaLM: 1e-4)")
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="response to a loss, gradient or updated parameter that is nan or inf. stop; "
        "skip: skip the step's update (but stop if loss and gradients are finite and only the "
        "update is not); rollback: return to the newest checkpoint and skip the batches since",
    )
    max_consecutive_skips: int = Field(
        10,
        ge=1,
        description="number of consecutive skipped updates, or of rollbacks to one checkpoint, "
        "after which the run stops (on_nonfinite, loss_spike)",
    )
    loss_spike: LossSpike | None = Field(
        None, description="detection of loss spikes, and the response; default none"
    )
    compiler_options: dict[str, bool | int | str] = Field(
        {}, description="XLA options for the compilation of the step, xla_gpu_...: value"
    )
    phases: tuple[PhaseConfig, ...] = Field(
        (),
        description="phases that train another model, as in progressive stacking; each continues "
        "from the state of the previous one",
    )
    autofreeze: AutoFreeze | None = Field(
        None,
        description="freeze layers that have converged, judged by their gradient norms; default "
        "none",
    )
    local_sgd: LocalConfig | None = Field(
        None,
        description="low-communication data parallelism (DiLoCo or gossip) along mesh.data; "
        "default gradients are averaged in every step",
    )


class TrainConfig(TrainFields[int | None, float | None]):
    """Size and length of the training steps."""


class ResolvedTrain(TrainFields[int, float]):
    """Train settings with all derived fields set."""

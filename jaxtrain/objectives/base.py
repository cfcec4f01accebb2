"""The contract of an objective: sums over microbatches, divided once by the tokens or pairs."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array

from jaxtrain.weights.params import Params

SumsByName = dict[str, Array]


@runtime_checkable
class StepBatch(Protocol):
    """A batch on the device: arrays [B, T], or [A, B, T] of A microbatches."""

    @property
    def tokens_BT(self) -> Array: ...


@runtime_checkable
class DeviceBatch(StepBatch, Protocol):
    """Fields of a `data.Batch` that an objective reads."""

    @property
    def targets_BT(self) -> Array: ...
    @property
    def weights_BT(self) -> Array: ...
    @property
    def segments_BT(self) -> Array | None: ...
    @property
    def positions_BT(self) -> Array | None: ...


@runtime_checkable
class DevicePairs(DeviceBatch, Protocol):
    """Fields of a `data.PairBatch` that an objective reads."""

    @property
    def segments_BT(self) -> Array: ...
    @property
    def positions_BT(self) -> Array: ...
    @property
    def kto_labels_BP(self) -> Array: ...
    @property
    def references_BP2(self) -> Array: ...


class Objective(NamedTuple):
    """The function that a step minimises, and its metrics.

    loss: (model, params, microbatch [B, T], shared, step=, key=) -> the loss's sum in nats
    (float32), and the other sums by name. step: optimizer steps done. key: a PRNG key, or None
    if the run draws no random values.
    """

    loss: Callable[..., tuple[Array, SumsByName]]
    # (batch [A, B, T], bytes_V) -> the loss's divisor (tokens or pairs), bytes of text
    count: Callable[[Any, Array], tuple[Array, Array]]
    # (loss's sum, count, bytes of text, other sums, shared) -> metrics
    metrics: Callable[..., dict[str, Array]]
    sums: tuple[str, ...] = ()  # names of the other sums
    # (model, params, batch [A, B, T]) -> `shared`, an input to the loss of every microbatch
    share: Callable[[nnx.GraphDef, Params, Any], Any] = lambda model, params, batch: None
    draws: bool = False  # the loss is given a key
    # batch [A, B, T] -> the batch without what `share` took; only arrays [A, ...] remain
    microbatches: Callable[[Any], Any] = lambda batch: batch


class LossOptions(NamedTuple):
    """Options of a run for its objective, beyond the objective's own configuration."""

    z_loss: float = 0.0  # weight of log(Z)^2 (PaLM: 1e-4)
    head: str | None = None  # backend of the head and loss; default the model's
    pipeline_repeats: int = 1  # times that a microbatch goes through the mesh's pipeline
    pipeline_schedule: str = "gpipe"  # order of the stages' passes: gpipe or 1f1b
    steps: int = 1  # optimizer steps of the run
    pieces: tuple[bytes, ...] = ()  # bytes of each token; () without a tokenizer

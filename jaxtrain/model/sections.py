"""Sections of the model's configuration: fused-op backends, experts, and forms of weights."""

from typing import Any, Literal

from jaxtrain_kernels import rows
from pydantic import Field, field_validator, model_validator

from jaxtrain.settings import Settings
from jaxtrain.weights import LAYER_FORMS, TRAINING_FORMS, WEIGHTS

Remat = Literal[
    "none", "attention", "ffn", "dots", "block", "int8", "int4", "int2", "actnn8", "actnn4",
    "actnn2", "offload",
]  # fmt: skip

# Backends of the loss with float8 matmuls.
FP8_LOSSES = ("fp8_head", "fp8_logits")


# Training backends. The Triton kernels are for few rows, as in a decode step.
BACKENDS = tuple(name for name in rows.BACKENDS if name != "triton")


class FusedOps(Settings):
    """Backends of the fused passes in training: mosaic; xla, which leaves them to XLA's fusion; or
    reference. None is the fastest supported one. A name alone, as in `kernels: xla`, sets norm,
    rope, ffn and loss.
    """

    norm: str | None = Field(None, description="residual additions with the RMS norm after them")
    rope: str | None = Field(None, description="rotation and norm of queries and keys")
    qkv: str | None = Field(
        None,
        description="queries, keys and values in one array, with one matmul each way, turned in "
        "place before attention; in the place of rope and model.attention; xla: three arrays",
    )
    relu2: str | None = Field(None, description="the squared ReLU by itself; default: as ffn says")
    ffn: str | None = Field(
        None, description="the squared ReLU in the matmul before it; with model.fp8, in the casts"
    )
    loss: str | None = Field(
        None,
        description="the head with the loss; also fp8_head, whose three matmuls are in float8, and "
        "fp8_logits, whose logits' matmul alone is",
    )

    @model_validator(mode="before")
    @classmethod
    def _all(cls, given: Any) -> Any:
        every = ("norm", "rope", "ffn", "loss")
        return dict.fromkeys(every, given) if type(given) is str else given

    @field_validator("norm", "rope", "qkv", "relu2", "ffn")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        return known_backend(name, BACKENDS)

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str | None) -> str | None:
        return known_backend(name, (*BACKENDS, *FP8_LOSSES))


def known_backend(name: str | None, known: tuple[str, ...]) -> str | None:
    if name not in (None, *known):
        raise ValueError(f"there is no backend {name}; there are {', '.join(known)}")
    return name


class Experts(Settings):
    """Mixture of experts in place of the feed-forward network; no token is dropped.

    Each token goes to `top_k` of `experts` experts; the router computes in float32.
    """

    experts: int = Field(8, ge=2, description="experts E of a layer")
    top_k: int = Field(2, ge=1, description="experts that a token goes to")
    hidden: int | None = Field(
        None, ge=1, description="width F of one expert; default model.hidden / top_k"
    )
    shared_experts: int = Field(
        0, ge=0, description="experts of that width that every token goes to"
    )
    every: int = Field(
        1, ge=1, description="each so many layers one has experts, the last included"
    )
    score_function: Literal["sigmoid", "softmax"] = Field(
        "sigmoid", description="of the router's logits; the chosen ones are scaled to sum to 1"
    )
    balance_bias: bool = Field(
        True,
        description="choose by scores plus a bias that falls where an expert has more than its "
        "share (DeepSeek's loss-free balancing; its rate is that of group router_bias)",
    )
    aux_loss: float = Field(
        1e-4, ge=0, description="weight of each row's balance loss, E sum f p (1 if even)"
    )
    z_loss: float = Field(1e-5, ge=0, description="weight of log(Z)^2 of the router's logits")
    remat: Remat | None = Field(
        None,
        description="model.remat of the layers with experts, S layers or not; default that of "
        "other layers",
    )

    @model_validator(mode="after")
    def _check(self) -> "Experts":
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than the {self.experts} experts")
        return self


class WeightForm(Settings):
    """Rounding or sparsity of the blocks' matrices where a layer uses them, by name.

    fake_int8, fake_int4: fake quantization of the matrix as `jaxtrain quantize` stores it, and
    optionally of its inputs, in evaluation too. sparse_2_4: keeps two of each four inputs, in
    evaluation and saved models too. The others round all operands of the matrix's matmuls in
    training: also inputs and gradients.
    """

    name: str = Field(description=", ".join(LAYER_FORMS))
    stochastic_rounding: bool | None = Field(
        None, description="round gradients of outputs at random; default as the form's paper"
    )
    hadamard: bool | None = Field(
        None,
        description="a random Hadamard transform of 16 tokens each before the weight gradient's "
        "product; default as the form's paper",
    )
    group_size: int | None = Field(
        None, ge=2, description="fake_int4: inputs of a column that share a scale; default 128"
    )
    activations: Literal["int8"] | None = Field(
        None,
        description="fake_int8, fake_int4: round the inputs of the matrices to int8, a scale a "
        "token; default not at all",
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return {"name": given} if type(given) is str else given

    @model_validator(mode="after")
    def _check(self) -> "WeightForm":
        if self.name not in LAYER_FORMS:
            raise ValueError(f"there is no form {self.name}; there are {', '.join(LAYER_FORMS)}")
        if unknown := self.options().keys() - WEIGHTS[self.name].options:
            raise ValueError(f"{self.name} has no option {', '.join(sorted(unknown))}")
        return self

    def options(self) -> dict[str, Any]:
        """The options that are set, without the name."""
        found = {
            "stochastic_rounding": self.stochastic_rounding,
            "hadamard": self.hadamard,
            "group_size": self.group_size,
            "activations": self.activations,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def for_training(self) -> bool:
        """Whether the form applies only in training; evaluation uses the arrays unchanged."""
        return self.name in TRAINING_FORMS

    @property
    def saved(self) -> Literal["master", "compute"] | None:
        """How a trained model's matrices are saved (`weights.Form`)."""
        return WEIGHTS[self.name].saved

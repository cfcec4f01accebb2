"""Sections of the model's configuration: fused-op backends, experts, and forms of weights."""

from typing import Any, Literal

from jaxtrain_kernels import rows
from pydantic import Field, field_validator, model_validator

from jaxtrain.settings import Settings
from jaxtrain.weights import LAYER_FORMS, TRAINING_FORMS, WEIGHTS

Remat = Literal[
    "none", "attention", "ffn", "dots", "dots_fp8", "block", "int8", "int4", "int2", "actnn8",
    "actnn4", "actnn2", "offload",
]  # fmt: skip

# Backends of the loss with float8 matmuls.
FP8_LOSSES = ("fp8_head", "fp8_logits")


# Training backends. The Triton kernels are for few rows, as in a decode step.
BACKENDS = tuple(name for name in rows.BACKENDS if name != "triton")


class FusedOps(Settings):
    """Backends of the fused operations in training: mosaic; xla, which leaves them to XLA's fusion;
    or reference. Default the fastest supported one. A name alone, such as `kernels: xla`, sets
    norm, rope, ffn and loss."""

    norm: str | None = Field(None, description="residual addition and the RMSNorm after it")
    rope: str | None = Field(None, description="RoPE and norm of queries and keys")
    qkv: str | None = Field(
        None,
        description="one QKV matmul into one array, with RoPE applied in place before attention; "
        "replaces rope and model.attention. xla: three arrays",
    )
    relu2: str | None = Field(None, description="squared ReLU by itself; default that of ffn")
    ffn: str | None = Field(
        None,
        description="squared ReLU fused into the matmul before it; with model.fp8, into the casts",
    )
    loss: str | None = Field(
        None,
        description="head and cross-entropy loss; also fp8_head (all three matmuls in float8) and "
        "fp8_logits (only the logits' matmul)",
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

    experts: int = Field(8, ge=2, description="number of experts E per layer")
    top_k: int = Field(2, ge=1, description="number of experts per token")
    hidden: int | None = Field(
        None, ge=1, description="hidden dimension F of one expert; default model.hidden / top_k"
    )
    shared_experts: int = Field(
        0, ge=0, description="number of shared experts of that size, which process every token"
    )
    every: int = Field(
        1,
        ge=1,
        description="interval of the layers with experts, counted back from the last layer; 1: "
        "all layers",
    )
    score_function: Literal["sigmoid", "softmax"] = Field(
        "sigmoid",
        description="function that turns router logits into scores; the chosen experts' scores "
        "are scaled to sum to 1",
    )
    balance_bias: bool = Field(
        True,
        description="choose experts by score plus a bias that falls for overloaded experts "
        "(DeepSeek's auxiliary-loss-free balancing). Its rate is that of the parameter group "
        "router_bias",
    )
    aux_loss: float = Field(
        1e-4,
        ge=0,
        description="weight of the load balancing loss per sequence, E sum f p (1 if balanced)",
    )
    z_loss: float = Field(
        1e-5, ge=0, description="weight of the router's z-loss, log(Z)^2 of its logits"
    )
    remat: Remat | None = Field(
        None,
        description="model.remat of the layers with experts, S layers too; default that of the "
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
        None,
        description="round the gradients of outputs stochastically; default as in the form's paper",
    )
    hadamard: bool | None = Field(
        None,
        description="random Hadamard transform over blocks of 16 tokens before the weight "
        "gradient's matmul; default as in the form's paper",
    )
    group_size: int | None = Field(
        None, ge=2, description="fake_int4: inputs of a column that share a scale; default 128"
    )
    activations: Literal["int8"] | None = Field(
        None,
        description="fake_int8, fake_int4: quantize the matrices' inputs to int8, with one scale "
        "per token; default not quantized",
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

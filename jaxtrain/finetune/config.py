"""Fine-tuning configurations (full, PEFT adapters, or selected parameters), and their defaults."""

import itertools
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from jaxtrain.optim import AdamWConfig, MuonConfig
from jaxtrain.settings import Settings, UserError, read_object

BaseStorage = Literal["nf4", "int8", "int4"]


def our_names(targets: object) -> object:
    """Translate peft's module names among the targets into ours."""
    if not isinstance(targets, (list, tuple)):
        return targets
    found = (
        PEFT_MODULES.get(name, (name,)) if isinstance(name, str) else (name,) for name in targets
    )
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


Targets = Annotated[tuple[str, ...], BeforeValidator(our_names)]


class FullConfig(Settings):
    """Full fine-tuning, or pretraining: all parameters train."""

    peak_rate: ClassVar[float] = 2e-5
    name: Literal["full"] = "full"


class FrozenBaseConfig(Settings):
    """Fields of every method that freezes most of the model.

    peak_rate: AdamW's default learning rate; that of pretraining is too high here.
    """

    peak_rate: ClassVar[float]
    base_quantization: BaseStorage | None = Field(
        None,
        description="storage of the blocks' frozen matrices: nf4 (QLoRA, 4.13 bits per "
        "parameter), int4 (4.13, groups of 128 inputs) or int8; default the compute dtype",
    )


class LoRAConfig(FrozenBaseConfig):
    """LoRA: trainable low-rank updates of frozen matrices (Hu et al. 2021)."""

    peak_rate: ClassVar[float] = 2e-4  # QLoRA's for 7B
    name: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1, description="rank r of each adapter")
    alpha: float = Field(32.0, gt=0, description="LoRA alpha: the update is alpha / rank x A B")
    rslora: bool = Field(
        False,
        description="scale by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023), for large "
        "ranks",
    )
    dora: bool = Field(
        False,
        description="train the columns' norms separately from their directions (DoRA, Liu et al. "
        "2024)",
    )
    targets: Targets = Field(
        ("attention", "ffn"),
        min_length=1,
        description="matrices of the blocks with adapters: attention, ffn, q, k, v, out, up, "
        "gate, down, or patterns such as blocks/attention/*. peft's names (q_proj, all-linear) "
        "also work",
    )
    lora_plus_ratio: float = Field(
        1.0,
        gt=0,
        description="learning rate of B divided by that of A (LoRA+, Hayou et al. 2024: 16)",
    )
    freeze_a: bool = Field(
        False,
        description="keep A at its random initial value and train only B (LoRA-FA, Zhang et al. "
        "2023), which stores fewer activations",
    )
    loftq_iterations: int | None = Field(
        None,
        ge=1,
        description="LoftQ iterations (Li et al. 2023: 5): alternately fit A B to the "
        "quantization error of base_quantization and quantize W - A B. Default none: A is random "
        "and B zero",
    )
    init_adapter: str | None = Field(
        None,
        description="adapter to start from: a folder in peft's format, or a run with LoRA. Its "
        "rank, alpha and targets are the defaults",
    )

    @model_validator(mode="after")
    def _loftq(self) -> "LoRAConfig":
        if self.loftq_iterations is None:
            return self
        if self.base_quantization is None:
            raise ValueError("loftq_iterations needs base_quantization, whose error A B compensate")
        for name in ("freeze_a", "init_adapter"):
            if getattr(self, name):
                raise ValueError(f"leave out one of {name} and loftq_iterations: both choose A")
        return self


class QALoRAConfig(Settings):
    """QA-LoRA (Xu et al. 2023): low-rank updates that merge into zero points of an int4 base."""

    peak_rate: ClassVar[float] = LoRAConfig.peak_rate
    name: Literal["qalora"] = "qalora"
    rank: int = Field(16, ge=1, description="rank r of each adapter")
    alpha: float = Field(32.0, gt=0, description="LoRA alpha: the update is alpha / rank x A B")
    group_size: int = Field(
        32,
        ge=2,
        description="inputs of a matrix that share a scale, a zero point and a row of A; a "
        "smaller matrix is one group",
    )
    targets: Targets = Field(
        ("attention", "ffn"),
        min_length=1,
        description="matrices of the blocks with adapters: attention, ffn, q, k, v, out, up, "
        "gate, down, or patterns such as blocks/attention/*. peft's names also work",
    )


class ReLoRAConfig(Settings):
    """ReLoRA: pretraining by low-rank updates that are merged periodically (Lialin et al. 2023)."""

    name: Literal["relora"] = "relora"
    rank: int = Field(128, ge=1, description="rank r of each adapter")
    alpha: float = Field(32.0, gt=0, description="LoRA alpha: the update is alpha / rank x A B")
    targets: tuple[str, ...] = Field(
        ("attention", "ffn"),
        min_length=1,
        description="matrices of the blocks with adapters: attention, ffn, q, k, v, out, up, "
        "gate, down, or patterns such as blocks/attention/*",
    )
    every: int = Field(1000, ge=1, description="steps between two merges")
    warm_start: int = Field(
        0, ge=0, description="steps of full-rank training at the start of the run"
    )
    reset: float = Field(
        0.99,
        gt=0,
        le=1,
        description="fraction of the adapters' moments that a merge sets to zero, smallest first; "
        "1: all",
    )
    rewarm_steps: int = Field(
        50, ge=0, description="steps of linear warm-up of all learning rates after a merge"
    )


class FreezeConfig(FrozenBaseConfig):
    """Trains some parameters and freezes the others."""

    peak_rate: ClassVar[float] = 2e-5
    name: Literal["freeze"] = "freeze"
    trainable: tuple[str, ...] = Field(
        min_length=1,
        description="trainable parameters: a part of a parameter's path (ffn, q), a role (gain, "
        "head), or a pattern such as blocks/*/q",
    )
    last_layers: int | None = Field(
        None, ge=1, description="train only in this many last blocks; default all"
    )


class BitFitConfig(FrozenBaseConfig):
    """BitFit: trains only the biases (Ben Zaken et al. 2021)."""

    peak_rate: ClassVar[float] = 1e-3
    name: Literal["bitfit"] = "bitfit"


class IA3Config(FrozenBaseConfig):
    """IA3: learned factors on keys, values and the hidden channels (Liu et al. 2022)."""

    peak_rate: ClassVar[float] = 3e-3
    name: Literal["ia3"] = "ia3"


class AdapterConfig(FrozenBaseConfig):
    """Bottleneck adapters after each attention and feed-forward network (Houlsby et al. 2019)."""

    peak_rate: ClassVar[float] = 1e-3
    name: Literal["adapter"] = "adapter"
    width: int = Field(
        64, ge=1, description="bottleneck channels of each adapter; sets model.adapter"
    )


class PromptLearningConfig(FrozenBaseConfig):
    """Fields of prompt and prefix tuning, which train only virtual tokens before each document."""

    virtual_tokens: int = Field(
        20, ge=1, description="number of virtual tokens; sets model.prompt or model.prefix"
    )
    init_adapter: str | None = Field(
        None,
        description="adapter to start from: a folder in peft's format, or a run of the same kind. "
        "Its number of tokens is the default",
    )


class PromptConfig(PromptLearningConfig):
    """Prompt tuning: trains the embeddings of virtual tokens (Lester et al. 2021)."""

    peak_rate: ClassVar[float] = 1e-2
    name: Literal["prompt"] = "prompt"


class PrefixConfig(PromptLearningConfig):
    """Prefix tuning: trains keys and values of virtual tokens in every layer (Li & Liang 2021)."""

    peak_rate: ClassVar[float] = 1e-2
    name: Literal["prefix"] = "prefix"
    projection: int | None = Field(
        None,
        ge=1,
        description="hidden units of an MLP that computes the keys and values in training only "
        "(peft: encoder_hidden_size); default none, they are trained directly",
    )


FinetuneConfig = Annotated[
    FullConfig | LoRAConfig | QALoRAConfig | FreezeConfig | BitFitConfig | IA3Config | AdapterConfig
    | PromptConfig | PrefixConfig | ReLoRAConfig,
    Field(discriminator="name"),
]  # fmt: skip

# Peak learning rate of each method; a config class without `peak_rate` raises here.
RATES: dict[str, float] = {
    method.model_fields["name"].default: method.peak_rate
    for method in get_args(get_args(FinetuneConfig)[0])
    if method is not ReLoRAConfig
}
PRETRAINING = ("full", "relora")  # methods that need no pretrained model
# Factors on RATES for preference objectives, whose models already answer. The alignment handbook
# has 5e-7 (full) and 5e-6 (LoRA) for Zephyr 7B. ORPO also learns to answer: its paper has 8e-6
# (full, Hong et al. 2024).
PREFERENCE_RATE_FACTORS = {"dpo": 1 / 40, "ipo": 1 / 40, "kto": 1 / 40, "orpo": 2 / 5}
ADDED_MODULES = ("adapter", "prompt", "prefix")  # become model.NAME
# Learning rate of a prefix made by an MLP; Li & Liang's 5e-5 hardly moves one in 400 steps.
PROJECTION_RATE = 1e-3
BATCH_SIZE = 16  # rows of a step, as in QLoRA
PEFT = {"lora": "LORA", "prompt": "PROMPT_TUNING", "prefix": "PREFIX_TUNING"}  # peft's `peft_type`
# peft's names of modules -> ours
PEFT_MODULES = {
    "q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "o_proj": ("out",), "up_proj": ("up",),
    "gate_proj": ("gate",), "down_proj": ("down",), "fc1": ("up",), "fc2": ("down",),
    "c_attn": ("q", "k", "v"), "c_fc": ("up",), "attn.c_proj": ("out",), "mlp.c_proj": ("down",),
    "c_proj": ("out", "down"), "all-linear": ("attention", "ffn"),
}  # fmt: skip


def apply_finetune_defaults(tree: dict[str, Any], talks: bool = False) -> None:
    """Add the fine-tuning defaults to a plain configuration, in place; fields that it sets win.

    talks: the data are conversations. Full training from `train.init_from` is then fine-tuning,
    too. Raises UserError if `train.steps` is missing, or if options of muon are set without
    `optim.name`.
    """
    sections = ("train", "optim", "finetune", "objective")
    if not all(isinstance(tree.get(name, {}), dict) for name in sections):
        return  # the validation reports what is wrong
    train, optim, finetune, objective = (tree.get(name, {}) for name in sections)
    kind = finetune.get("name", "full")
    if kind not in RATES or (kind == "full" and not (talks and train.get("init_from"))):
        return
    if not train.get("steps"):
        raise UserError(
            f"train.steps: finetune.name={kind} needs the number of steps to tune the model"
        )
    train.setdefault("batch_size", BATCH_SIZE)
    if finetune.get("init_adapter"):
        folder = adapter_folder(str(finetune["init_adapter"]))
        tree["finetune"] = adapter_settings(folder, kind) | finetune
        if finetune.get("freeze_a"):
            raise UserError(
                "finetune.freeze_a: A is drawn from the seed, not read from an adapter; leave out "
                "freeze_a or init_adapter"
            )
        if finetune.get("projection"):
            raise UserError(
                f"finetune.projection: {folder} has keys and values, not the MLP that made them; "
                "leave out projection or init_adapter"
            )
    of_muon = MuonConfig.model_fields.keys() - AdamWConfig.model_fields
    other = [key for key in optim if key in of_muon]
    if other and "name" not in optim:
        raise UserError(
            f"optim: finetune.name={kind} trains with adamw unless optim.name says otherwise, but "
            f"{', '.join(other)} are of muon; say optim.name=adamw, which has rates that fit, or "
            "optim.name=muon"
        )
    if optim.get("name", "adamw") == "adamw":
        warmup = min(20, int(train["steps"]) // 10)
        rate = PROJECTION_RATE if finetune.get("projection") else RATES[kind]
        rate = float(f"{rate * PREFERENCE_RATE_FACTORS.get(objective.get('name'), 1):.2g}")
        rates = {"name": "adamw", "learning_rate": rate, "weight_decay": 0.0, "b2": 0.999}
        rates |= {"clip_norm": 1.0, "schedule": {"name": "linear", "warmup_steps": warmup}}
        tree["optim"] = rates | optim


def adapter_folder(path: str, option: str = "finetune.init_adapter") -> Path:
    """Find the adapter in a folder or run directory. UserError, starting with `option`, if none."""
    folder = Path(path).expanduser()
    for candidate in (folder, folder / "adapter", folder / "model" / "adapter"):
        if (candidate / "adapter_config.json").is_file():
            return candidate
    raise UserError(f"{option} {path}: not an adapter: it has no adapter_config.json")


def adapter_settings(folder: Path, kind: str = "lora") -> dict[str, Any]:
    """Read the fields of `finetune` from the `adapter_config.json` of a peft adapter."""
    file = folder / "adapter_config.json"
    c = read_object(file)
    plain = {"bias": ("none",), "modules_to_save": (None, []), "peft_type": (PEFT[kind],)}
    plain |= {"alora_invocation_tokens": (None,), "layers_to_transform": (None,)}
    plain |= {"num_transformer_submodules": (1,)}
    for key, allowed in plain.items():
        if key in c and c[key] not in allowed:
            raise UserError(f"{folder}: {key} {c[key]} is not supported, only {allowed[0]}")
    sizes = (("r", int), ("lora_alpha", (int, float)))
    for key, type_ in sizes if kind == "lora" else (("num_virtual_tokens", int),):
        if not isinstance(c.get(key), type_) or c[key] <= 0:
            raise UserError(f"{file}: {key} is {c.get(key)!r}, but must be a number above 0")
    if kind != "lora":
        return {"virtual_tokens": c["num_virtual_tokens"]}
    # Modules of lower rank are padded with zeros. alpha keeps the scale of modules outside of
    # `rank_pattern`; `interop.peft` keeps the scale of the others.
    most = max(c["r"], *(c.get("rank_pattern") or {"": 0}).values())
    root = 0.5 if c.get("use_rslora") else 1.0
    fields = {"rank": most, "alpha": c["lora_alpha"] * (most / c["r"]) ** root}
    fields |= {"rslora": bool(c.get("use_rslora")), "dora": bool(c.get("use_dora"))}
    modules = c.get("target_modules")
    if isinstance(modules, list):
        fields["targets"] = sorted(
            {ours for name in modules for ours in matrices_of_module(name, folder)}
        )
    return fields


def matrices_of_module(module: str, folder: Path) -> tuple[str, ...]:
    """Translate a peft module into our matrix names, by the last one or two parts of its path."""
    parts = module.split(".")
    for name in (".".join(parts[-2:]), parts[-1]):
        if name in PEFT_MODULES:
            return PEFT_MODULES[name]
    if (parts[-1],) in PEFT_MODULES.values():  # our own name, of a model that peft does not have
        return (parts[-1],)
    raise UserError(f"{folder}: target_modules {module} has no matrix here")

"""config.json <-> ModelConfig: both spellings of transformers (4 and 5) in, and out."""

import math
from typing import Any

from jaxtrain.interop.families import FAMILIES, Family
from jaxtrain.model import ResolvedModel, make_plan
from jaxtrain.settings import UserError

Json = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
# Fields that say how a model starts or runs, not what it computes.
EXECUTION = {
    "init", "base_width", "embedding_dtype", "attention", "deterministic_attention", "rows",
    "scan_layers", "fp8", "fp8_history", "remat", "remat_short", "ffn_tiles", "document_mask",
}  # fmt: skip
# Those that a family may spell in another way: `differences` compares what they come to.
DERIVED = {
    "vocab_multiple", "context", "window_pattern", "short_window", "last_layer_full", "qk_scale",
    "score_scale", "rope_base_short",
}  # fmt: skip
FREE = EXECUTION | DERIVED
INSERTED = ("adapter", "prompt", "prefix")  # what tuning put into a model
# Features of a config.json that would change the function and have no field here.
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "add_cross_attention": (None, False),
    "partial_rotary_factor": (None, 1.0),
}


def family_of(config: Json) -> Family:
    """The row of FAMILIES that a config.json belongs to."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"config.json: model_type {kind} is not known; there are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind]


def text_part(config: Json) -> Json:
    """The language model's part of a config.json (Gemma 3 from 4B on also sees pictures)."""
    if config.get("model_type") == "gemma3" and "text_config" in config:
        shared = {k: config[k] for k in ("dtype", "torch_dtype") if k in config}
        return shared | config["text_config"] | {"model_type": "gemma3_text"}
    return config


def model_fields(config: Json) -> Json:
    """The fields of ModelConfig that a config.json asks for; UserError names what has none."""
    family = family_of(config)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise UserError(
            f"config.json: quantization_config ({method}): quantised checkpoints are not read; "
            "take the one in bfloat16"
        )
    given: Json = family.defaults | config
    for key, allowed in REFUSED.items():
        if given.get(key) not in allowed:
            raise UserError(f"config.json: {key} {given[key]} is not supported, only {allowed[-1]}")
    check_activation(family, given)
    needed = [family.keys[ours] for ours in ("depth", "width", "heads")]
    for key in (*needed, "vocab_size"):
        if key not in given:
            raise UserError(f"config.json has no {key}")
    fields: Json = family.fixed | {ours: given.get(key) for ours, key in family.keys.items()}
    fields["head_dim"] = fields.get("head_dim") or fields["width"] // fields["heads"]
    fields["kv_heads"] = fields.get("kv_heads") or fields["heads"]
    fields |= dict.fromkeys(family.biases, bool(given.get("attention_bias")))
    if family.embed_root:
        fields["embed_scale"] = math.sqrt(fields["width"])
    if family.scale_key:
        fields["score_scale"] = given[family.scale_key] ** -0.5
    fields |= window_fields(family, given)
    if family.rope_base is not None:
        fields |= rope_fields(family, given)
    fields["vocab_multiple"] = given["vocab_size"]  # all its rows, whatever the tokenizer has
    return {k: v for k, v in fields.items() if v is not None or k in ("softcap",)}


def check_activation(family: Family, given: Json) -> None:
    key, allowed = family.activation
    # Gemma's configs have one key or the other, or both; then the longer one counts.
    kinds = given.get("hidden_activation"), given.get(key), given.get("hidden_act")
    kind = next((kind for kind in kinds if kind is not None), allowed[0])
    if kind not in allowed:
        raise UserError(f"config.json: {key} {kind} is not supported, only {', '.join(allowed)}")


# ---- windows ---------------------------------------------------------------------------------


def layer_types(family: Family, given: Json) -> list[str]:
    """SLIDING or FULL for each layer."""
    depth, window = given[family.keys["depth"]], given.get("sliding_window")
    if family.windows == "none" or window is None:
        return [FULL] * depth
    if family.windows == "all":
        return [SLIDING] * depth
    if not given.get("use_sliding_window", True):
        return [FULL] * depth
    if given.get("layer_types"):
        return given["layer_types"]
    if family.pattern:
        every = given.get("sliding_window_pattern") or family.pattern
        return [FULL if (i + 1) % every == 0 else SLIDING for i in range(depth)]
    return [SLIDING if i >= given["max_window_layers"] else FULL for i in range(depth)]


def window_fields(family: Family, given: Json) -> Json:
    """A window of theirs counts the query's own key, one of ours does not."""
    types = layer_types(family, given)
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise UserError(
            f"config.json: layer_types {unknown[0]} is not supported, only {SLIDING}, {FULL}"
        )
    if SLIDING not in types:
        return {"window_pattern": "L"}
    pattern = "".join("S" if kind == SLIDING else "L" for kind in types)
    return {
        "window_pattern": pattern if "L" in pattern else "S",
        "short_window": given["sliding_window"] - 1,
        "last_layer_full": False,
    }


# ---- rotary positions ------------------------------------------------------------------------


def rope_fields(family: Family, given: Json) -> Json:
    """Bases and stretching, of `rope_parameters` (5) or `rope_theta` and `rope_scaling` (4)."""
    new = given.get("rope_parameters") or {}
    per_type = family.model_type == "gemma3_text"
    full = new.get(FULL, {}) if per_type else new
    scaling = (full if "rope_type" in full else None) or given.get("rope_scaling") or {}
    fields: Json = {
        "rope_base": full.get("rope_theta") or given.get("rope_theta") or family.rope_base,
        "rope_scaling": rope_scaling(scaling, given),
    }
    if per_type:
        short = new.get(SLIDING, {})
        if short.get("rope_type", "default") != "default":
            raise UserError(f"config.json: rope_parameters of {SLIDING} must be of type default")
        base = short.get("rope_theta") or given.get("rope_local_base_freq") or 10_000.0
        fields["rope_base_short"] = base
    return fields


def rope_scaling(given: Json, config: Json) -> Json | None:
    """The section `model.rope_scaling` for a rope_parameters or rope_scaling of theirs."""
    kind = given.get("rope_type") or given.get("type") or "default"
    original = given.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise UserError("config.json: partial_rotary_factor is not supported, only 1.0")
    if kind == "default":
        return None
    if kind == "linear":
        return {"name": kind, "factor": needed(given, "factor")}
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor")
        scaled = {k: needed(given, k) for k in keys}
        return {"name": kind, "original_context": original} | scaled
    if kind == "yarn":
        return yarn(given, original, config["max_position_embeddings"])
    raise UserError(
        f"config.json: rope_type {kind} is not supported; there are default, linear, llama3, yarn"
    )


def yarn(given: Json, original: int, context: int) -> Json:
    """YaRN's section; DeepSeek's two scales of the scores become one factor."""
    factor: float = given.get("factor") or context / original
    fields: Json = {"name": "yarn", "factor": factor, "original_context": original}
    keys = ("beta_fast", "beta_slow", "attention_factor", "truncate")
    fields |= {k: given[k] for k in keys if given.get(k) is not None}
    scales: list[Any] = [given.get("mscale"), given.get("mscale_all_dim")]
    if "attention_factor" not in fields and all(scales):
        a, b = (1 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in scales)
        fields["attention_factor"] = a / b
    return fields


def needed(given: Json, key: str) -> Any:
    if key not in given:
        raise UserError(f"config.json: rotary positions of this type need {key}")
    return given[key]


# ---- back ------------------------------------------------------------------------------------


def to_config(c: ResolvedModel, family: Family, vocab_size: int) -> Json:
    """The config.json of a model, for transformers 4 and 5; UserError if the family lacks it."""
    config: Json = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {key: getattr(c, ours) for ours, key in family.keys.items()}
    config |= {"vocab_size": vocab_size, family.activation[0]: family.activation[1][0]}
    if family.biases:
        config["attention_bias"] = c.qkv_bias
    if family.scale_key:
        scale = score_scale(c) ** -2
        config[family.scale_key] = round(scale) if math.isclose(scale, round(scale)) else scale
    plan = make_plan(c)
    windows = [spec.window for spec in plan if spec.window is not None]
    if family.windows != "none":
        config["sliding_window"] = windows[0] + 1 if windows else None
    if family.windows == "types":
        config["layer_types"] = [FULL if spec.window is None else SLIDING for spec in plan]
        if family.pattern is None:
            config["use_sliding_window"] = bool(windows)
    if family.rope_base is not None:
        config["rope_parameters"] = rope = rope_parameters(c, family)
        config |= rope_of_4(rope)
    fitting = model_fields(config)
    lost = differences(c, ResolvedModel.model_validate(c.model_dump() | defaults(fitting)))
    if lost:
        raise UserError(f"the family {family.model_type} has no {', no '.join(lost)}")
    return config


def without_inserted(c: ResolvedModel) -> ResolvedModel:
    """The model as it was before something was put into it."""
    return c.model_copy(update=dict.fromkeys(INSERTED))


def defaults(fields: Json) -> Json:
    """`fields` with what they leave open, as a family that does not name a feature lacks it."""
    absent: Json = {
        "qkv_bias": False, "out_bias": False, "ffn_bias": False, "qk_norm_gain": False,
        "rope_scaling": None, "rope_base_short": None, "score_scale": None, "norm": "rms",
        "attention_softcap": None, "embed_scale": 1.0, "positions": "rotary", "post_norm": False,
        "block_norm": True, "last_layer_full": True, "qk_scale": 1.0, "moe": None,
    } | dict.fromkeys(INSERTED)  # fmt: skip
    return absent | fields


def rope_parameters(c: ResolvedModel, family: Family) -> Json:
    """Theirs, of our bases and stretching."""
    full: Json = {"rope_theta": c.rope_base, "rope_type": "default"}
    if c.rope_scaling is not None:
        kind = c.rope_scaling.name  # of YaRN, only what is not its paper's choice
        section = c.rope_scaling.model_dump(exclude={"name"}, exclude_defaults=kind == "yarn")
        if "original_context" in section:
            section["original_max_position_embeddings"] = section.pop("original_context")
        full |= {"rope_type": kind} | section
    if family.model_type != "gemma3_text":
        return full
    short = c.rope_base_short or c.rope_base
    return {FULL: full, SLIDING: {"rope_theta": short, "rope_type": "default"}}


def rope_of_4(rope: Json) -> Json:
    """What transformers 4 reads instead of `rope_parameters`: it would take its defaults."""
    full, short = rope.get(FULL, rope), rope.get(SLIDING)
    scaling = {key: value for key, value in full.items() if key != "rope_theta"}
    found: Json = {"rope_theta": full["rope_theta"]}
    found["rope_scaling"] = None if full["rope_type"] == "default" else scaling
    return found | ({"rope_local_base_freq": short["rope_theta"]} if short else {})


def score_scale(c: ResolvedModel) -> float:
    """The factor on attention scores that a configuration comes to."""
    return c.score_scale or (c.qk_scale**2 if c.qk_norm else 1.0) / math.sqrt(c.head_dim)


def differences(a: ResolvedModel, b: ResolvedModel) -> list[str]:
    """`field value` of a where b computes something else."""
    names = [name for name in ResolvedModel.model_fields if name not in FREE]
    lost = [f"{n} {getattr(a, n)}" for n in names if getattr(a, n) != getattr(b, n)]
    if not math.isclose(score_scale(a), score_scale(b), rel_tol=1e-6):
        lost.append(f"factor {score_scale(a):.6g} on the scores (it has {score_scale(b):.6g})")
    if [s.window for s in make_plan(a)] != [s.window for s in make_plan(b)]:
        lost.append("such windows (window_pattern, short_window, last_layer_full)")
    bases = [
        [c.rope_base_short if s.short_rope else c.rope_base for s in make_plan(c)] for c in (a, b)
    ]
    if a.positions == "rotary" and bases[0] != bases[1]:
        lost.append(f"rope_base_short {a.rope_base_short}")
    return lost


def fitting_family(c: ResolvedModel, vocab_size: int, wanted: str | None) -> tuple[Family, Json]:
    """The family that has all of a model's features (or the one that is asked for), its config."""
    if wanted is not None:
        family = family_of({"model_type": wanted})
        return family, to_config(c, family, vocab_size)
    reasons: list[str] = []
    for family in FAMILIES.values():
        try:
            return family, to_config(c, family, vocab_size)
        except UserError as error:
            reasons.append(str(error))
    nearest = min(reasons, key=len)
    raise UserError(f"no family of Hugging Face has all of this model's features; {nearest}")

"""config.json <-> ModelConfig, in the spellings of transformers 4 and 5."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import ValidationError

from jaxtrain.interop.families import FAMILIES, Family
from jaxtrain.interop.keys import (
    FULL,
    ROPE_TYPES,
    SLIDING,
    Json,
    check_against,
    check_keys,
    check_rope_keys,
)
from jaxtrain.model import ModelConfig, ResolvedModel, make_plan, resolve_model
from jaxtrain.settings import UserError

# Fields about initialization and execution, which do not change what a model computes.
EXECUTION = {
    "init", "base_width", "embedding_dtype", "attention", "deterministic_attention", "kernels",
    "scan_layers", "fp8", "fp8_hidden", "fp8_epilogue", "fp8_norms", "fp8_gradients",
    "fp8_fast_accum", "fp8_history", "remat",
    "remat_short", "stochastic_depth", "frozen_layers", "token_dropping", "ffn_tiles",
    "document_mask",
}  # fmt: skip
# Fields that a family may express through other fields; `lost_features` compares their effect.
DERIVED = {
    "vocab_multiple", "context_length", "window_pattern", "short_window", "last_layer_full",
    "qk_scale", "attention_scale", "rope_base_short",
}  # fmt: skip
FREE = EXECUTION | DERIVED
# Modules that finetuning or the objective add to a model.
ADDED_MODULES = ("adapter", "prompt", "prefix", "mtp")


def family_of(config: Json) -> Family:
    """The entry of FAMILIES that a config.json belongs to."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"config.json: model_type {kind} is not known; there are {', '.join(sorted(FAMILIES))}"
        )
    if kind == "mistral" and "layer_types" in config:  # as transformers does
        return FAMILIES["ministral"]
    return FAMILIES[kind]


def model_fields(config: Json) -> Json:
    """ModelConfig fields for a config.json. Raises UserError naming a key that has no field."""
    family = family_of(config)
    if config.get("quantization_config"):
        check_value("quantization_config", config["quantization_config"], SECTION)
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise UserError(
            f"config.json: quantization_config ({method}): quantised checkpoints are not read; "
            "take the one in bfloat16"
        )
    check_keys(family, config)
    given: Json = family.defaults | config
    check_activation(family, given)
    check_values(family, given)
    fields: Json = family.fixed | {ours: given.get(key) for ours, key in family.keys.items()}
    fields["head_dim"] = fields.get("head_dim") or fields["width"] // fields["heads"]
    fields["kv_heads"] = fields.get("kv_heads") or fields["heads"]
    fields |= dict.fromkeys(family.biases, bool(given.get("attention_bias")))
    if family.embed_root:
        fields["embed_scale"] = math.sqrt(fields["width"])
    if family.scale_key:
        fields["attention_scale"] = given[family.scale_key] ** -0.5
    fields |= window_fields(family, given)
    if family.rope_base is not None:
        fields |= rope_fields(family, given)
    fields["vocab_multiple"] = given["vocab_size"]  # all embedding rows, whatever the tokenizer
    return {k: v for k, v in fields.items() if v is not None or k in ("logit_softcap",)}


# ---- values ----------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of config.json value: its description and a test."""

    words: str
    fits: Callable[[Any], bool]


MOST = 2**31 - 1
WHOLE = Kind("a whole number above 0, below 2^31", lambda x: type(x) is int and 0 < x <= MOST)
COUNT = Kind("a whole number below 2^31", lambda x: type(x) is int and 0 <= x <= MOST)
NUMBER = Kind("a number above 0, and finite", lambda x: type(x) in (int, float) and 0 < x < 1e300)
TRUTH = Kind("true or false", lambda x: type(x) is bool)
SECTION = Kind("an object, {...}, or null", lambda x: isinstance(x, dict))
LIST = Kind("a list of texts", lambda x: isinstance(x, list) and {*map(type, x)} <= {str})
NUMBERS = Kind(
    "a list of numbers above 0", lambda x: isinstance(x, list | tuple) and all(map(NUMBER.fits, x))
)
# By our names, or by theirs if we have none. All other keys of `Family.keys` are whole numbers.
KINDS = {
    "depth": Kind("a whole number from 1 to 10,000", lambda x: WHOLE.fits(x) and x <= 10**4),
    "norm_eps": NUMBER, "logit_softcap": NUMBER, "attention_softcap": NUMBER, "tied_head": TRUTH,
    "ffn_bias": TRUTH, "vocab_size": WHOLE, "sliding_window": WHOLE, "max_window_layers": COUNT,
    "sliding_window_pattern": WHOLE, "query_pre_attn_scalar": NUMBER, "rope_theta": NUMBER,
    "rope_local_base_freq": NUMBER, "layer_types": LIST, "rope_scaling": SECTION,
    "rope_parameters": SECTION, FULL: SECTION, SLIDING: SECTION, "quantization_config": SECTION,
}  # fmt: skip
WINDOWS = {"sliding_window", "max_window_layers", "sliding_window_pattern", "layer_types"}
NEVER_NULL = {
    "depth", "width", "heads", "context_length", "norm_eps", "tied_head", "vocab_size",
    "query_pre_attn_scalar",
}  # fmt: skip


def check_values(family: Family, given: Json) -> None:
    """Raise UserError for a value of the wrong kind, such as a number in quotes."""
    ours = {key: name for name, key in family.keys.items()}
    unread = WINDOWS if family.windows == "none" else set[str]()
    for key, value in given.items():
        name = ours.get(key, key)
        if (name in KINDS or key in ours) and key not in unread:
            check_value(key, value, KINDS.get(name, WHOLE), name not in NEVER_NULL)


def check_value(key: str, value: object, kind: Kind, null: bool = False) -> None:
    if not (kind.fits(value) or (null and value is None)):
        raise UserError(f"config.json: {key} is {json.dumps(value)}, but must be {kind.words}")


def check_activation(family: Family, given: Json) -> None:
    allowed = family.activation[1]
    # Gemma's configs have either key or both.
    for key in {family.activation[0]: 0, "hidden_activation": 0, "hidden_act": 0}:
        kind = given.get(key)
        if kind is not None and kind not in allowed:
            raise UserError(
                f"config.json: {key} {kind} is not supported, only {', '.join(allowed)}"
            )


# ---- windows ---------------------------------------------------------------------------------


def layer_types(family: Family, given: Json) -> list[str]:
    """SLIDING or FULL for each layer. Raises UserError for a config that transformers rejects."""
    depth, window = given[family.keys["depth"]], given.get("sliding_window")
    if family.windows == "none" or (family.windows == "all" and window is None):
        return [FULL] * depth
    if family.windows == "all":
        return [SLIDING] * depth
    if not given.get("use_sliding_window", True):
        window = None
    types: list[str] | None = given.get("layer_types")
    if types is None:
        types = usual_types(family, given, window)
    if len(types) != depth:
        raise UserError(f"config.json: layer_types has {len(types)} layers, the model has {depth}")
    if SLIDING in types and window is None:
        raise UserError(f"config.json: layer_types has {SLIDING}, but there is no sliding_window")
    return types


def usual_types(family: Family, given: Json, window: int | None) -> list[str]:
    """Default layer types of a config.json that does not list them."""
    depth = given[family.keys["depth"]]
    if family.pattern:
        every = given.get("sliding_window_pattern") or family.pattern
        return [FULL if (i + 1) % every == 0 else SLIDING for i in range(depth)]
    first = given.get("max_window_layers", 0)
    return [SLIDING if window is not None and i >= first else FULL for i in range(depth)]


def window_fields(family: Family, given: Json) -> Json:
    """Sliding-window fields. Their window counts the query's own key; ours does not."""
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
    """RoPE bases and scaling from `rope_parameters` (5), `rope_theta` and `rope_scaling` (4), or
    both.

    Raises UserError if the two disagree: the two releases would read different models.
    """
    new, old = given.get("rope_parameters") or {}, given.get("rope_scaling") or {}
    if family.per_type_rope:
        check_against({FULL, SLIDING}, {}, new, "in rope_parameters of this family")
    full = (new.get(FULL) or {}) if family.per_type_rope else new
    for section in (full, old):
        check_values(family, section)
    stretched = [rope_scaling(section, given) for section in (full, old) if section]
    bases = [x for x in (full.get("rope_theta"), old.get("rope_theta")) if x is not None]
    bases += [given["rope_theta"]] if given.get("rope_theta") is not None else []
    short = (new.get(SLIDING) or {}) if family.per_type_rope else {}
    check_values(family, short)
    shorts = [x for x in (short.get("rope_theta"), given.get("rope_local_base_freq")) if x]
    if any(values[1:] != values[:-1] for values in (stretched, bases, shorts)):
        raise UserError(
            "config.json: rope_parameters differs from rope_theta, rope_scaling and "
            "rope_local_base_freq; take one of the two out"
        )
    fields: Json = {
        "rope_base": (bases or [family.rope_base])[0],
        "rope_scaling": stretched[0] if stretched else None,
    }
    if family.per_type_rope:
        if rope_scaling(short, given) is not None:
            raise UserError(f"config.json: rope_parameters of {SLIDING} must be of type default")
        fields["rope_base_short"] = (shorts or [10_000.0])[0]
    return fields


def rope_scaling(given: Json, config: Json) -> Json | None:
    """The section `model.rope_scaling` for transformers' `rope_parameters` or `rope_scaling`."""
    kind = given.get("rope_type") or given.get("type") or "default"
    original = given.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise UserError("config.json: partial_rotary_factor is not supported, only 1.0")
    if kind not in ROPE_TYPES:
        raise UserError(
            f"config.json: rope_type {kind} is not supported; there are {', '.join(ROPE_TYPES)}"
        )
    check_rope_keys(given, kind)
    if kind == "default":
        return None
    if kind == "yarn":
        return yarn(given, original, config["max_position_embeddings"])
    if kind == "longrope":
        return longrope(given, original, config["max_position_embeddings"])
    keys = [key for key in ROPE_TYPES[kind] if key != "original_max_position_embeddings"]
    known = {"original_context": original} if kind == "llama3" else {}
    return {"name": kind} | known | {key: needed(given, key) for key in keys}


def yarn(given: Json, original: int, context: int) -> Json:
    """The YaRN section. DeepSeek's `mscale` and `mscale_all_dim` become one attention factor."""
    factor: float = given.get("factor") or context / original
    fields: Json = {"name": "yarn", "factor": factor, "original_context": original}
    keys = ("beta_fast", "beta_slow", "attention_factor", "truncate")
    fields |= {k: given[k] for k in keys if given.get(k) is not None}
    scales: list[Any] = [given.get("mscale"), given.get("mscale_all_dim")]
    if "attention_factor" not in fields and all(scales):
        a, b = (1 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in scales)
        fields["attention_factor"] = a / b
    return fields


def longrope(given: Json, original: int, context: int) -> Json:
    """The LongRoPE section."""
    for key in ("short_factor", "long_factor"):
        check_value(key, given.get(key), NUMBERS)
    fields: Json = {"name": "longrope", "original_context": original}
    fields["factor"] = given.get("factor") or context / original
    keys = ("short_factor", "long_factor", "attention_factor")
    return fields | {k: given[k] for k in keys if given.get(k) is not None}


def needed(given: Json, key: str) -> int | float:
    if key not in given:
        raise UserError(f"config.json: rotary positions of this type need {key}")
    check_value(key, given[key], NUMBER)
    return given[key]


# ---- back ------------------------------------------------------------------------------------


def to_config(c: ResolvedModel, family: Family, vocab_size: int) -> Json:
    """The config.json of a model, for transformers 4 and 5. Raises UserError for a feature that
    the family lacks.

    The result is parsed again and compared with `c`. A field that config.json cannot express then
    has its default, and the comparison finds the difference.
    """
    config: Json = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {key: getattr(c, ours) for ours, key in family.keys.items()}
    config |= {"vocab_size": vocab_size, family.activation[0]: family.activation[1][0]}
    if family.biases:
        config["attention_bias"] = c.qkv_bias
    if family.scale_key:
        config[family.scale_key] = max(1, round(attention_scale(c) ** -2))  # must be an integer
    plan = make_plan(c)
    windows = [spec.window for spec in plan if spec.window is not None]
    if family.windows != "none":
        config["sliding_window"] = windows[0] + 1 if windows else None
    if family.windows == "types":
        config["layer_types"] = [FULL if spec.window is None else SLIDING for spec in plan]
        if "use_sliding_window" in family.window_keys:
            config["use_sliding_window"] = bool(windows)
        elif not windows:  # transformers builds the sliding mask even if no layer uses it
            config["sliding_window"] = family.defaults["sliding_window"]
    if family.rope_base is not None:
        config["rope_parameters"] = rope = rope_parameters(c, family)
        config |= rope_of_4(rope)
    lost = lost_features(c, read_again(config, c))
    if family.whole_heads and c.width % c.heads:
        lost.append(f"width {c.width} with {c.heads} heads, only multiples")
    if lost:
        raise UserError(f"the family {family.model_type} has no {', no '.join(lost)}")
    return config


def read_again(config: Json, c: ResolvedModel) -> ResolvedModel:
    """The model that a config.json describes, resolved for the context length of `c`."""
    try:
        return resolve_model(ModelConfig.model_validate(model_fields(config)), c.context_length)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"the family {config['model_type']} has no such model: {why}") from None


def without_added_modules(c: ResolvedModel) -> ResolvedModel:
    """The model without the modules that finetuning or the objective added."""
    return c.model_copy(update=dict.fromkeys(ADDED_MODULES))


def rope_parameters(c: ResolvedModel, family: Family) -> Json:
    """transformers' `rope_parameters` for our RoPE bases and scaling."""
    full: Json = {"rope_theta": c.rope_base, "rope_type": "default"}
    if c.rope_scaling is not None:
        kind = c.rope_scaling.name
        bare = kind in ("yarn", "longrope")  # write only values that differ from the paper's
        section = c.rope_scaling.model_dump(mode="json", exclude={"name"}, exclude_defaults=bare)
        if "original_context" in section:
            section["original_max_position_embeddings"] = section.pop("original_context")
        full |= {"rope_type": kind} | section
    if not family.per_type_rope:
        return full
    short = c.rope_base_short or c.rope_base
    return {FULL: full, SLIDING: {"rope_theta": short, "rope_type": "default"}}


def rope_of_4(rope: Json) -> Json:
    """Keys for transformers 4, which ignores `rope_parameters` and would use its defaults."""
    full, short = rope.get(FULL, rope), rope.get(SLIDING)
    scaling = {key: value for key, value in full.items() if key != "rope_theta"}
    found: Json = {"rope_theta": full["rope_theta"]}
    found["rope_scaling"] = None if full["rope_type"] == "default" else scaling
    return found | ({"rope_local_base_freq": short["rope_theta"]} if short else {})


def attention_scale(c: ResolvedModel) -> float:
    """The factor on attention scores that a configuration results in."""
    return c.attention_scale or (c.qk_scale**2 if c.qk_norm else 1.0) / math.sqrt(c.head_dim)


def lost_features(a: ResolvedModel, b: ResolvedModel) -> list[str]:
    """`field value` of each feature of `a` that `b` computes differently."""
    names = [name for name in ResolvedModel.model_fields if name not in FREE]
    if a.weight_form and a.weight_form.for_training:  # the trained result is plain matrices
        names.remove("weight_form")
    if a.position_embedding == b.position_embedding == "learned":
        names = [name for name in names if not name.startswith("rope_")]
    lost = [f"{n} {getattr(a, n)}" for n in names if not alike(getattr(a, n), getattr(b, n))]
    if not math.isclose(attention_scale(a), attention_scale(b), rel_tol=1e-6):
        lost.append(
            f"factor {attention_scale(a):.6g} on the scores (it has {attention_scale(b):.6g})"
        )
    if [s.window for s in make_plan(a)] != [s.window for s in make_plan(b)]:
        lost.append("such windows (window_pattern, short_window, last_layer_full)")
    bases = [
        [c.rope_base_short if s.short_rope else c.rope_base for s in make_plan(c)] for c in (a, b)
    ]
    if a.position_embedding == "rotary" and bases[0] != bases[1]:
        lost.append(f"rope_base_short {a.rope_base_short}")
    return lost


def alike(a: object, b: object) -> bool:
    """Whether two values are equal, floats up to rounding."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def fitting_family(c: ResolvedModel, vocab_size: int, wanted: str | None) -> tuple[Family, Json]:
    """The first family with all features of a model, or the `wanted` one, and its config.json."""
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
    raise UserError(
        f"no family of Hugging Face has all of this model's features; {nearest}; to export, train "
        "--config llama_tiny, or another config of a supported family"
    )

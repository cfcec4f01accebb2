"""The keys that a config.json may have: those that are read, and those known to change nothing.

Any other key raises an error that names it, since it could change what the model computes.
"""

from typing import Any

from jaxtrain.interop.families import Family, Values
from jaxtrain.settings import UserError

Json = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
# Keys about training, running or saving a model. Their values do not matter.
ABOUT_RUNNING = (
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path",
    "architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "decoder_start_token_id", "dtype",
    "eos_token_id", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range",
    "label2id", "num_labels", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "return_dict",
    "return_dict_in_generate", "sep_token_id", "task_specific_params", "tokenizer_class",
    "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "unk_token_id",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
)  # fmt: skip
# Keys that old releases saved with the model and that now are in generation_config.json.
ABOUT_GENERATION = (
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "remove_invalid_values", "repetition_penalty", "suppress_tokens", "temperature", "top_k",
    "top_p", "typical_p",
)  # fmt: skip
# Features of other models, with the values that switch them off.
LEFT_OUT: Values = {
    "add_cross_attention": (None, False),
    "cross_attention_hidden_size": (None,),
    "is_causal": (None, True),
    "is_decoder": (None, False),
    "is_encoder_decoder": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "pruned_heads": (None, {}),
    "quantization_config": (None, {}),
    "tie_encoder_decoder": (None, False),
    "use_bidirectional_attention": (None, False),
}
NEUTRAL: Values = {**dict.fromkeys((*ABOUT_RUNNING, *ABOUT_GENERATION)), **LEFT_OUT}
# Keys of the vision part of Gemma 3 from 4B on.
AROUND: Values = dict.fromkeys(
    ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index")
    + ("image_token_index", "boi_token_id", "eoi_token_id", "image_token_id")
)
# Keys of a RoPE section: those of every type, and those of each type.
OF_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    ),
    "yarn": (
        "factor", "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale",
        "mscale_all_dim", "original_max_position_embeddings",
    ),
    "longrope": (
        "short_factor", "long_factor", "factor", "attention_factor",
        "original_max_position_embeddings",
    ),
}  # fmt: skip
# Keys that some checkpoints save in a RoPE section of any type; nothing reads them.
NEUTRAL_IN_ROPE: Values = {"finetuned": None}


def read_keys(family: Family) -> set[str]:
    """The keys of a family's config.json that define the model."""
    keys = {"model_type", "vocab_size", family.activation[0], *family.keys.values()}
    keys |= {*family.window_keys, *([family.scale_key] if family.scale_key else ())}
    if family.biases:
        keys.add("attention_bias")
    if family.embed_root:  # Gemma's configs have either key or both
        keys |= {"hidden_act", "hidden_activation"}
    if family.rope_base is not None:
        keys |= {"rope_theta", "rope_scaling", "rope_parameters"}
    if family.per_type_rope:
        keys.add("rope_local_base_freq")
    return keys


def check_keys(family: Family, config: Json) -> None:
    """Raise UserError for the first key that is neither read nor known to change nothing."""
    read = read_keys(family)
    known = {**NEUTRAL, **family.neutral}
    types = config.get("layer_types")
    every_full = isinstance(types, list) and set(map(str, types)) == {FULL}
    if family.windows == "none" and every_full and len(types or ()) == depth(family, config):
        known["layer_types"] = None
    check_against(read, known, config, f"of {family.model_type}")


def check_against(read: set[str], known: Values, config: Json, of: str) -> None:
    """Raise UserError for the first key in neither `read` nor `known`, or with a value that
    `known` does not allow."""
    for key, value in config.items():
        if key in read or value is None:
            continue
        if key not in known:
            raise UserError(
                f"config.json: key {key} is not known {of}: it may change what the model computes; "
                "take it out if it does not"
            )
        allowed = known[key]
        if allowed is not None and value not in allowed:
            only = "null" if allowed[-1] is None else allowed[-1]
            raise UserError(f"config.json: {key} {value} is not supported, only {only}")


def depth(family: Family, config: Json) -> int:
    return (family.defaults | config)[family.keys["depth"]]


def check_rope_keys(section: Json, kind: str) -> None:
    """Raise UserError for an unsupported key in a RoPE section of type `kind`."""
    read = {*OF_ROPE, *ROPE_TYPES[kind]}
    check_against(read, NEUTRAL_IN_ROPE, section, f"in rotary positions of type {kind}")


def text_part(config: Json) -> Json:
    """The language model's section of a config.json (Gemma 3 from 4B on also has a vision one)."""
    if config.get("model_type") != "gemma3":
        return config
    # Both levels may have tie_word_embeddings; transformers uses the outer one.
    shared = ("dtype", "torch_dtype", "quantization_config")
    check_against(
        {"model_type", "text_config", "tie_word_embeddings"}, {**NEUTRAL, **AROUND},
        {k: v for k, v in config.items() if k not in shared}, "of gemma3",
    )  # fmt: skip
    text = config.get("text_config")
    if not isinstance(text, dict | None):
        raise UserError("config.json: text_config must be an object, {...}, or null")
    inner = (text or {}).get("model_type", "gemma3_text")
    if inner != "gemma3_text":
        raise UserError(f"config.json: text_config: model_type {inner} is not supported")
    tied = config.get("tie_word_embeddings", True)
    own = {"model_type": inner, "tie_word_embeddings": tied}
    return {k: config[k] for k in shared if k in config} | (text or {}) | own

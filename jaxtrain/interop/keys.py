"""The keys that a config.json may have: what is read, and what is known to change nothing.

Any other is refused by its name, since a model that computes something else would be accepted.
"""

from typing import Any

from jaxtrain.interop.families import Family, Values
from jaxtrain.settings import UserError

Json = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
# What a model is trained, run or saved with. Their values do not matter.
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
# What old releases saved with the model and now is in generation_config.json.
ABOUT_GENERATION = (
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "remove_invalid_values", "repetition_penalty", "suppress_tokens", "temperature", "top_k",
    "top_p", "typical_p",
)  # fmt: skip
# Features of other models, with the values that leave them out.
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
# Around the language model of Gemma 3 from 4B on: what sees.
AROUND: Values = dict.fromkeys(
    ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index")
    + ("image_token_index", "boi_token_id", "eoi_token_id", "image_token_id")
)
# Of a section of rotary positions: for each type, what is read.
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
# Saved by some with positions of any type, and read with none.
NEUTRAL_IN_ROPE: Values = {"finetuned": None}


def read_keys(family: Family) -> set[str]:
    """The keys of a family's config.json that say what the model is."""
    keys = {"model_type", "vocab_size", family.activation[0], *family.keys.values()}
    keys |= {*family.window_keys, *([family.scale_key] if family.scale_key else ())}
    if family.biases:
        keys.add("attention_bias")
    if family.embed_root:  # Gemma's have one key or the other, or both
        keys |= {"hidden_act", "hidden_activation"}
    if family.rope_base is not None:
        keys |= {"rope_theta", "rope_scaling", "rope_parameters"}
    if family.per_type_rope:
        keys.add("rope_local_base_freq")
    return keys


def check_keys(family: Family, config: Json) -> None:
    """UserError for the first key that is neither read nor known to change nothing."""
    read = read_keys(family)
    known = {**NEUTRAL, **family.neutral}
    types = config.get("layer_types")
    every_full = isinstance(types, list) and set(map(str, types)) == {FULL}
    if family.windows == "none" and every_full and len(types or ()) == depth(family, config):
        known["layer_types"] = None
    check_against(read, known, config, f"of {family.model_type}")


def check_against(read: set[str], known: Values, config: Json, of: str) -> None:
    """UserError for the first key that is in neither, or has another value than it may."""
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
    """The same, of a section of rotary positions of a known type."""
    read = {*OF_ROPE, *ROPE_TYPES[kind]}
    check_against(read, NEUTRAL_IN_ROPE, section, f"in rotary positions of type {kind}")


def text_part(config: Json) -> Json:
    """The language model's part of a config.json (Gemma 3 from 4B on also sees pictures)."""
    if config.get("model_type") != "gemma3":
        return config
    # Of the two places, transformers ties the head by the outer one.
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

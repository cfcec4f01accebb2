"""config.json in both spellings, and which family a model of ours fits."""

import json
from pathlib import Path

import pytest
from hf_cases import CASES, VOCAB
from test_families import FACTS

from jaxtrain.interop.configs import family_of, fitting_family, model_fields
from jaxtrain.interop.families import FAMILIES
from jaxtrain.interop.keys import read_keys, text_part
from jaxtrain.model import ModelConfig, make_plan, resolve_model
from jaxtrain.settings import UserError

LLAMA = FACTS["llama"]["config"]


def older(config, **changes):
    """A config.json of a model as transformers 4 spelled it."""
    new = ("rope_parameters", "layer_types", "dtype")
    return {k: v for k, v in config.items() if k not in new} | {"torch_dtype": "bfloat16"} | changes


LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
OLDER = {
    "llama": {"rope_theta": 10000.0},
    "llama rope linear": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama rope llama3": {"rope_theta": 500.0, "rope_scaling": LLAMA3},
    "qwen2 tied windows": {"rope_theta": 10000.0},
    "gemma": {"hidden_act": "gelu", "hidden_activation": None},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma3": {
        "rope_theta": 1e5, "rope_local_base_freq": 100.0, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_both_spellings_are_one_model(name):
    config = FACTS[name]["config"]
    assert model_fields(older(config, **OLDER[name])) == model_fields(config)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_has_both_spellings(name):
    """transformers 4 does not know rope_parameters: it would take bases of its own, silently."""
    fields = model_fields(FACTS[name]["config"])
    c = resolve_model(ModelConfig.model_validate(fields), 24)
    _, config = fitting_family(c, VOCAB, CASES[name][0])
    seen = {k: v for k, v in config.items() if k != "rope_parameters"}
    fields = resolve_model(ModelConfig.model_validate(model_fields(seen)), 24)
    names = ("rope_base", "rope_base_short", "rope_scaling", "window_pattern", "short_window")
    assert [getattr(fields, n) for n in names] == [getattr(c, n) for n in names]


def test_a_picture_model_gives_its_language_part():
    whole = {"model_type": "gemma3", "text_config": FACTS["gemma3"]["config"], "vision_config": {}}
    assert model_fields(text_part(whole)) == model_fields(FACTS["gemma3"]["config"])


def test_of_a_picture_model_what_is_left_out_is_the_family_s_and_the_head_is_tied_outside():
    """As in Gemma 3 4B, whose text_config has six keys."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    outer = {"model_type": "gemma3", "architectures": ["X"], "eos_token_id": [1, 106]}
    outer |= {"mm_tokens_per_image": 256, "vision_config": {"hidden_size": 1152}}
    fields = model_fields(text_part(outer | {"text_config": text | {"sliding_window": 1024}}))
    assert (fields["heads"], fields["kv_heads"], fields["head_dim"]) == (8, 4, 256)
    assert (fields["width"], fields["vocab_multiple"], fields["context_length"]) == (
        2560,
        262208,
        131072,
    )
    assert (fields["rope_base"], fields["rope_base_short"]) == (1e6, 1e4)
    assert (fields["short_window"], fields["window_pattern"][:6]) == (1023, "SSSSSL")
    assert fields["tied_head"] and fields["logit_softcap"] is None
    inner = outer | {"text_config": text | {"tie_word_embeddings": False}}
    assert model_fields(text_part(inner))["tied_head"]
    assert not model_fields(text_part(inner | {"tie_word_embeddings": False}))["tied_head"]
    for change, message in (
        ({"extra": 1}, "key extra is not known of gemma3"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
        ({"text_config": {"model_type": "llama"}}, "text_config: model_type llama is not"),
        ({"text_config": [1]}, "text_config must be an object"),
    ):
        with pytest.raises(UserError, match=message):
            model_fields(text_part(inner | change))


# ---- keys ------------------------------------------------------------------------------------

DEFAULTS = json.loads(Path(__file__).with_name("defaults.json").read_text())
REAL = {  # what released models have in their config.json beside their sizes
    "gpt2": {
        "n_ctx": 1024, "summary_type": "cls_index", "attn_pdrop": 0.1, "summary_activation": None,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama": {
        "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "rope_theta": 1e5,
        "transformers.js_config": {"dtype": "q4"}, "rope_scaling": None, "sliding_window": None,
    },
    "mistral": {"rope_theta": 1e6, "sliding_window": None, "unsloth_fixed": True},
    "qwen2": {
        "max_window_layers": 24, "sliding_window": 32768, "use_mrope": False, "rope_theta": 1e6,
        "use_sliding_window": False, "attention_dropout": 0.0,
    },
    "gemma": {"hidden_activation": None, "hidden_act": "gelu"},
    "gemma2": {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}
    | {"sliding_window_size": 4096},
    "gemma3_text": {
        "cache_implementation": "hybrid", "attn_logit_softcapping": None, "rope_scaling": None,
        "rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window_pattern": 6,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_left_out_is_what_transformers_takes(model_type):
    """defaults.json has its classes' (make_defaults.py), and no key of theirs is unknown."""
    family, theirs = FAMILIES[model_type], DEFAULTS[model_type]
    assert family.defaults == {key: theirs["fields"][key] for key in family.defaults}
    assert read_keys(family) - family.defaults.keys() <= OPEN
    bare = model_fields({"model_type": model_type})
    assert bare == model_fields(theirs["whole"])
    model_fields({"model_type": model_type} | REAL.get(model_type, {}))


# Read, and None by default, or of transformers 4.
OPEN = {
    "model_type", "head_dim", "layer_types", "rope_parameters", "rope_scaling", "rope_theta",
    "rope_local_base_freq", "sliding_window_pattern", "hidden_act", "hidden_activation",
}  # fmt: skip
SLIDES, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
WRONG = {
    "unknown": ("llama", {"logits_scaling": 8.0}, "key logits_scaling is not known of llama: .*ma"),
    "of another family": ("llama", {"final_logit_softcapping": 3.0}, "softcapping is not known"),
    "not applied": ("gemma3", {"attn_logit_softcapping": 50.0}, "softcapping 50.0 .* only null"),
    "bias": ("mistral", {"attention_bias": True}, "attention_bias True is not supported, only Fal"),
    "window": ("llama", {"sliding_window": 4}, "sliding_window 4 is not supported, only null"),
    "both ways": ("gemma3", {"use_bidirectional_attention": True}, "attention True .*only False"),
    "short": ("qwen2", {"layer_types": [FULL]}, "layer_types has 1 layers, the model has 2"),
    "no window": ("qwen2", {"layer_types": [FULL, SLIDES]}, "but there is no sliding_window"),
    "null window": ("gemma2", {"sliding_window": None}, "but there is no sliding_window"),
    "layers of llama": ("llama", {"layer_types": [FULL, SLIDES]}, "key layer_types is not known"),
    "pattern of gemma2": ("gemma2", {"sliding_window_pattern": 3}, "_pattern 3 is not supported"),
    "activation": ("gemma", {"hidden_activation": "relu"}, "hidden_activation relu is not supp"),
    "two bases": ("llama", {"rope_theta": 5.0}, "rope_parameters differs from rope_th"),
    "two scalings": ("llama", {"rope_scaling": LINEAR}, "rope_parameters differs"),
    "flat": ("gemma3", {"rope_parameters": LINEAR}, "key rope_type is not known"),
    "nested": ("gemma2", {"rope_parameters": {FULL: LINEAR}}, "key full_attention is not"),
    "in rope": ("llama", {"rope_parameters": LINEAR | {"beta_fast": 9}}, "key beta_fast is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_key_that_would_change_the_function_is_refused(name):
    case, changes, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        model_fields(FACTS[case]["config"] | changes)


def test_a_key_that_says_nothing_is_accepted():
    plain = model_fields(LLAMA)
    for same in ({"rope_theta": 10000.0}, {"logits_scaling": None}, {"layer_types": [FULL] * 2}):
        assert model_fields(LLAMA | same) == plain


def test_mistral_with_layer_types_is_ministral():
    """transformers reads it so: without them, all layers have the window."""
    config = FACTS["ministral"]["config"]
    renamed = config | {"model_type": "mistral"}
    assert family_of(renamed).model_type == "ministral"
    assert model_fields(renamed) == model_fields(config)
    assert model_fields(config)["window_pattern"] == "SLS"
    all_of = {k: v for k, v in renamed.items() if k != "layer_types"}
    assert model_fields(all_of)["window_pattern"] == "S"
    assert model_fields(renamed | {"layer_types": None}) == model_fields(all_of)


def test_windows_count_the_query_itself_and_the_last_layer_keeps_its_own():
    plan = lambda name: [
        spec.window
        for spec in make_plan(
            resolve_model(ModelConfig.model_validate(model_fields(FACTS[name]["config"])), 24)
        )
    ]
    assert plan("mistral") == [None, None]
    assert plan("mistral window") == [6, 6]
    assert plan("qwen2 tied windows") == [None, 6]
    assert plan("gemma3") == [6, None, 6]


def test_every_family_has_a_case():
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)


# ---- which family a model fits ---------------------------------------------------------------

# Cases whose every feature a family further up in the table has as well.
SAME = {"mistral": "llama", "qwen2 tied windows": "qwen2"}


@pytest.mark.parametrize("name", CASES)
def test_a_model_finds_its_family_by_itself(name):
    c = resolve_model(ModelConfig.model_validate(model_fields(FACTS[name]["config"])), 24)
    family, _ = fitting_family(c, VOCAB, None)
    assert family.model_type == SAME.get(name, CASES[name][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_embeddings": True}, "no value_embeddings True"),
        ({"smear": True, "backout": True}, "no smear True, no backout True"),
        ({"post_norm": True}, "no post_norm True"),
        ({"attention_scale": 1.0}, "no factor 1 on the scores"),
        ({"window_pattern": "SL", "short_window": 5}, "no such windows"),
        ({"window_pattern": "S", "last_layer_full": False}, "no such windows"),
        ({"window_pattern": "SL", "rope_base_short": 5.0}, "no rope_base_short 5.0"),
        ({"norm_eps": 1e-3}, None),
    ],
)  # fmt: skip
def test_what_a_family_lacks_is_named(changes, message):
    c = resolve_model(ModelConfig.model_validate(model_fields(LLAMA) | changes), 24)
    if message is None:
        assert fitting_family(c, VOCAB, "llama")[1]["rms_norm_eps"] == 1e-3
        return
    with pytest.raises(UserError, match=f"llama has .*{message}"):
        fitting_family(c, VOCAB, "llama")


def test_of_no_family_the_nearest_is_named():
    c = resolve_model(ModelConfig.model_validate(model_fields(LLAMA) | {"smear": True}), 24)
    with pytest.raises(UserError, match="llama has no smear True; to export, train --config"):
        fitting_family(c, VOCAB, None)

"""config.json in both spellings, and which family a model of ours fits."""

import pytest
from hf_cases import CASES, VOCAB
from test_families import FACTS

from jaxtrain.interop import FAMILIES, fitting_family, model_fields
from jaxtrain.interop.configs import text_part
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
        ({"score_scale": 1.0}, "no factor 1 on the scores"),
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
    with pytest.raises(UserError, match="no family .* the family llama has no smear True"):
        fitting_family(c, VOCAB, None)

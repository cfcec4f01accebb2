"""What an export must not leave out: parts that were put into a model, and the tokens of a chat."""

import json
import re

import numpy as np
import pytest
from chat_cases import TEMPLATES, make_tokenizer
from hf_cases import CASES, VOCAB, prompts
from pydantic import ValidationError
from test_families import FACTS, build, logits_of
from tiny import random_params

from jaxtrain.cli import main as interop
from jaxtrain.config import Config, validate
from jaxtrain.config.resolve import resolve
from jaxtrain.data import apply_chat_defaults
from jaxtrain.data.chat.template import make_render
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer, huggingface_tokenizer
from jaxtrain.interop.configs import FREE, fitting_family, model_fields
from jaxtrain.interop.export import export_weights
from jaxtrain.interop.families import LLAMA
from jaxtrain.interop.keys import FULL
from jaxtrain.interop.load import load_checkpoint, open_checkpoint
from jaxtrain.interop.peft import rows_of
from jaxtrain.model import ModelConfig, Transformer, resolve_model, split
from jaxtrain.runs.saved import save_model
from jaxtrain.settings import UserError

LLAMA_FIELDS = model_fields(FACTS["llama"]["config"])


def resolved(**changes):
    return resolve_model(ModelConfig.model_validate(LLAMA_FIELDS | changes), 24)


# ---- every field -----------------------------------------------------------------------------

FLIPPED = (
    "qk_norm", "qk_norm_gain", "qkv_bias", "out_bias", "ffn_bias", "last_layer_full", "norm_gain",
    "post_norm", "embed_norm", "tied_head", "value_embeddings", "residual_scales", "smear",
    "backout", "document_mask", "block_norm", "deterministic_attention", "scan_layers",
    "causal",
)  # fmt: skip
# Of each field of a model, another value than any of the golden cases has.
CHANGED = dict.fromkeys(FLIPPED, "flipped") | {
    "depth": 1, "width": 64, "head_dim": 4, "heads": 8, "kv_heads": 1, "hidden": 80,
    "ffn": "relu2", "moe": {"experts": 2}, "vocab_multiple": 7, "position_embedding": "learned",
    "rope_base": 77.0, "rope_base_short": 55.0, "rope_scaling": {"name": "linear", "factor": 3.0},
    "qk_scale": 2.0, "attention_scale": 0.5, "window_pattern": "SL", "short_window": 3,
    "context_length": 48, "qk_head_dim": 4, "bigram_rows": 97,
    "norm": "layer", "norm_eps": 1e-3, "embed_scale": 3.0, "logit_softcap": 7.0,
    "attention_softcap": 7.0, "init": "orthogonal", "base_width": 64, "adapter": 4, "prompt": 3,
    "prefix": 3, "embedding_dtype": "bfloat16", "attention": "xla", "kernels": {"loss": "xla"},
    "fp8": "blocks", "fp8_history": 2, "fp8_hidden": True, "fp8_epilogue": True,
    "fp8_norms": True, "fp8_gradients": True, "fp8_fast_accum": True,
    "weight_form": "fake_int8", "remat": "block",
    "remat_short": "block", "stochastic_depth": 0.5, "frozen_layers": 1, "ffn_tiles": 2,
    "token_dropping": 0.5, "share_layers": "all", "share_kv": "global",
    "mla": {"kv_rank": 8, "rope_dim": 2}, "mtp": 1,
}  # fmt: skip
NEEDS = {"fp8_history": {"fp8": "blocks"}, "frozen_layers": {"depth": 2}}
# What a message says in the place of the field.
SAYS = dict.fromkeys(("window_pattern", "short_window", "last_layer_full"), "windows")
SAYS |= dict.fromkeys(("qk_scale", "attention_scale"), "factor")
SAYS |= {
    "qkv_bias": "(qkv|out)_bias",
    "width": "width|head_dim|embed_scale",
    "heads": "heads|head_dim",
}


def changed(case, field):
    """A golden model with another value of a field; None if there is no such model."""
    fields, value = model_fields(FACTS[case]["config"]), CHANGED[field]
    if value == "flipped":
        value = not fields.get(field, ModelConfig.model_fields[field].default)
    try:
        given = fields | NEEDS.get(field, {}) | {field: value}
        return resolve_model(ModelConfig.model_validate(given), 24)
    except (ValidationError, UserError):
        return None


BASES = ("llama", "mistral window", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
BASES += ("gpt2", "nanochat")


@pytest.mark.parametrize("case", BASES)
@pytest.mark.quick("llama", "nanochat")
def test_every_field_is_written_or_refused_by_name(case):
    """A field that is new is neither free nor known to a family: it is refused until it is."""
    assert CHANGED.keys() == ModelConfig.model_fields.keys() and set(CHANGED) >= FREE
    done = []
    for field in CHANGED:
        c = changed(case, field)
        if c is None:
            continue
        try:
            _, config = fitting_family(c, VOCAB, CASES[case][0])
        except UserError as error:
            done += ["refused"]
            assert re.search(SAYS.get(field, field), str(error)), f"{field}: {error}"
            continue
        again = resolve_model(ModelConfig.model_validate(model_fields(config)), 24)
        unused = c.position_embedding == "learned" and field.startswith("rope_")
        if field not in FREE and not unused:
            done += ["written"]
            assert getattr(again, field) == getattr(c, field), field
    assert done.count("written") >= 6 and done.count("refused") >= 10


@pytest.mark.slow
@pytest.mark.parametrize("field", sorted(FREE))
@pytest.mark.quick("document_mask")
def test_a_field_that_is_free_changes_nothing_that_is_exported(field, tmp_path):
    """Of the first family that takes another value of it, the export gives the model's logits."""
    quick = field in ("document_mask", "vocab_multiple")
    for case in ("qwen2",) if quick else ("nanochat", "gemma3", "qwen2"):
        c = changed(case, field)
        try:
            family, config = fitting_family(c, VOCAB, CASES[case][0])
        except UserError:
            continue
        graphdef, specs = split(Transformer(c, VOCAB))
        params, folder = random_params(specs), tmp_path / case
        folder.mkdir()
        out = np.dtype(np.float32)
        export_weights(folder, family, config, specs, params, out, c.head_dim)
        source = open_checkpoint(folder)
        _, other, declared = build(source)
        tokens, seen = prompts(), logits_of(other, load_checkpoint(source, declared), prompts())
        # States that begin in bfloat16 are rounded before their first norm.
        atol = 1e-2 if field == "embedding_dtype" else 1e-4
        np.testing.assert_allclose(logits_of(graphdef, params, tokens), seen, rtol=0, atol=atol)
        break
    else:
        pytest.fail(f"no family takes {field}")


def test_a_soft_cap_of_the_scores_goes_to_the_family_that_computes_it():
    """Gemma 3 in transformers has the key and does not apply it; Gemma 2 does."""
    for case, family in (("gemma2", "gemma2"), ("gemma3", None)):
        c = changed(case, "attention_softcap")
        if family:
            found, config = fitting_family(c, VOCAB, None)
            assert (found.model_type, config["attn_logit_softcapping"]) == (family, 7.0)
            continue
        for wanted in (None, "gemma3_text"):
            with pytest.raises(UserError, match=r"no attention_softcap 7\.0"):
                fitting_family(c, VOCAB, wanted)


def test_layers_without_windows_have_what_transformers_asks_for():
    """It makes the mask of a window in each model that could have one."""
    for case in ("ministral", "gemma2", "gemma3"):
        fields = model_fields(FACTS[case]["config"]) | {"window_pattern": "L"}
        c = resolve_model(ModelConfig.model_validate(fields), 24)
        _, config = fitting_family(c, VOCAB, CASES[case][0])
        assert config["sliding_window"] == 4096 and set(config["layer_types"]) == {FULL}


def test_heads_that_do_not_divide_the_width_and_scales_that_are_not_whole_are_refused():
    """transformers refuses such a config.json of these families."""
    odd = {"width": 36, "heads": 5, "kv_heads": 5, "head_dim": 8}
    for case in ("llama", "gemma2"):
        fields = model_fields(FACTS[case]["config"]) | odd
        c = resolve_model(ModelConfig.model_validate(fields), 24)
        with pytest.raises(UserError, match="no width 36 with 5 heads"):
            fitting_family(c, VOCAB, CASES[case][0])
    c = changed("gemma2", "attention_scale").model_copy(update={"attention_scale": 24.5**-0.5})
    with pytest.raises(UserError, match=r"no factor 0\.202"):
        fitting_family(c, VOCAB, "gemma2")


# ---- parts without a place -------------------------------------------------------------------

PARTS = {
    "prompt": ({"prompt": 3}, "a prompt of 3 virtual tokens, .* export its base .*start.*peft"),
    "prefix": ({"prefix": 3}, "a prefix of 3 virtual tokens, .* export its base .*start.*peft"),
    "adapter": ({"adapter": 4}, "adapters of 4 channels .* cannot hold"),
    "moe": ({"moe": {"experts": 4}}, "model.moe, 4 experts"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_without_a_place_is_refused(name, tmp_path, capsys):
    changes, message = PARTS[name]
    tokenizer = byte_tokenizer()
    tree = {"model": LLAMA_FIELDS | changes, "train": {"sequence_length": 32, "init_from": "start"}}
    tree |= {"data": {"tokenizer": {"name": "bytes"}}}
    c = resolve(validate(Config, tree), tokenizer.vocab_size)
    _, specs = split(Transformer(c.model, tokenizer.vocab_size))
    save_model(tmp_path / "model", c, random_params(specs), tokenizer)
    assert interop(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=f"llama has no {name} "):
        fitting_family(resolved(**changes), VOCAB, "llama")


def test_an_adapter_beside_such_parts_has_the_names_of_the_base():
    names = {"blocks/attention/k"}
    plain = rows_of(resolved(), names)
    assert plain[0].theirs == "model.layers.{}.self_attn.k_proj.weight"
    for changes in ({"prompt": 3}, {"prefix": 3}, {"adapter": 4}):
        assert rows_of(resolved(**changes), names) == plain


def test_a_parameter_that_no_tensor_holds_is_refused(tmp_path):
    c = resolved(adapter=4)
    _, specs = split(Transformer(c, VOCAB))
    with pytest.raises(UserError, match="family llama has no tensor for blocks/attention_adapter"):
        export_weights(
            tmp_path, LLAMA, {"vocab_size": VOCAB}, specs, random_params(specs),
            np.dtype(np.float32), c.head_dim,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


# ---- chats -----------------------------------------------------------------------------------


def chat_model(folder, template, special):
    """A random model in `folder` that was trained on conversations in these words."""
    tokenizer = huggingface_tokenizer(make_tokenizer().encode())
    source = {"name": "chat", "path": "x.jsonl", "template": template, "special": special}
    tree = {"model": LLAMA_FIELDS | {"vocab_multiple": 320}, "train": {"sequence_length": 32}}
    tree |= {"data": {"train": source, "tokenizer": {"name": "huggingface", "path": "x"}}}
    apply_chat_defaults(tree)
    c = resolve(validate(Config, tree), tokenizer.vocab_size)
    _, specs = split(Transformer(c.model, tokenizer.vocab_size))
    save_model(folder, c, random_params(specs), tokenizer)


@pytest.mark.parametrize("named", [{}, {"bos_token": None, "eos_token": "</s>"}])
def test_an_exported_template_renders_what_was_trained_on(named, tmp_path):
    """Also where the base names no bos_token and eos_token, which the template writes."""
    folder = tmp_path / "model"
    special = {key: token for key, token in named.items() if token}
    chat_model(folder, TEMPLATES["mistral"], special)
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "tokenizer_config.json").write_text(json.dumps(named))
    assert interop(["export", str(folder), str(tmp_path / "out")]) == 0
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    template = (tmp_path / "out" / "chat_template.jinja").read_text()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    known = {key: token for key, token in settings.items() if key.endswith("_token")}
    shown = make_render(template, known)(messages, False)
    assert shown == "<bos>[INST] a [/INST] b" + (named.get("eos_token") or "<bos>")


def test_a_template_that_ends_no_answer_is_refused_before_a_file_is_written(tmp_path, capsys):
    endless = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat_model(tmp_path / "model", endless, {})
    assert interop(["export", str(tmp_path / "model"), str(tmp_path / "out")]) == 2
    assert "ends an answer without a special token" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""What an export must not leave out: parts that were put into a model, and the tokens of a chat."""

import json
import re

import numpy as np
import pytest
from chat_cases import TEMPLATES, make_tokenizer
from hf_cases import VOCAB
from test_families import FACTS
from tiny import random_params

from jaxtrain.config import Config, validate
from jaxtrain.data import fill_in_chat
from jaxtrain.data.template import make_render
from jaxtrain.data.tokenizer import byte_tokenizer, huggingface_tokenizer
from jaxtrain.interop import export_weights, fitting_family, model_fields
from jaxtrain.interop.__main__ import main as interop
from jaxtrain.interop.configs import DERIVED, EXECUTION, defaults
from jaxtrain.interop.families import LLAMA
from jaxtrain.interop.peft import rows_of
from jaxtrain.model import ModelConfig, Transformer, resolve_model, split
from jaxtrain.saved import save_model
from jaxtrain.scaling import resolve
from jaxtrain.settings import UserError

LLAMA_FIELDS = model_fields(FACTS["llama"]["config"])


def resolved(**changes):
    return resolve_model(ModelConfig.model_validate(LLAMA_FIELDS | changes), 24)


def test_every_field_of_a_model_is_compared():
    """A field that is in neither set and that no family names would be dropped in silence."""
    compared = set(defaults(LLAMA_FIELDS))
    assert set(ModelConfig.model_fields) == compared | EXECUTION | DERIVED


PARTS = {
    "prompt": ({"prompt": 3}, "a prompt of 3 virtual tokens, .* export its base .*start.*peft"),
    "prefix": ({"prefix": 3}, "a prefix of 3 virtual tokens, .* export its base .*start.*peft"),
    "adapter": ({"adapter": 4}, "adapters of 4 channels .* have no place"),
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


@pytest.mark.parametrize("named", [{}, {"bos_token": None, "eos_token": "</s>"}])
def test_an_exported_template_renders_what_was_trained_on(named, tmp_path):
    """Also where the base names no bos_token and eos_token, which the template writes."""
    folder = tmp_path / "model"
    tokenizer = huggingface_tokenizer(make_tokenizer().encode())
    source = {"name": "chat", "path": "x.jsonl", "template": TEMPLATES["mistral"]}
    source["special"] = {key: token for key, token in named.items() if token}
    tree = {"model": LLAMA_FIELDS | {"vocab_multiple": 320}, "train": {"sequence_length": 32}}
    tree |= {"data": {"train": source, "tokenizer": {"name": "huggingface", "path": "x"}}}
    fill_in_chat(tree)
    c = resolve(validate(Config, tree), tokenizer.vocab_size)
    _, specs = split(Transformer(c.model, tokenizer.vocab_size))
    save_model(folder, c, random_params(specs), tokenizer)
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "tokenizer_config.json").write_text(json.dumps(named))
    assert interop(["export", str(folder), str(tmp_path / "out")]) == 0
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    template = (tmp_path / "out" / "chat_template.jinja").read_text()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    special = {key: token for key, token in settings.items() if key.endswith("_token")}
    shown = make_render(template, special)(messages, False)
    assert shown == "<bos>[INST] a [/INST] b" + (named.get("eos_token") or "<bos>")

"""Each family against transformers: logits, greedy tokens, and the way back (make_golden.py)."""

import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx
from hf_cases import CASES, NEW, VOCAB, T, golden, prompts, weights
from safetensors.numpy import load_file, save_file
from tiny import mesh_of

from jaxtrain.interop.configs import fitting_family
from jaxtrain.interop.export import export_weights
from jaxtrain.interop.load import load_checkpoint, open_checkpoint
from jaxtrain.model import ModelConfig, Transformer, resolve_model, split
from jaxtrain.parallel import shardings

FACTS, ARRAYS = golden()
# Fields of a saved config.json that say nothing about the function.
SAYS_NOTHING = {
    "transformers_version", "use_cache", "initializer_range", "attention_dropout", "dtype",
    "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "max_window_layers",
    "use_bidirectional_attention", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "_sliding_window_pattern",
}  # fmt: skip


def write_checkpoint(folder, name, **changes):
    """A case as a folder of Hugging Face's, written by the safetensors library."""
    facts = FACTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts["config"] | changes))
    save_file(weights(facts["shapes"]), folder / "model.safetensors", {"format": "pt"})
    return folder


def build(source):
    """(config, graphdef, specs) of a checkpoint."""
    c = resolve_model(ModelConfig.model_validate(source.fields), T)
    return c, *split(Transformer(c, source.config["vocab_size"]))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graphdef, params, tokens_BT):
    model = nnx.merge(graphdef, params)
    x_BTD = model(tokens_BT).states
    return model.logits(x_BTD.reshape(-1, x_BTD.shape[-1])).reshape(*tokens_BT.shape, -1)


def logits_and_greedy(graphdef, params):
    """Logits of the prompts, and the tokens that follow them; one program for both."""
    tokens, first = np.pad(prompts(), ((0, 0), (0, NEW))), None
    for at in range(T, T + NEW):
        out = np.asarray(logits_of(graphdef, params, tokens))
        first = out[:, :T] if first is None else first
        tokens[:, at] = out[:, at - 1].argmax(-1)
    return first, tokens[:, T:]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick("llama", "gemma3", "gpt2", "nanochat")
def test_a_family_is_what_transformers_computes_and_goes_back(name, tmp_path):
    source = open_checkpoint(write_checkpoint(tmp_path / "in", name))
    c, graphdef, specs = build(source)
    params = load_checkpoint(source, specs)
    assert jax.tree.map(lambda p: (p.shape, p.dtype.name), params) == jax.tree.map(
        lambda s: (s.shape, s.dtype), specs
    )
    logits, greedy = logits_and_greedy(graphdef, params)
    np.testing.assert_allclose(logits, ARRAYS[f"{name}/logits"], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(greedy, ARRAYS[f"{name}/greedy"])

    out = tmp_path / "out"
    out.mkdir()
    family, config = fitting_family(c, VOCAB, source.family.model_type)
    export_weights(out, family, config, specs, params, np.dtype(np.float32), c.head_dim)
    before, after = weights(FACTS[name]["shapes"]), load_file(out / "model.safetensors")
    assert sorted(after) == sorted(before)
    for tensor, x in before.items():
        np.testing.assert_array_equal(after[tensor], x, err_msg=tensor)
    saved, exported = dict(FACTS[name]["config"]), json.loads((out / "config.json").read_text())
    if saved.get("n_inner", 0) is None:
        saved["n_inner"] = 4 * saved["n_embd"]  # what GPT-2 means by null
    for key in saved.keys() & exported.keys() - SAYS_NOTHING:
        assert exported[key] == saved[key], key


def test_old_names_and_a_picture_model_are_the_same_checkpoint(tmp_path):
    """GPT-2 without its prefix and with its buffers; Gemma 3 inside a model that sees."""
    for name, rename, extra, changes in (
        (
            "gpt2",
            lambda x: x.removeprefix("transformer."),
            {"h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)},
            {},
        ),
        (
            "gemma3",
            lambda x: "language_model." + x,
            {"vision_tower.patch.weight": np.ones(3, np.float32)},
            {"model_type": "gemma3", "text_config": FACTS["gemma3"]["config"]},
        ),
        ("llama tied mha", str, {"lm_head.weight": np.ones((VOCAB, 32), np.float32)}, {}),
    ):
        plain = open_checkpoint(write_checkpoint(tmp_path / name, name))
        folder = write_checkpoint(tmp_path / f"{name} renamed", name, **changes)
        if "text_config" in changes:  # nothing of the language model's beside it
            (folder / "config.json").write_text(json.dumps(changes))
        tensors = {rename(x): array for x, array in weights(FACTS[name]["shapes"]).items()}
        save_file(tensors | extra, folder / "model.safetensors")
        other = open_checkpoint(folder)
        assert other.fields == plain.fields and other.tensors.keys() == plain.tensors.keys()


@pytest.mark.slow
def test_a_mesh_holds_the_same_parameters(tmp_path):
    source = open_checkpoint(write_checkpoint(tmp_path, "llama biases mqa wide heads"))
    _, _, specs = build(source)
    mesh = mesh_of(fsdp=2, tensor=2)
    placed = load_checkpoint(source, specs, shardings(specs, mesh), dtype="bfloat16")
    q = placed["blocks"]["attention"]["q"]
    assert q.sharding.spec == jax.P(None, "fsdp", "tensor") and q.dtype == "bfloat16"
    assert placed["final_gain"].dtype == "float32"
    alone = load_checkpoint(source, specs, dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, placed, alone)

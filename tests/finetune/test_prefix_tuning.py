"""Virtual tokens: peft's prompts and prefixes give its logits here, and packing changes nothing."""

import functools
import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from test_peft import PYTHON, SCRIPT
from tiny import LLAMA, T, build, close, mesh_of, rows_of, run_overrides, same, tokens

from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.finetune import make_partition, prefix_keys_values
from jaxtrain.finetune.config import PrefixConfig, PromptConfig, adapter_settings
from jaxtrain.inference import generate
from jaxtrain.interop import peft
from jaxtrain.interop.load import load_checkpoint, open_checkpoint
from jaxtrain.interop.peft_prompt import KEYS, read_prompt_adapter, write_prompt_adapter
from jaxtrain.main import main
from jaxtrain.model import (
    Decode,
    Forward,
    ModelConfig,
    Prefill,
    Transformer,
    resolve_model,
    split,
)
from jaxtrain.model.branches import Branches
from jaxtrain.settings import UserError

from hf_cases import prompts  # isort: skip  (test_peft puts tests/interop on the path)
from test_families import write_checkpoint  # isort: skip

GOLDEN = np.load(Path(__file__).with_name("golden_prefix_tuning.npz"))
FACTS = json.loads(str(GOLDEN["facts"]))
CASES = sorted(set(FACTS) - {"versions"})
KINDS = {"prompt": PromptConfig, "prefix": PrefixConfig}
TENSOR = "prompt_embeddings"


@functools.partial(jax.jit, static_argnums=0)
def logits(graphdef, params, tokens_BT, positions_BT=None, segments_BT=None):
    model = nnx.merge(graphdef, params)
    x_BTD = model(tokens_BT, positions_BT, segments_BT).states
    return model.logits(x_BTD.reshape(-1, x_BTD.shape[-1])).reshape(*tokens_BT.shape, -1)


def decoded(graphdef, params, tokens_BT, start):
    """Logits of the tokens from `start` on, one by one behind a prefill that is padded."""
    model, length = nnx.merge(graphdef, params), tokens_BT.shape[1]
    prefill = jax.jit(lambda tokens, n: model(tokens, mode=Prefill(n, length)))
    x_BD, _, cache = prefill(tokens_BT, jnp.full(len(tokens_BT), start))
    decode = jax.jit(lambda tokens, cache: model(tokens, mode=Decode(cache)))
    found = [model.logits(x_BD)]
    for t in range(start, length):
        x_BD, _, cache = decode(tokens_BT[:, t, None], cache)
        found.append(model.logits(x_BD))
    return jnp.stack(found, axis=1)


# ---- peft --------------------------------------------------------------------------------------


def opened(tmp_path, name):
    """(model's config, graphdef, partition, frozen, trained, folder) of a case."""
    source = open_checkpoint(write_checkpoint(tmp_path / "base", FACTS[name]["base"]))
    folder, kind = tmp_path / "adapter", name.split()[0]
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(FACTS[name]["config"]))
    save_file({TENSOR: GOLDEN[f"{name}/tensor"]}, folder / "adapter_model.safetensors")
    tuning = KINDS[kind].model_validate(adapter_settings(folder, kind))
    fields = source.fields | {kind: tuning.virtual_tokens}
    c = resolve_model(ModelConfig.model_validate(fields), 24)
    graphdef, specs = split(Transformer(c, source.config["vocab_size"]))
    partition = make_partition(tuning, specs, jnp.dtype(jnp.float32))
    frozen, start = partition.init(load_checkpoint(source, partition.base), 0)
    return c, graphdef, partition, frozen, read_prompt_adapter(folder, c, start), folder


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick("prefix llama")
def test_pefts_virtual_tokens_give_its_logits_here_and_go_back(name, tmp_path):
    c, graphdef, partition, frozen, trained, _ = opened(tmp_path, name)
    params, row = partition.merge(trained, frozen), prompts()[:1]
    expected = GOLDEN[f"{name}/logits"]
    np.testing.assert_allclose(logits(graphdef, params, row), expected, rtol=0, atol=1e-4)
    write_prompt_adapter(tmp_path / "out", c, trained, "x")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    np.testing.assert_allclose(written.pop(TENSOR), GOLDEN[f"{name}/tensor"], rtol=1e-6)
    assert not written
    again = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    free = {"base_model_name_or_path"}
    if FACTS[name]["config"].get("prefix_projection"):  # the file holds what it gives
        free |= {"prefix_projection", "encoder_hidden_size"}
    for key in again.keys() - free:
        assert again[key] == FACTS[name]["config"][key], key


@pytest.mark.slow
def test_pefts_projection_gives_its_keys_and_values_here(tmp_path):
    """Trained, written and saved as plain keys and values; all of it has gradients."""
    name = "prefix projected"
    c, graphdef, _, frozen, plain, _ = opened(tmp_path, name)
    tuning = PrefixConfig(virtual_tokens=5, projection=7)
    partition = make_partition(tuning, split(Transformer(c, 64))[1], jnp.dtype(jnp.float32))
    w = {key.split("/")[-1]: GOLDEN[key] for key in GOLDEN.files if f"{name}/weights" in key}
    matrices = w["transform.2.weight"].reshape(c.depth, 2, -1, 7).swapaxes(2, 3)
    biases = w["transform.2.bias"].reshape(c.depth, 2, 1, -1)
    in_order = lambda keys: peft.channels(c, peft.rows_of(c, {KEYS})[0], keys)
    prefix = {
        "embed": w["embedding.weight"], "up": w["transform.0.weight"].T,
        "up_bias": w["transform.0.bias"], "k": in_order(matrices[:, 0]),
        "v": matrices[:, 1],
        "k_bias": in_order(biases[:, 0])[:, 0], "v_bias": biases[:, 1, 0],
    }  # fmt: skip
    trained = {"prefix": jax.tree.map(jnp.asarray, prefix)}
    shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
    assert shapes(trained) == shapes(partition.trainable)
    close(prefix_keys_values(trained), plain, rtol=1e-5, atol=1e-5)
    row, expected = prompts()[:1], GOLDEN[f"{name}/logits"]
    params = partition.merge(trained, frozen)
    np.testing.assert_allclose(logits(graphdef, params, row), expected, rtol=0, atol=1e-4)
    square = lambda p: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(prefix_keys_values(p)))
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(jax.grad(square)(trained)))
    start = partition.init({}, 0)[1]["prefix"]
    bound = 1 / np.sqrt(7)
    assert bound * 0.9 < np.abs(start["k"]).max() <= bound and 0.5 < np.std(start["embed"]) < 1.5
    c = load_config(None, ["train.steps=9", "finetune.name=prefix", "finetune.projection=7"])
    assert c.optim.learning_rate == 1e-3


@pytest.mark.skipif(not PYTHON, reason="needs torch and peft (JAXTRAIN_TORCH_PYTHON)")
@pytest.mark.parametrize("name", ["prompt gemma3", "prefix nanochat"])
def test_peft_reads_what_we_write(name, tmp_path):
    c, _, _, _, trained, _ = opened(tmp_path, name)
    write_prompt_adapter(tmp_path / "out", c, trained, "x")
    np.save(tmp_path / "tokens.npy", prompts()[:1])
    command = [PYTHON, str(SCRIPT), *map(str, (tmp_path / "tokens.npy", tmp_path / "base"))]
    subprocess.run([*command, str(tmp_path / "out")], check=True, env=os.environ)
    found = np.load(tmp_path / "out" / "logits.npy")[:, -24:]
    np.testing.assert_allclose(found, GOLDEN[f"{name}/logits"], rtol=0, atol=1e-4)


def test_another_adapter_is_named(tmp_path):
    c, _, _, _, trained, folder = opened(tmp_path, "prefix llama")
    with pytest.raises(UserError, match="peft_type PREFIX_TUNING is not supported, only LORA"):
        adapter_settings(folder)
    save_file({TENSOR: np.zeros((5, 32), np.float32)}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"\(5, 32\).*the run needs prompt_embeddings .*\(5, 64\)"):
        read_prompt_adapter(folder, c, trained)


# ---- what must change nothing ------------------------------------------------------------------

# Windows that end among the virtual tokens, and all that the gpt family has.
GPT = {"depth": 2, "window_pattern": "S", "short_window": 9, "kv_heads": 2}
GPT |= {"attention_softcap": 5.0}
MODELS = {
    "prompt gpt": GPT | {"prompt": 6},
    "prefix gpt": GPT | {"prefix": 6},
    "prompt learned": LLAMA | {"position_embedding": "learned", "prompt": 3},
}


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in ("prefix gpt", "prompt learned")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt gpt", *SLOW])
def test_packed_documents_and_decoding_are_as_if_alone(name):
    _, graphdef, _, params = build(document_mask=True, **MODELS[name])
    lengths, row = (11, 1, 17, 3), tokens(1)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32)
    segments = np.repeat((1, 2, 3, 0), lengths)[None].astype(np.int32)
    packed = logits(graphdef, params, row, positions, segments)[0]
    ends = np.cumsum(lengths)
    for start, end in zip((0, *ends), ends[:3]):
        alone = np.asarray(logits(graphdef, params, np.roll(row, -start, axis=1)))[0]
        close(packed[start:end], alone[: end - start], rtol=1e-4, atol=1e-5)
    whole = logits(graphdef, params, row)  # the window's end passes over the virtual tokens
    close(decoded(graphdef, params, row[:, :11], 3)[0], whole[0, 2:11], rtol=1e-4, atol=1e-5)
    other = jax.tree.map(lambda x: x, params)
    key = name.split()[0]
    other[key] = jax.tree.map(lambda x: -x, other[key])
    moved = np.abs(logits(graphdef, other, row, positions, segments)[0] - packed).max(-1)
    assert (moved[: ends[2]] > 1e-4).all()  # every document sees them


@pytest.mark.slow
def test_scan_remat_and_a_mesh_give_the_same_gradients():
    def gradients(mesh, **changes):
        _, graphdef, _, params = build(**GPT | {"prompt": 4, "window_pattern": "L", **changes})

        def loss(prompt):
            return jnp.mean(jnp.square(logits(graphdef, params | {"prompt": prompt}, tokens())))

        with jax.set_mesh(mesh):
            return jax.jit(jax.value_and_grad(loss))(params["prompt"])

    expected = gradients(mesh_of())
    assert np.abs(expected[1]).min(-1).max() > 0
    mesh = mesh_of(data=2, tensor=2)
    close(gradients(mesh, scan_layers=True, remat="block"), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_branches_see_the_virtual_tokens():
    """A text in one piece, and its end as a branch of its beginning."""
    _, graphdef, _, params = build(**MODELS["prefix gpt"] | {"smear": False})
    row, R, whole = jnp.asarray(tokens(1)), 6, jnp.arange(T)[None]
    segments = jnp.where(whole < T - R, 1, 2)
    parents, before = jnp.ones((1, R), int), whole[:, T - R - 1 : T - 1]
    model, branches = nnx.merge(graphdef, params), Branches(parents, before, whole)
    found = model(row, whole, segments, Forward(document_mask=True, branches=branches)).states
    close(found, model(row).states, rtol=1e-4, atol=1e-4)


# ---- runs --------------------------------------------------------------------------------------


def tuning(directory, start, name, **changes):
    given = run_overrides(directory, run__name=name, train__init_from=start, **changes)
    return [x for x in given if not x.startswith(("model.", "data.tokenizer", "optim.schedule"))]


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prompt", "projected prefix"])
def test_a_run_is_a_model_an_adapter_and_a_start(kind, whole, tmp_path, capsys):
    first = {"finetune__projection": 8} if "projected" in kind else {}
    kind = kind.split()[-1]
    more = {"finetune__name": kind, "finetune__virtual_tokens": 3, "train__steps": 2} | first
    assert main(tuning(tmp_path, whole, "a", **more)) == 0, capsys.readouterr().err
    run = tmp_path / "a"
    table = load_file(run / "model" / "model.safetensors")
    names = {"prompt": ["prompt"], "prefix": ["prefix/k", "prefix/v"]}[kind]
    before = load_file(whole / "model" / "model.safetensors")
    assert table.keys() - before.keys() == set(names)
    same({n: np.asarray(x).astype("f") for n, x in before.items()}, {n: table[n] for n in before})
    assert load_file(run / "model" / "adapter" / "adapter_model.safetensors").keys() == {TENSOR}
    capsys.readouterr()
    arguments = [str(run), "--tokens", "4", "--temperature", "0", "--prompt", "a b"]
    assert generate.main(arguments) == 0
    text = capsys.readouterr().out
    assert generate.main([*arguments, "--step", "2"]) == 0
    assert capsys.readouterr().out == text
    # From the run, and from the adapter on the run's own start: both go on where it ended.
    still = {"finetune__name": kind, "train__steps": 1, "optim__learning_rate": 1e-9}
    again = tuning(tmp_path, run, "b", **still, finetune__virtual_tokens=3)
    assert main(again) == 0, capsys.readouterr().err
    assert main(tuning(tmp_path, whole, "c", **still, finetune__init_adapter=run)) == 0
    if first:
        wrong = tuning(tmp_path, whole, "d", **still, **first, finetune__init_adapter=run)
        assert main(wrong) == 2 and "not the MLP that made them" in capsys.readouterr().err
    for name in names:
        for other in "bc":
            x = load_file(tmp_path / other / "model" / "model.safetensors")[name]
            np.testing.assert_allclose(x, table[name], rtol=0, atol=1e-6)
    assert rows_of(tmp_path / "b")[0]["loss"] == rows_of(tmp_path / "c")[0]["loss"]


def test_what_cannot_be(tmp_path, whole):
    start = [f"train.init_from={whole}", "train.steps=2"]
    for given, message in (
        (
            ["finetune.name=prompt", "model.prompt=8"],
            r"finetune.virtual_tokens 20: .* model.prompt 8; say",
        ),
        (["finetune.name=prompt", "model.prefix=8"], "has a prefix already"),
        (["finetune.name=prefix", "model.prefix=20", "finetune.projection=8"], "projection=null"),
        (
            ["finetune.name=prefix", "mesh.context=2"],
            r"mesh.context=2: virtual tokens .* set mesh.context=1",
        ),
    ):
        with pytest.raises(UserError, match=message):
            resolve(load_config(None, [*start, *given, "train.sequence_length=32"]), 512)
    learned = [
        "finetune.name=prefix",
        "model.position_embedding=learned",
        "model.context_length=32",
    ]
    with pytest.raises(UserError, match="20 virtual"):
        resolve(load_config(None, [*start[1:], *learned, "train.sequence_length=32"]), 512)

"""Adapters to and from peft: its own give its logits here, ours are read by it (make_golden.py)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import same

from jaxtrain.finetune import make_partition
from jaxtrain.finetune.config import LoRAConfig, adapter_settings
from jaxtrain.finetune.partition import flatten
from jaxtrain.interop.load import load_checkpoint, open_checkpoint
from jaxtrain.interop.peft import FILE, read_adapter, write_adapter
from jaxtrain.interop.tensors import read_header
from jaxtrain.main import main
from jaxtrain.settings import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "interop"))
from hf_cases import prompts
from test_families import build, logits_of, write_checkpoint
from test_runs import write_tokenizer

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))
FACTS = json.loads(str(GOLDEN["facts"]))
CASES = sorted(set(FACTS) - {"versions"})
SCRIPT = Path(__file__).with_name("run_peft.py")
HERE = all(importlib.util.find_spec(name) for name in ("torch", "peft"))
PYTHON = os.environ.get("JAXTRAIN_TORCH_PYTHON", sys.executable if HERE else "")


def tensors_of(name):
    start = f"{name}/tensors/"
    return {key.removeprefix(start): GOLDEN[key] for key in GOLDEN.files if key.startswith(start)}


def adapter_of(folder, name):
    """peft's adapter as a folder."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(FACTS[name]["config"]))
    save_file(tensors_of(name), folder / "adapter_model.safetensors")
    return folder


def opened(tmp_path, name, **changes):
    """(config of LoRA, model's config, graphdef, partition, frozen, trained) of a case."""
    source = open_checkpoint(write_checkpoint(tmp_path / "base", FACTS[name]["base"]))
    c, graphdef, specs = build(source)
    folder = adapter_of(tmp_path / "adapter", name)
    lora = LoRAConfig.model_validate(adapter_settings(folder) | changes)
    partition = make_partition(lora, specs, jnp.dtype(jnp.float32))
    base = load_checkpoint(source, partition.base, store=partition.store)
    frozen, start = partition.init(base, 0)
    return lora, c, graphdef, partition, frozen, read_adapter(folder, c, start)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick("rslora")
def test_pefts_adapter_gives_its_logits_here_and_goes_back(name, tmp_path):
    lora, c, graphdef, partition, frozen, trained = opened(tmp_path, name)
    join = jax.jit(partition.join)
    logits = logits_of(graphdef, join(trained, frozen), prompts())
    np.testing.assert_allclose(logits, GOLDEN[f"{name}/logits"], rtol=0, atol=1e-4)
    merged = logits_of(graphdef, partition.merge(trained, frozen), prompts())
    np.testing.assert_allclose(merged, logits, rtol=0, atol=1e-4)
    facts = lora.model_dump(include={"rank", "alpha", "rslora", "dora"}) | {"base": "x"}
    write_adapter(tmp_path / "out", c, trained, facts)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert written.keys() == tensors_of(name).keys()
    for key, x in tensors_of(name).items():
        if "c_attn" not in key:  # its parts had one A in common, and get their own
            np.testing.assert_array_equal(written[key], x)
    again = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    keys = ("r", "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out", "task_type", "bias")
    assert {k: again[k] for k in keys} == {k: FACTS[name]["config"][k] for k in keys}


@pytest.mark.slow
def test_lora_fa_trains_b_alone_and_exports_the_frozen_a(tmp_path):
    """The frozen A is that of LoRA of the same seed; peft's file has both, and gives the logits."""
    source = open_checkpoint(write_checkpoint(tmp_path / "base", FACTS["plain"]["base"]))
    c, graphdef, specs = build(source)
    lora = LoRAConfig(rank=4, targets=("q", "down"))
    whole, half = (
        make_partition(lora.model_copy(update={"freeze_a": f}), specs, jnp.dtype(jnp.float32))
        for f in (False, True)
    )
    base = load_checkpoint(source, half.base)
    _, both = whole.init(base, 3)
    frozen, start = half.init(base, 3)
    names = {"blocks/attention/q/b", "blocks/ffn/down/b"}
    assert flatten(start).keys() == flatten(half.trainable).keys() == names
    assert {n.removesuffix("/a") + "/b" for n in flatten(half.extras)} == names
    same(half.export(start, frozen), both)
    trained = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), start)
    logits = logits_of(graphdef, half.join(trained, frozen), prompts())
    assert np.abs(logits - logits_of(graphdef, base, prompts())).max() > 0.01
    merged = half.merge(trained, frozen)
    assert flatten(merged).keys() == flatten(specs).keys()
    np.testing.assert_allclose(logits_of(graphdef, merged, prompts()), logits, rtol=0, atol=1e-4)
    facts = {"rank": 4, "alpha": 32.0, "rslora": False, "dora": False, "base": "x"}
    write_adapter(tmp_path / "out", c, half.export(trained, frozen), facts)
    found = reopened(tmp_path, "plain", tmp_path / "out")
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4)


def reopened(tmp_path, name, folder):
    """Logits of a case's base with the adapter of a folder, as a run takes it over."""
    source = open_checkpoint(write_checkpoint(tmp_path / "again", FACTS[name]["base"]))
    c, graphdef, specs = build(source)
    lora = LoRAConfig.model_validate(adapter_settings(folder))
    partition = make_partition(lora, specs, jnp.dtype(jnp.float32))
    frozen, start = partition.init(
        load_checkpoint(source, partition.base, store=partition.store), 0
    )
    return logits_of(graphdef, partition.join(read_adapter(folder, c, start), frozen), prompts())


@pytest.mark.slow
def test_modules_have_ranks_and_alphas_of_their_own(tmp_path):
    """The wide c_attn that we write for GPT-2 comes back; so do a lower rank and another alpha."""
    _, c, _, _, _, trained = opened(tmp_path, "gpt2")
    facts = {"rank": 4, "alpha": 8.0, "rslora": False, "dora": False, "base": "x"}
    write_adapter(tmp_path / "out", c, trained, facts)
    found = reopened(tmp_path, "gpt2", tmp_path / "out")
    np.testing.assert_allclose(found, GOLDEN["gpt2/logits"], rtol=0, atol=1e-4)

    folder = tmp_path / "low"
    adapter_of(folder, "rslora")
    tensors = {k: np.ascontiguousarray(x) for k, x in tensors_of("rslora").items()}
    whole, low = dict(tensors), dict(tensors)
    for key, x in tensors.items():
        if "v_proj" in key:  # the first two of four directions
            low[key] = np.ascontiguousarray(x[:2] if "lora_A" in key else x[:, :2])
            whole[key] = x * (np.arange(4) < 2)[(slice(None), None) if "lora_A" in key else None]
        elif "lora_B" in key:
            low[key] = x / 2
    save_file({k: x.astype(np.float32) for k, x in whole.items()}, folder / FILE)
    expected = reopened(tmp_path, "rslora", folder)
    assert abs(expected - GOLDEN["rslora/logits"]).max() > 1e-3
    save_file(low, folder / FILE)
    config = FACTS["rslora"]["config"] | {"rank_pattern": {"v_proj": 2}}
    config |= {"alpha_pattern": {"self_attn.q_proj": 6, "v_proj": 3 / np.sqrt(2)}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    found = reopened(tmp_path, "rslora", folder)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(not PYTHON, reason="needs torch and peft (JAXTRAIN_TORCH_PYTHON)")
@pytest.mark.parametrize("name", ["plain", "gpt2", "nanochat"])
def test_peft_reads_what_we_write(name, tmp_path):
    lora, c, _, _, _, trained = opened(tmp_path, name)
    facts = lora.model_dump(include={"rank", "alpha", "rslora", "dora"}) | {"base": "x"}
    write_adapter(tmp_path / "out", c, trained, facts)
    np.save(tmp_path / "tokens.npy", prompts())
    command = [PYTHON, str(SCRIPT), *map(str, (tmp_path / "tokens.npy", tmp_path / "base"))]
    subprocess.run([*command, str(tmp_path / "out")], check=True)
    logits = np.load(tmp_path / "out" / "logits.npy")
    np.testing.assert_allclose(logits, GOLDEN[f"{name}/logits"], rtol=0, atol=1e-4)


def part_of_gpt2(tmp_path, dora=False):
    """(model's config, graphdef, base, partition, random adapter) of q and v, a part of c_attn."""
    source = open_checkpoint(write_checkpoint(tmp_path / "base", "gpt2"))
    c, graphdef, specs = build(source)
    lora = LoRAConfig(rank=4, alpha=8.0, targets=("q", "v"), dora=dora)
    partition = make_partition(lora, specs, jnp.dtype(jnp.float32))
    frozen, start = partition.init(
        load_checkpoint(source, partition.base, store=partition.store), 0
    )
    random = np.random.default_rng(0)
    trained = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), start)
    return c, graphdef, frozen, partition, trained


@pytest.mark.slow
def test_a_part_of_a_matrix_is_written_with_zeros_and_comes_back(tmp_path):
    c, graphdef, frozen, partition, trained = part_of_gpt2(tmp_path)
    facts = {"rank": 4, "alpha": 8.0, "rslora": False, "dora": False, "base": "x"}
    write_adapter(tmp_path / "out", c, trained, facts)
    table = load_file(tmp_path / "out" / FILE)
    up = table["base_model.model.transformer.h.1.attn.c_attn.lora_B.weight"]
    assert up.shape == (3 * 32, 8) and not up[32:64].any() and up[:32].any() and up[64:].any()
    expected = logits_of(graphdef, partition.join(trained, frozen), prompts())
    source = open_checkpoint(tmp_path / "base")
    _, _, specs = build(source)
    for given in ({}, {"targets": ("q", "v")}):  # all of c_attn, and the part alone
        lora = LoRAConfig.model_validate(adapter_settings(tmp_path / "out") | given)
        again = make_partition(lora, specs, jnp.dtype(jnp.float32))
        base, start = again.init(load_checkpoint(source, again.base, store=again.store), 0)
        found = again.join(read_adapter(tmp_path / "out", c, start), base)
        np.testing.assert_allclose(logits_of(graphdef, found, prompts()), expected, atol=1e-4)
    lora = LoRAConfig.model_validate(adapter_settings(tmp_path / "out") | {"targets": ("q",)})
    start = make_partition(lora, specs, jnp.dtype(jnp.float32)).init(base, 0)[1]
    with pytest.raises(UserError, match="changes blocks/attention/v too, which finetune.targets"):
        read_adapter(tmp_path / "out", c, start)


def test_norms_of_a_part_of_a_matrix_are_refused_before_anything_is_prepared(tmp_path, capsys):
    write_tokenizer(write_checkpoint(tmp_path / "base", "gpt2"))
    given = {"train.init_from": tmp_path / "base", "run.directory": tmp_path / "runs"}
    given |= {"data.cache_dir": tmp_path / "cache", "train.sequence_length": 32, "train.steps": 1}
    given |= {"data.train.path": "tinyshakespeare"}
    given |= {"finetune.name": "lora", "finetune.rank": 2, "finetune.targets": "[q, v, ffn]"}
    assert main([f"{k}={v}" for k, v in given.items()] + ["finetune.dora=true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "finetune.targets: q, k, v are one matrix" in line and "add k, or set" in line
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()


def test_an_adapter_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has \(32, 4\) for blocks/.*the run needs \(32, 2\)"):
        opened(tmp_path, "rslora", rank=2)
    for change, message in (
        ({"targets": ["q"]}, "holds .*v_proj.*, which finetune.targets leaves out"),
        ({"targets": ["q", "v", "out"]}, "has no tensor .*o_proj.*; finetune.targets asks for it"),
        ({"targets": ["nothing"]}, "finetune.targets: 'nothing' names no parameter; there are"),
        ({"rank": 64}, "finetune.rank 64 is more than blocks/attention/q has"),
    ):
        part = tmp_path / message[:12]
        part.mkdir()
        with pytest.raises(UserError, match=message):
            opened(part, "rslora", **change)


def test_a_damaged_adapter_is_named(tmp_path):
    folder, config = adapter_of(tmp_path / "a", "rslora"), FACTS["rslora"]["config"]
    for text, message in (
        ("{bad", "adapter_config.json is not valid JSON"),
        ("[]", "adapter_config.json holds a list"),
        (json.dumps({k: v for k, v in config.items() if k != "r"}), "json: r is None, but must be"),
        (json.dumps(config | {"lora_alpha": "8"}), "json: lora_alpha is '8', but must be a number"),
    ):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            adapter_settings(folder)
    with pytest.raises(UserError, match="num_virtual_tokens is None, but must be a number"):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "PROMPT_TUNING"}))
        adapter_settings(folder, "prompt")
    (folder / FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match=f"{FILE} is missing; adapter_model.bin is pickled.*peft"):
        read_header(folder / FILE)

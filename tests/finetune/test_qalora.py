"""QA-LoRA: the trained adapter goes into the zero points of the int4 groups, without loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import TypeAdapter
from safetensors.numpy import load_file
from test_tuning import tuning
from tiny import LLAMA, VOCAB, forget_end, random_params, resolved, rows_of, same, tokens

from jaxtrain.cli import main
from jaxtrain.evaluation import evaluate
from jaxtrain.finetune import FinetuneConfig, flatten, make_partition
from jaxtrain.finetune.partition import map_named
from jaxtrain.interop.compressed_tensors import quantization_config
from jaxtrain.model import Transformer, is_weight, split
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import dequantize
from jaxtrain.weights.int4 import OffsetInt4Weight

QALORA = {"name": "qalora", "rank": 4, "group_size": 8}


def partition_of(specs, dtype=jnp.float32, **fields):
    config = TypeAdapter(FinetuneConfig).validate_python(QALORA | fields)
    return make_partition(config, specs, jnp.dtype(dtype))


def trained(dtype=jnp.float32, **fields):
    """(graphdef, partition, what is frozen, adapters away from zero) of a small model."""
    graphdef, specs = split(Transformer(resolved(**LLAMA), VOCAB))
    partition = partition_of(specs, dtype, **fields)
    frozen, start = partition.init(map_named(partition.store, random_params(partition.base)), 0)
    random = np.random.default_rng(1)
    moved = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape) / 8, x.dtype), start)
    return graphdef, partition, frozen, moved


def logits_of(graphdef, params):
    model = nnx.merge(graphdef, params)
    return np.asarray(model.logits(model(jnp.asarray(tokens())).states))


@pytest.mark.parametrize("targets", [("attention", "ffn"), ("q", "v")], ids=["all", "qv"])
@pytest.mark.slow
def test_the_merged_model_is_int4_and_has_the_logits_of_the_adapted_one(targets):
    """Codes and scales stay bit for bit; offsets alone change, those of the targets."""
    graphdef, partition, frozen, moved = trained(targets=targets)
    merged, base = partition.merge(moved, frozen), flatten(frozen)
    packed = {n: x for n, x in flatten(merged).items() if is_weight(x)}
    assert len(packed) == 7 and all(type(x) is OffsetInt4Weight for x in packed.values())
    for name, weight in packed.items():
        same((weight.codes, weight.scales), (base[name].codes, base[name].scales))
        is_target = {*name.split("/")} & set(targets)
        assert bool((weight.offsets != base[name].offsets).any()) == bool(is_target)
    adapted = logits_of(graphdef, partition.join(moved, frozen))
    np.testing.assert_allclose(logits_of(graphdef, merged), adapted, rtol=1e-4, atol=1e-4)
    assert np.abs(logits_of(graphdef, frozen) - adapted).max() > 0.1
    with pytest.raises(UserError, match="no form for OffsetInt4Weight .* or tune with finetune.na"):
        quantization_config(packed)


def test_the_adapter_reads_the_sums_of_groups():
    """By hand, of one matrix: x W + alpha / rank x (sums of x) A B, in groups of 8 inputs."""
    *_, partition, frozen, moved = trained(alpha=8.0)
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    name = "blocks/ffn/down"
    weight = first(flatten(partition.join(moved, frozen))[name])
    a, b = (np.asarray(flatten(moved)[f"{name}/{part}"][0]) for part in "ab")
    x = np.random.default_rng(2).normal(size=(3, 48)).astype(np.float32)
    change = np.repeat(2.0 * a @ b, 8, axis=0)
    whole = np.asarray(dequantize(first(flatten(frozen)[name]))) + change
    np.testing.assert_allclose(weight.matmul(jnp.asarray(x)), x @ whole, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dequantize(weight), whole, rtol=1e-5, atol=1e-5)


def test_bfloat16_loses_no_small_change_in_the_merge():
    """A change of 1/4096 of an offset is below what bfloat16 holds of a weight, and is kept."""
    _, partition, frozen, moved = trained(jnp.bfloat16)
    small = jax.tree.map(lambda x: x / 64, moved)
    merged, before = flatten(partition.merge(small, frozen)), flatten(frozen)
    q = "blocks/attention/q"
    change = 8.0 * flatten(small)[f"{q}/a"] @ flatten(small)[f"{q}/b"]
    found = merged[q].offsets - before[q].offsets
    np.testing.assert_allclose(found, change, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 32}, "ffn/down: int4 packs .* groups of 32, .* finetune.group_size 16 doe"),
        ({"rank": 64}, "finetune.rank 64 is more than blocks/attention/k has"),
        ({"targets": ("nothing",)}, "finetune.targets: 'nothing' names no parameter"),
    ],
)
def test_what_does_not_fit_is_one_line(fields, message):
    specs = split(Transformer(resolved(**LLAMA), VOCAB))[1]
    with pytest.raises(UserError, match=message):
        partition_of(specs, **fields)


def test_the_base_is_int4_and_nothing_else(whole, tmp_path, capsys):
    given = {f"finetune__{k}": v for k, v in QALORA.items()}
    arguments = tuning(tmp_path, whole, "bad", **given, finetune__base_quantization="nf4")
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert "finetune.base_quantization" in error and error.count("\n") == 1, error


@pytest.mark.slow
def test_a_run_resumes_generates_and_holds_what_its_checkpoint_gives(whole, tmp_path, capsys):
    """On a mesh too: one device, then two that split the parameters."""
    given = {f"finetune__{k}": v for k, v in QALORA.items()} | {"optim__learning_rate": 0.01}
    losses = {}
    for name, mesh in (("one", {"mesh__data": 8}), ("many", {"mesh__data": 2, "mesh__fsdp": 4})):
        arguments = tuning(tmp_path, whole, name, **given, **mesh)
        assert main(["train", *arguments]) == 0, capsys.readouterr().err
        losses[name] = [row["loss"] for row in rows_of(tmp_path / name)]
    np.testing.assert_allclose(losses["one"], losses["many"], rtol=1e-4)
    run = tmp_path / "many"
    assert not (run / "model" / "adapter").exists()
    before = load_file(run / "model" / "model.safetensors")
    assert sum("offsets" in name for name in before) == 6
    last = max(int(f.name) for f in (run / "checkpoints").iterdir() if f.name.isdigit())
    same(flatten(load_saved(run, last).params), flatten(load_saved(run).params))
    capsys.readouterr()
    assert evaluate.main([str(run)]) == 0
    loss = float(capsys.readouterr().out.split()[1])
    assert loss == pytest.approx(rows_of(run, "validation")[-1]["loss"], abs=2e-3)
    assert main(["generate", str(run), "--tokens", "4", "--temperature", "0"]) == 0
    forget_end(run, last)
    assert main(["train", *arguments]) == 0
    same(load_file(run / "model" / "model.safetensors"), before)

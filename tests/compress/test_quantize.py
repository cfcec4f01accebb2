"""`jaxtrain quantize`: the folder that it writes is loaded packed, decodes and evaluates."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import byte_model, close, random_params, random_run, resolved, tokens

from jaxtrain.cli import main
from jaxtrain.compress import arguments
from jaxtrain.compress.calibration_text import TokenRows
from jaxtrain.compress.methods import METHODS, MethodOptions
from jaxtrain.compress.quantize import quantize_params, quantize_saved, solve, write_figures
from jaxtrain.compress.stages import Stages
from jaxtrain.evaluation.model import load
from jaxtrain.model import Transformer, cast, split
from jaxtrain.runs.saved import apply_weight_form, is_quantized, load_saved, save_model
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import dequantize, flatten, is_weight
from jaxtrain.weights.params import is_block_matrix
from jaxtrain.weights.quantized import QuantizedWeight
from jaxtrain.weights.stored import stored_bytes

EXPERTS = {"moe": {"experts": 2, "every": 2, "shared_experts": 1}, "depth": 2, "ffn": "swiglu"}
LATENT = {"mla": {"kv_rank": 16, "rope_dim": 4}, "depth": 2, "value_embeddings": False}
BITS = {  # with the scales
    "int8": 9.3, "int4": 4.6, "gptq": 4.6, "awq": 5.1, "w8a8": 9.8, "nf4": 5.2, "float8": 9.3,
}  # fmt: skip


def test_the_table_and_the_command_line_name_the_same_methods():
    assert list(METHODS) == list(arguments.METHODS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "plain"
    return random_run(folder, byte_model(32, "data.train.path=tinyshakespeare", "model.depth=1"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("To be, or not to be, that is the question.\n" * 20)
    return file


def quantized(run, text, method, out, *more):
    return main(
        ["quantize", str(run), "--method", method, "--out", str(out), "--text", str(text), *more]
    )


METHOD = {"quantize": ["--method", "int4"], "shrink": ["--depth", "1"]}
METHOD["prune"] = ["--method", "magnitude", "--sparsity", "0.5"]


@pytest.mark.parametrize("command", ["quantize", "prune", "shrink", "merge"])
@pytest.mark.parametrize("where", ["file/small", "/proc/small"])
def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_read(
    command, where, tmp_path, capsys
):
    (tmp_path / "file").write_text("in the way")
    models = [str(tmp_path / "nowhere")] * (2 if command == "merge" else 1)
    out = tmp_path / where
    assert main([command, *models, *METHOD.get(command, []), "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --out {out}: cannot be written ({out.parent}: ")


def close_logits(method, found, wanted):
    """Rounded activations move them a little."""
    if METHODS[method].activations:
        assert 0 < np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["int4", "w8a8"])
@pytest.mark.slow
def test_a_quantized_folder_is_held_packed_and_computes_as_its_arrays(
    run, text, tmp_path, capsys, method
):
    original = (run / "model" / "model.safetensors").read_bytes()
    assert quantized(run, text, method, tmp_path / "small", "--head") == 0
    assert "| bits per byte |" in capsys.readouterr().out
    said = json.loads((tmp_path / "small" / "quantization.json").read_text())
    model = load(tmp_path / "small")
    chosen = {n for n, s in flatten(model.saved.specs).items() if is_block_matrix(s)} | {"head"}
    arrays = flatten(model.compute_params)
    packed = {n: x for n, x in arrays.items() if isinstance(x, QuantizedWeight)}
    assert packed.keys() == chosen == said["matrices"].keys()
    count = sum(flatten(model.saved.specs)[n].size for n in packed)
    assert 8 * sum(map(stored_bytes, packed.values())) / count < BITS[method]
    live = sum(x.nbytes for x in jax.tree.leaves(model.compute_params))
    assert live == said["after"]["memory_bytes"] < said["before"]["memory_bytes"]
    assert abs(said["after"]["bpb"] - said["before"]["bpb"]) < 0.5
    assert said["after"]["bpb"] != said["before"]["bpb"]
    plain = load(run)
    whole = jax.tree.map(dequantize, jax.device_put(model.saved.params), is_leaf=is_weight)
    plain.params = jax.device_get(whole)
    ids = tokens(2) % 256
    close_logits(method, model.logits(ids), plain.logits(ids))
    texts = [m.generate("To be", tokens=8, temperature=0) for m in (model, plain)]
    assert texts[0] == texts[1] or METHODS[method].activations
    assert (run / "model" / "model.safetensors").read_bytes() == original
    assert quantized(run, text, method, tmp_path / "small") == 2
    assert "already exists and is not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_gptq_moves_the_hidden_states_less_than_rounding_to_nearest(run):
    """Each layer is solved on what the quantized layers before it give."""
    saved = load_saved(run)
    text = np.random.default_rng(0).integers(0, 255, (8, 32), np.int32)
    rows, options = [TokenRows(text)], MethodOptions(16)
    graphdef, narrow = split(Transformer(saved.config.model, 257))[0], jnp.dtype(jnp.float32)
    hidden = lambda p: np.asarray(
        nnx.merge(graphdef, cast(jax.device_put(p), saved.specs, narrow))(jnp.asarray(text)).states
    )
    solved = {"gptq": solve(saved, rows, "gptq", options)[0], "int4": None}
    moved = {}
    for method, done in solved.items():
        small = quantize_params(saved.params, saved.specs, method, options, solved=done)
        moved[method] = np.linalg.norm(hidden(small) - hidden(saved.params))
    assert 0 < moved["gptq"] < 0.9 * moved["int4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "method"),
    [*((EXPERTS, method) for method in ("int4", "w8a8", "nf4")), (LATENT, "gptq")],
    ids=["experts-int4", "experts-w8a8", "experts-nf4", "latent-gptq"],
)
def test_experts_and_latent_attention_are_quantized_as_well(method, fields):
    graphdef, specs = split(Transformer(resolved(**fields), 61))
    params = random_params(specs)
    small = quantize_params(params, specs, method)
    flat = flatten(specs)
    assert {n for n, x in flatten(small).items() if is_weight(x)} == {
        n for n, s in flat.items() if is_block_matrix(s)
    }
    small = cast(jax.device_put(small), specs, jnp.dtype(jnp.float32))
    plain = jax.tree.map(dequantize, small, is_leaf=is_weight)
    model = lambda p: nnx.merge(graphdef, p)
    logits = jax.jit(lambda p: model(p).logits(model(p)(jnp.asarray(tokens(2))).states))
    found, wanted = (logits(p) for p in (small, plain))
    close_logits(method, found, wanted)


@pytest.mark.slow
def test_a_quantized_model_is_evaluated_saved_again_and_not_trained_on(run, text, tmp_path, capsys):
    assert quantized(run, text, "int4", tmp_path / "small") == 0
    assert main(["evaluate", str(tmp_path / "small"), "eval.batch_size=8"]) == 0
    model = load(tmp_path / "small")
    assert np.isfinite(model.log_likelihood(["To be"])).all()
    again = load(model.save(tmp_path / "again"))
    assert is_quantized(again.saved)
    np.testing.assert_array_equal(again.logits(tokens(1)), model.logits(tokens(1)))
    capsys.readouterr()
    small = str(tmp_path / "small")
    assert main(["merge", small, small, "--out", str(tmp_path / "merged")]) == 2
    assert "is quantized; merge the unquantized models" in capsys.readouterr().err
    assert quantized(small, text, "int4", tmp_path / "twice") == 2
    assert "is quantized already" in capsys.readouterr().err
    train = [
        "train",
        "train.device_batch_size=1",
        f"train.init_from={small}",
        f"run.directory={tmp_path}",
        "train.steps=1",
    ]
    assert main([*train, f"data.train.path={text}", "train.batch_size=8"]) == 2
    assert "is quantized: start from the unquantized model" in capsys.readouterr().err


def test_an_option_that_a_method_does_not_read_is_one_line(run, text, tmp_path, capsys):
    for method, option in (
        ("int8", "--alpha=0.2"),
        ("awq", "--act-order"),
        ("nf4", "--group-size=8"),
    ):
        assert quantized(run, text, method, tmp_path / "small", option) == 2
        said = f"{option.split('=')[0]}: --method {method} does not use it"
        assert said in capsys.readouterr().err
    assert quantized(run, text, "int4", tmp_path / "small", "--ray=local") == 2
    assert "--method int4 reads no text: leave it out" in capsys.readouterr().err
    assert quantized(run, text, "w8a8", tmp_path / "small", "--alpha=1.5") == 2
    assert "got '1.5', must be a number from 0 to 1" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def test_w8a8_refuses_latent_attention(run):
    saved = load_saved(run)
    model = saved.config.model.model_copy(update={"mla": resolved(**LATENT).mla})
    latent = saved._replace(config=saved.config.model_copy(update={"model": model}))
    with pytest.raises(UserError, match="model.mla decoding .* take --method int8"):
        quantize_saved(latent, "w8a8")


def test_shapes_and_damage_are_one_line(run, tmp_path):
    saved = load_saved(run)
    with pytest.raises(UserError, match="blocks/attention/.*: int4 packs two inputs a byte in gro"):
        quantize_params(saved.params, saved.specs, "int4", MethodOptions(24))
    with pytest.raises(UserError, match="nf4 packs 64 values .* of 9 x 3 does not allow: int8"):
        METHODS["nf4"].quantize(jnp.ones((9, 3)), None, MethodOptions())
    small = quantize_params(saved.params, saved.specs, "int8")
    broken = {**small["blocks"]["ffn"]}
    broken["up"] = jax.tree.map(lambda x: np.concatenate([x, x]), broken["up"])
    small["blocks"] = {**small["blocks"], "ffn": broken}
    save_model(tmp_path / "bad", saved.config, small, saved.tokenizer)
    with pytest.raises(UserError, match="blocks/ffn/up is .*, the model needs"):
        load_saved(tmp_path / "bad")


def test_the_group_sizes_that_are_written_are_those_of_the_matrices(run, tmp_path):
    """A matrix with fewer inputs than the group size has one group."""
    saved, options = load_saved(run), MethodOptions(1000)
    params = quantize_params(saved.params, saved.specs, "int4", options)
    write_figures(tmp_path, "run", "int4", options, params, {}, {}, Stages("quantize", quiet=True))
    found = json.loads((tmp_path / "quantization.json").read_text())["group_size"]
    inputs = {name: x.shape[-2] for name, x in flatten(saved.params).items() if name in found}
    assert found == inputs and len(set(inputs.values())) > 1


@pytest.mark.parametrize(("bits", "precision"), [("int8", "float32"), ("int4", "bfloat16")])
@pytest.mark.quick("int8-float32")
def test_a_model_trained_with_rounding_is_quantized_to_itself(bits, precision, text, tmp_path):
    """`quantize` takes the group size of training; the exported arrays are the rounded ones."""
    form = {"name": f"fake_{bits}"} | ({"group_size": 8} if bits == "int4" else {})
    run = random_run(
        tmp_path / "run",
        byte_model(32, f"data.train.path={text}", f"model.weight_form={json.dumps(form)}",
                   "model.depth=1",
                   f"train.precision={precision}"),
    )  # fmt: skip
    assert quantized(run, text, bits, tmp_path / "small") == 0
    said = json.loads((tmp_path / "small" / "quantization.json").read_text())
    assert set(said.get("group_size", {}).values()) == ({8} if bits == "int4" else set())
    one, other = load(run), load(tmp_path / "small")
    ids = tokens(2) % 256
    np.testing.assert_allclose(one.logits(ids), other.logits(ids), rtol=1e-5, atol=1e-5)
    assert said["before"]["bpb"] == pytest.approx(said["after"]["bpb"], abs=1e-6)
    plain = apply_weight_form(load_saved(run))
    assert plain.config.model.weight_form is None
    for x, y in zip(*(flatten(m).values() for m in (plain.params, other.saved.params))):
        if is_weight(y):
            stored = jax.jit(dequantize)(y.astype(precision)).astype("float32")
            rounding = 3e-7 if bits == "int8" else 0  # a scale is 1/127 of 127 scales
            close(jnp.asarray(x, precision).astype("float32"), stored, rounding, 0)

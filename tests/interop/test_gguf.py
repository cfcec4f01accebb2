"""GGUF files, read by llama.cpp's own library for them; run by llama.cpp where it is.

Its Python is the one that JAXTRAIN_LLAMA_PYTHON names: it has llama-cpp-python (0.3.36).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import test_export
from chat_cases import TEMPLATES, make_tokenizer
from hf_cases import CASES, VOCAB, prompts, weights
from test_families import ARRAYS, FACTS, build, logits_of, write_checkpoint
from tiny import LLAMA, random_params, random_run

from jaxtrain.cli import main
from jaxtrain.data.tokenizer.tokenizer import byte_alphabet
from jaxtrain.interop import gguf_file
from jaxtrain.interop.configs import fitting_family
from jaxtrain.interop.gguf_file import OUTTYPES, FamilyModel, write_gguf
from jaxtrain.interop.gguf_tokenizer import Vocabulary
from jaxtrain.interop.load import load_checkpoint, open_checkpoint
from jaxtrain.model import ModelConfig, Transformer, resolve_model, split
from jaxtrain.runs import arguments
from jaxtrain.runs.export_gguf import export_summary
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError

SCRIPT = Path(__file__).with_name("run_llama_cpp.py")
PYTHON = os.environ.get("JAXTRAIN_LLAMA_PYTHON")
# Golden models that llama.cpp computes otherwise, and the reason for each.
REFUSED = {
    "qwen3 tied mha biases": "no tensor for model.layers.0.self_attn.q_proj.bias",
    "gemma2": r"no factor 0\.204124 on the scores \(it has 0\.25\)",
    "gemma mha untied": "no head apart from the embedding",
    "gemma2 mqa untied": "no head apart from the embedding",
    "nanochat": "no architecture for models of the family nanochat; .* llama, mistral",
}
LEFT_OUT = {*REFUSED, "nanochat mqa", "nanochat mha"}
LETTERS = Vocabulary("gpt2", byte_alphabet()[:VOCAB], [1] * VOCAB, "qwen2", ["a b"])


def source_of(name, folder):
    """A golden model and how its family lays it out."""
    opened = open_checkpoint(write_checkpoint(folder, name))
    c, _, specs = build(opened)
    family, config = fitting_family(c, VOCAB, opened.family.model_type)
    return FamilyModel(family, config, c, specs, load_checkpoint(opened, specs))


def wide(**changes):
    """A random Llama of ours with 256 channels: (its configuration, graphdef, source)."""
    fields = {**LLAMA, "width": 256, "head_dim": 32, **changes}
    c = resolve_model(ModelConfig.model_validate(fields), 32)
    graphdef, specs = split(Transformer(c, VOCAB))
    family, config = fitting_family(c, VOCAB, "llama")
    return c, graphdef, FamilyModel(family, config, c, specs, random_params(specs))


def fields_of(path):
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}


def tensors_of(path):
    """name -> (type, float32 values)."""
    return {
        t.name: (t.tensor_type, gguf.dequantize(t.data, t.tensor_type))
        for t in gguf.GGUFReader(path).tensors
    }


def in_pairs(x, heads):
    """A matrix of Llama's queries or keys, [out, in], with channels that turn together in turn."""
    size = len(x) // heads
    order = [h * size + i + half for h in range(heads) for i in range(size // 2)
             for half in (0, size // 2)]  # fmt: skip
    return x[order]


@pytest.mark.parametrize("name", [name for name in CASES if name not in LEFT_OUT])
@pytest.mark.quick("llama biases mqa wide heads", "gemma3", "gpt2")
def test_a_file_holds_the_tensors_of_the_checkpoint(name, tmp_path):
    source, path = source_of(name, tmp_path / "in"), tmp_path / "model.gguf"
    written = write_gguf(path, source, LETTERS, "f32", {"bos": 1})
    found, facts = tensors_of(path), fields_of(path)
    arch = facts["general.architecture"]
    names = gguf.get_tensor_name_map(gguf_file.architecture_of(
        source.family.model_type, source.model).key, source.model.depth)  # fmt: skip
    theirs = weights(FACTS[name]["shapes"])
    for full, x in theirs.items():
        ours = names.get_name(full, try_suffixes=(".weight", ".bias"))
        if arch == "llama" and ".q_proj" in full:
            x = in_pairs(x, source.model.heads)
        if arch == "llama" and ".k_proj" in full:
            x = in_pairs(x, source.model.kv_heads)
        if arch.startswith("gemma") and "norm" in full:
            x = x + 1  # llama.cpp multiplies by the weight itself
        if arch == "gpt2" and x.ndim == 2 and ".h." in full:
            x = x.T  # Conv1D has [in, out]
        np.testing.assert_allclose(found.pop(ours)[1], x, rtol=1e-6, atol=0, err_msg=full)
    assert found.keys() <= {"rope_freqs.weight"}
    assert written.bytes == path.stat().st_size and written.architecture == arch
    c = source.model
    assert facts[f"{arch}.embedding_length"] == c.width
    assert facts[f"{arch}.feed_forward_length"] == c.hidden
    assert facts[f"{arch}.attention.head_count_kv"] == c.kv_heads
    assert facts[f"{arch}.attention.key_length"] == c.head_dim
    assert facts[f"{arch}.block_count"] == c.depth


@pytest.mark.slow
def test_positions_and_windows_are_said(tmp_path):
    told, shortened = {}, {}
    for name in ("llama rope llama3", "qwen3", "gemma3", "mistral window"):
        path = tmp_path / f"{name}.gguf"
        source = source_of(name, tmp_path / name)
        written = write_gguf(path, source, LETTERS, "f32", {"bos": 1})
        told[name] = fields_of(path)
        shortened[name] = "window: llama.cpp's llama has none" in export_summary(path, written)
    # Turns over the context of 16 tokens: 2.5, 0.1, ...; kept from 4, divided by 4 up to 1.
    kept = (16 / (2 * np.pi) - 1) / 3
    divisors = tensors_of(tmp_path / "llama rope llama3.gguf")["rope_freqs.weight"][1]
    np.testing.assert_allclose(divisors, [1 / (kept + (1 - kept) / 4), 4, 4, 4], rtol=1e-6)
    assert told["llama rope llama3"]["llama.rope.freq_base"] == 500
    yarn = {
        key.split("rope.scaling.")[-1]: x for key, x in told["qwen3"].items() if "scaling" in key
    }
    assert yarn == {
        "type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
    }  # fmt: skip
    gemma = {key.removeprefix("gemma3."): x for key, x in told["gemma3"].items()}
    assert gemma["attention.sliding_window"] == 7
    assert gemma["attention.sliding_window_pattern"] == [True, False, True]
    assert (gemma["rope.freq_base"], gemma["rope.freq_base_swa"]) == (1e5, 100)
    # llama.cpp has no windows in a Llama: beyond one it would compute another model.
    assert told["mistral window"]["llama.context_length"] == 7
    assert [name for name, said in shortened.items() if said] == ["mistral window"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused(name, tmp_path):
    with pytest.raises(UserError, match=REFUSED[name]):
        write_gguf(tmp_path / "x.gguf", source_of(name, tmp_path), LETTERS, "f32", {})
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("outtype", OUTTYPES)
@pytest.mark.quick("f16", "q8_0")
def test_each_type_is_within_its_error(outtype, tmp_path):
    """Rows of 256 and of 320; those of 320 are no whole number of super-blocks."""
    _, _, source = wide(depth=1, hidden=320)
    exact, path = tmp_path / "exact.gguf", tmp_path / "model.gguf"
    write_gguf(exact, source, LETTERS, "f32", {})
    written = write_gguf(path, source, LETTERS, outtype, {})
    kind = OUTTYPES[outtype][0]
    assert fields_of(path)["general.file_type"] == OUTTYPES[outtype][1]
    dtypes = {"f32": np.float32, "f16": np.float16, "bf16": jax.numpy.bfloat16}
    found = tensors_of(path)
    for name, (_, x) in tensors_of(exact).items():
        stored, back = found[name]
        if x.ndim == 1:
            assert stored.name == "F32" and (back == x).all()
        elif outtype in dtypes:
            assert stored is kind and (back == x.astype(dtypes[outtype]).astype(np.float32)).all()
        elif outtype == "q8_0":
            blocks = np.abs(x).reshape(len(x), -1, 32).max(-1, keepdims=True)
            error = np.abs(back - x).reshape(len(x), -1, 32)
            # Half a step, and the rounding of the scale to float16 at code 127.
            assert stored is kind and (error <= 0.565 * blocks / 127).all()
        else:
            narrow = name.endswith("ffn_down.weight")
            assert stored.name == ("Q5_0" if narrow else "Q4_K"), name
            assert np.square(back - x).sum() < (0.004 if narrow else 0.006) * np.square(x).sum()
    for name, loss in written.losses.items():
        assert loss.relative < {"F32": 1e-12, "F16": 1e-6, "BF16": 1e-4}.get(name, 6e-3)
    assert written.weights == sum(x.size for _, x in found.values())


def test_weights_beyond_float16_are_refused(tmp_path):
    source = source_of("llama", tmp_path)
    params = {**source.params, "head": np.asarray(source.params["head"]) * 1e6}
    huge, path = source._replace(params=params), tmp_path / "x.gguf"
    with pytest.raises(UserError, match=r"output\.weight has values beyond .* --outtype bf16"):
        write_gguf(path, huge, LETTERS, "q8_0", {})
    assert not list(tmp_path.glob("*.gguf*"))
    write_gguf(path, huge, LETTERS, "bf16", {})


# ---- the command -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A run directory of Llama's shape; bytes."""
    fields = [f"model.{name}={json.dumps(value)}" for name, value in LLAMA.items()]
    fields += ["data.tokenizer.name=bytes", "train.sequence_length=32", "run.name=small"]
    return random_run(tmp_path_factory.mktemp("llama"), fields)


def test_the_command_writes_a_file_and_says_what_rounding_lost(llama, tmp_path, capsys):
    assert arguments.OUTTYPES == tuple(OUTTYPES)
    path = tmp_path / "new" / "small.gguf"
    command = ["export", str(llama), str(path), "--format", "gguf"]
    assert main([*command, "--outtype", "q8_0"]) == 0
    said = capsys.readouterr().out.splitlines()
    size = f"{path.stat().st_size:,} bytes"
    assert said[0].startswith(f"exported {path} as llama: {size}, 11.")
    assert said[0].endswith("bits a parameter, context of 32 tokens")
    assert "Q8_0     13 tensors, 20,512 parameters, relative squared error 2." in said[1]
    facts = fields_of(path)
    assert facts["general.name"] == "small" and facts["llama.vocab_size"] == 257
    assert facts["tokenizer.ggml.tokens"][256] == "<|bos|>"
    assert facts["tokenizer.ggml.bos_token_id"] == facts["tokenizer.ggml.eos_token_id"] == 256
    assert facts["tokenizer.ggml.add_bos_token"] is True
    before = path.read_bytes()
    for arguments_, message in (
        (command, "already exists; name another file"),
        ([*command[:2], str(tmp_path), *command[3:]], "needs a file name that ends in .gguf"),
        ([*command, "--dtype", "float16"], "use --outtype"),
        ([*command[:3], "--outtype", "f16"], "--outtype applies only to --format gguf"),
    ):
        assert main(arguments_) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]


def test_a_chat_goes_along_with_its_template_and_its_end(tmp_path, monkeypatch):
    """The EOS of an imported model may be one of several ids, and may be 0."""
    cut = make_tokenizer().replace('"use_regex":false', '"use_regex":true', 1)  # as GPT-2 cuts
    monkeypatch.setattr(test_export, "make_tokenizer", lambda: cut)
    folder, special = tmp_path / "model", {"bos_token": "<bos>", "eos_token": "</s>"}
    test_export.chat_model(folder, TEMPLATES["mistral"], special)
    saved = load_saved(folder)
    end = saved.tokenizer.specials["</s>"]
    for eos, wanted in (([0, end], 0), (0, 0), (end, end)):
        came = FACTS["llama"]["config"] | {"vocab_size": 320, "eos_token_id": eos}
        (folder / "huggingface").mkdir(exist_ok=True)
        (folder / "huggingface" / "config.json").write_text(json.dumps(came))
        path = tmp_path / f"{wanted}-{type(eos).__name__}.gguf"
        assert main(["export", str(folder), str(path), "--format", "gguf"]) == 0
        facts = fields_of(path)
        assert facts["tokenizer.chat_template"] == TEMPLATES["mistral"]
        assert facts["tokenizer.ggml.eot_token_id"] == end
        assert facts["tokenizer.ggml.eos_token_id"] == wanted
        assert len(facts["tokenizer.ggml.tokens"]) == 320


def test_a_file_is_whole_or_not_there(llama, tmp_path, monkeypatch):
    """As where the disk is full: what has been written goes."""
    written = []

    def encoded(x, kind):
        written.append(x.shape)
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        return real(x, kind)

    real = gguf_file.encoded
    monkeypatch.setattr(gguf_file, "encoded", encoded)
    assert main(["export", str(llama), str(tmp_path / "x.gguf"), "--format", "gguf"]) == 2
    assert len(written) == 5 and not [*tmp_path.iterdir()]


def test_without_the_library_one_line_says_how_to_get_it(llama, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jaxtrain.interop.gguf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["export", str(llama), str(tmp_path / "x.gguf"), "--format", "gguf"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs the package gguf: uv sync --extra gguf" in line


@pytest.mark.slow
def test_a_quantized_model_is_refused(llama, tmp_path, capsys):
    ours, out = tmp_path / "int4", tmp_path / "x.gguf"
    assert main(["quantize", str(llama), "--method", "int8", "--out", str(ours),
                 "--text", __file__]) == 0  # fmt: skip
    capsys.readouterr()
    assert main(["export", str(ours), str(out), "--format", "gguf"]) == 2
    assert "is quantized already" in capsys.readouterr().err and not out.exists()


# ---- llama.cpp itself ------------------------------------------------------------------------


def run_llama_cpp(files, tokens, texts, folder):
    """llama.cpp's logits and ids are beside each file."""
    np.save(folder / "tokens.npy", tokens)
    (folder / "texts.json").write_text(json.dumps(texts))
    inputs = [str(folder / "tokens.npy"), str(folder / "texts.json")]
    subprocess.run([str(PYTHON), str(SCRIPT), *inputs, *map(str, files)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs llama-cpp-python (JAXTRAIN_LLAMA_PYTHON)")
def test_llama_cpp_computes_what_we_do(tmp_path):
    """Every family, in float32."""
    files = {}
    for name in CASES:
        if name not in LEFT_OUT:
            path = tmp_path / f"{name.replace(' ', '_')}.gguf"
            source = source_of(name, tmp_path / "in" / name)
            files[path] = (name, write_gguf(path, source, LETTERS, "f32", {"bos": 1}))
    run_llama_cpp(files, prompts(), [], tmp_path)
    for path, (name, written) in files.items():
        seen = slice(0, written.context_length)
        # GELU is a table of float16 there.
        atol = 1e-4 if name.startswith(("llama", "mi", "qwen")) else 3e-2
        np.testing.assert_allclose(
            np.load(f"{path}.logits.npy")[:, seen], ARRAYS[f"{name}/logits"][:, seen],
            rtol=0, atol=atol, err_msg=name,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs llama-cpp-python (JAXTRAIN_LLAMA_PYTHON)")
def test_llama_cpp_runs_what_is_rounded(tmp_path):
    """Logits of a random model of four layers: each type's error is a share of their size."""
    _, graphdef, source = wide(depth=4, hidden=512)
    files = {tmp_path / f"{outtype}.gguf": outtype for outtype in OUTTYPES}
    for path, outtype in files.items():
        write_gguf(path, source, LETTERS, outtype, {"bos": 1})
    run_llama_cpp(files, prompts(), [], tmp_path)
    wanted = np.asarray(logits_of(graphdef, source.params, prompts()))[..., :VOCAB]
    most = {"f32": 1e-6, "f16": 5e-4, "bf16": 4e-3, "q8_0": 1e-2, "q4_k": 0.1}
    for path, outtype in files.items():
        error = np.load(f"{path}.logits.npy") - wanted
        share = np.sqrt(np.square(error).mean() / np.square(wanted).mean())
        print(f"{outtype}: root mean square error of the logits {share:.2g} of their size")
        assert share < most[outtype], outtype

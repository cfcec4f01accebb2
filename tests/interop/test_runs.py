"""The commands: a checkpoint becomes a run, a run starts from it, and goes back."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from hf_cases import weights
from safetensors.numpy import load_file, save_file
from test_families import FACTS, write_checkpoint
from tiny import CACHE, byte_model, close, mesh_of, random_run, run_overrides, same
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxtrain.cli import main as interop
from jaxtrain.config import load_config
from jaxtrain.data.tokenizer.tokenizer import byte_alphabet, byte_tokenizer
from jaxtrain.evaluation import evaluate
from jaxtrain.inference import generate
from jaxtrain.interop.companions import chat_template, prompting
from jaxtrain.interop.pretrained import load_init_params
from jaxtrain.interop.tokenizer_json import tokenizer_json
from jaxtrain.main import main
from jaxtrain.model import Transformer, resolve_model, split
from jaxtrain.parallel import shardings
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LETTERS = "\n !',.:;?ABCDEFGHIJKLMNOPQRSTUVWYabcdefghijklmnopqrstuvwxyz"


def write_tokenizer(folder, extra=()):
    """A byte-level tokenizer of 90 tokens that puts BOS in front, and a chat template."""
    letters = byte_alphabet()
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {letters[ord(x)]: i + 3 for i, x in enumerate(LETTERS)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<unk>", "<s>", "</s>", *extra])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    inner.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """(checkpoint folder, run directory) of a small llama with rows that no token has."""
    folder = tmp_path_factory.mktemp("hf")
    write_tokenizer(write_checkpoint(folder / "in", "llama"))
    assert interop(["import", str(folder / "in"), str(folder / "run")]) == 0
    return folder / "in", folder / "run"


@pytest.mark.slow
def test_an_imported_run_generates_and_is_evaluated(imported, capsys):
    _, run = imported
    greedy = ["--tokens", "6", "--temperature", "0", "--prompt", "To be"]
    assert generate.main([str(run), *greedy]) == 0
    assert capsys.readouterr().out.startswith("To be")
    assert evaluate.main([str(run), "eval.batch_size=8", f"data.cache_dir={CACHE}"]) == 0
    loss = float(capsys.readouterr().out.split()[1])
    assert 3 < loss < 12


def test_tokenizer_template_and_stops_come_along(imported):
    _, run = imported
    saved = load_saved(run)
    assert chat_template(run / "model") == TEMPLATE
    assert saved.prompting == (True, (1, 2, 5))
    assert saved.params["embed"].shape[0] == 96 > saved.tokenizer.vocab_size


def test_the_way_back_is_the_checkpoint(imported, tmp_path, capsys):
    folder, run = imported
    assert interop(["export", str(run), str(tmp_path / "out")]) == 0
    assert "as llama" in capsys.readouterr().out
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads(
            (folder / name).read_text()
        )
    assert interop(["export", str(run), str(tmp_path / "out")]) == 2
    assert "holds a checkpoint already" in capsys.readouterr().err


def test_shards_are_read_and_written(imported, tmp_path):
    folder, run = imported
    shards = tmp_path / "shards"
    assert interop(["export", str(run), str(shards), "--shard-bytes", "20000"]) == 0
    files = sorted(shards.glob("model-*-of-*.safetensors"))
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and {f.name for f in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == 4 * sum(
        x.size for x in load_file(folder / "model.safetensors").values()
    )
    assert interop(["import", str(shards), str(tmp_path / "again")]) == 0
    weights_of = lambda run: (run / "model" / "model.safetensors").read_bytes()
    assert weights_of(tmp_path / "again") == weights_of(run)


@pytest.mark.slow
def test_a_run_starts_from_it_and_hands_its_files_on(imported, tmp_path, capsys):
    """After a step of rate nothing the parameters are those that it started from."""
    _, run = imported
    keep = run_overrides(tmp_path, train__steps=1, sample__tokens=2)
    drop = "model.", "data.tokenizer", "data.validation.fraction"
    keep = [x for x in keep if not x.startswith(drop)]
    keep += ["optim.name=adamw", "optim.learning_rate=1e-9", "data.validation.name=none"]
    assert main([*keep, f"train.init_from={run}"]) == 2
    assert "data.train.path: training from" in capsys.readouterr().err
    keep += ["data.train.path=tinyshakespeare"]
    assert main([*keep, f"train.init_from={run}"]) == 0, capsys.readouterr().err
    trained, start = load_saved(tmp_path / "tiny"), load_saved(run)
    assert trained.config.model.heads == start.config.model.heads == 4
    close(trained.params, start.params)
    assert trained.tokenizer.fingerprint == start.tokenizer.fingerprint
    assert chat_template(tmp_path / "tiny" / "model") == TEMPLATE


def test_a_run_or_a_checkpoint_to_start_from(imported):
    """Both give the same configuration and the same parameters on a mesh; fields by hand win."""
    folder, run = imported
    mesh, params = mesh_of(data=2, tensor=2), []
    for start in (folder, run):
        c = load_config(None, [f"train.init_from={start}", "model.remat=block"])
        assert (c.model.heads, c.model.kv_heads, c.model.remat) == (4, 2, "block")
        assert c.data.tokenizer.model_dump()["path"].startswith(str(start))
        specs = load_saved(run).specs
        params.append(load_init_params(str(start), specs, shardings(specs, mesh)))
    same(*params)
    assert params[0]["embed"].sharding.spec[0] == "tensor"
    with pytest.raises(UserError, match="no run, no model folder and no checkpoint"):
        load_config(None, [f"train.init_from={folder.parent}"])
    other = c.model.model_copy(update={"hidden": 64})
    _, specs = split(Transformer(resolve_model(other, 32), 90))
    with pytest.raises(UserError, match=r"needs blocks/ffn/down of shape \(2, 64, 32\)"):
        load_init_params(str(run), specs, shardings(specs, mesh))
    _, specs = split(Transformer(resolve_model(c.model.model_copy(update={"prompt": 3}), 32), 90))
    with pytest.raises(UserError, match="has no prompt, which the model section of the run asks"):
        load_init_params(str(folder), specs, shardings(specs, mesh))


OTHER = {
    "model.depth=3": "model.depth 2 (given: 3)",
    "model.head_dim=16": "model.head_dim 8 (given: 16)",
    "model.hidden=64": "model.hidden 48 (given: 64)",
    "model.kv_heads=3": "model.kv_heads 2 (given: 3)",
    "model.ffn=geglu": "model.ffn swiglu (given: geglu)",
    "model.moe.experts=4": "model.moe None",
    "model.rope_base=500": "model.rope_base 10000.0 (given: 500)",
    "model.norm_eps=1e-3": "model.norm_eps 1e-06 (given: 1e-3)",
    "model.window_pattern=SL": "model.window_pattern L (given: SL)",
    "model.logit_softcap=15": "model.logit_softcap None (given: 15)",
    "model.qkv_bias=true": "model.qkv_bias False (given: True)",
}


@pytest.mark.parametrize("given", OTHER)
def test_another_function_than_that_of_the_weights_is_refused(given, imported):
    for start in imported:
        with pytest.raises(UserError, match=re.escape(OTHER[given]) + ".*leave these fields out"):
            load_config(None, [f"train.init_from={start}", given])


def test_the_vocabulary_of_a_checkpoint_has_its_rows(imported):
    folder, _ = imported
    with pytest.raises(UserError, match=re.escape("model.vocab_multiple 96 (given: 64)")):
        load_config(None, [f"train.init_from={folder}", "model.vocab_multiple=64"])
    load_config(None, [f"train.init_from={folder}", "model.vocab_multiple=32"])


def test_what_is_the_same_or_free_may_be_given(imported):
    """How the model runs, a longer context, and what the model has already."""
    same_or_free = [
        "model.depth=2", "model.norm_eps=1e-6", "model.window_pattern=LL", "model.short_window=9",
        "model.qk_scale=1.0", "model.remat=block", "model.scan_layers=true", "model.kernels=xla",
        "model.document_mask=true", "model.ffn_tiles=2", "model.init=mup",
        "model.context_length=256",
        "model.rope_scaling={name: linear, factor: 4}", "model.hidden=48", "model.rope_base=1e4",
    ]  # fmt: skip
    for start in imported:
        c = load_config(None, [f"train.init_from={start}", *same_or_free])
        assert (c.model.context_length, c.model.rope_scaling.factor) == (256, 4.0)


def test_experts_keep_their_number_when_the_loss_beside_them_changes(tmp_path):
    fields = {"depth": 1, "width": 32, "head_dim": 8, "moe": {"experts": 4, "top_k": 1}}
    given = [f"model={fields}", "data.tokenizer.name=bytes"]
    run = random_run(tmp_path, given)
    free = ["model.moe.aux_loss=0.5", "model.moe.remat=block"]
    c = load_config(None, [f"train.init_from={run}", *free])
    assert (c.model.moe.experts, c.model.moe.top_k, c.model.moe.aux_loss) == (4, 1, 0.5)
    with pytest.raises(UserError, match="model.moe .*leave these fields out"):
        load_config(None, [f"train.init_from={run}", "model.moe.top_k=2"])


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "nanochat"])
def test_a_tokenizer_that_would_be_trained_gives_way_to_that_of_the_weights(imported, kind):
    tokenizer = f"data.tokenizer={{name: {kind}, vocab_size: 300}}"
    c = load_config(None, [f"train.init_from={imported[1]}", tokenizer])
    assert c.data.tokenizer.model_dump()["path"].startswith(str(imported[1]))


@pytest.mark.slow
def test_another_tokenizer_than_that_of_the_weights_is_refused(imported, tmp_path, capsys):
    write_tokenizer(tmp_path, ["<other>"])
    keep = run_overrides(tmp_path, train__init_from=imported[1])
    drop = "model.", "data.tokenizer", "data.validation.fraction"
    keep = [x for x in keep if not x.startswith(drop)]
    tokenizer = f"data.tokenizer={{name: huggingface, path: {tmp_path / 'tokenizer.json'}}}"
    assert main([*keep, tokenizer]) == 2
    assert "was trained with another tokenizer than data.tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def test_our_own_model_says_what_does_not_fit(tmp_path, capsys):
    run = random_run(tmp_path / "run", byte_model(32))
    assert interop(["export", str(run), str(tmp_path / "no")]) == 2
    message = capsys.readouterr().err
    for part in ("no value_embeddings True", "no smear True", "factor", "on the scores"):
        assert part in message
    assert not (tmp_path / "no").exists()


def test_our_own_model_goes_out_as_nanochat_and_comes_back(own_model, tmp_path, capsys):
    assert interop(["export", str(own_model), str(tmp_path / "out")]) == 0
    assert "as nanochat" in capsys.readouterr().out
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out["model.embed_tokens.weight"].shape == out["lm_head.weight"].shape == (257, 32)
    assert interop(["import", str(tmp_path / "out"), str(tmp_path / "run")]) == 0
    before, after = load_saved(own_model).params, load_saved(tmp_path / "run").params
    same(after["blocks"], before["blocks"])
    np.testing.assert_array_equal(after["embed"], before["embed"][:257])


def test_special_tokens_beyond_the_embedding_are_left_out(tmp_path):
    extra = [f"<image {i}>" for i in range(96 - 63)] + ["<beyond>"]
    write_tokenizer(write_checkpoint(tmp_path / "in", "llama"), extra)
    assert interop(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 0
    assert load_saved(tmp_path / "run").tokenizer.vocab_size == 96


# ---- tokenizers ------------------------------------------------------------------------------


def test_our_tokenizers_as_tokenizer_json(whole):
    text = "First Citizen:\nBefore we proceed, hear me speak.\n\n  Na\u00efve \u4e16\u2581!"
    for tokenizer in (load_saved(whole).tokenizer, byte_tokenizer()):
        inner = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer))
        plain = text.replace("\u2581", "")  # which sentencepiece cannot tell from a space
        ids = inner.encode(plain).ids
        np.testing.assert_array_equal(ids, tokenizer.encode(plain))
        assert inner.decode(ids) == plain
        assert inner.get_vocab_size() == tokenizer.vocab_size


def test_our_own_models_begin_and_end_with_bos(whole):
    tokenizer = load_saved(whole).tokenizer
    assert prompting(whole / "model", tokenizer) == (True, (tokenizer.bos_id,))


# ---- what is refused -------------------------------------------------------------------------


def damaged(folder, name, change):
    """The llama checkpoint with one of its tensors changed (None: taken away)."""
    write_tokenizer(write_checkpoint(folder, "llama"))
    tensors = weights(FACTS["llama"]["shapes"])
    tensors.pop(name, None)
    save_file(tensors | ({} if change is None else {name: change}), folder / "model.safetensors")


Q = "model.layers.1.self_attn.q_proj.weight"
FP8 = np.ones((32, 32), ml_dtypes.float8_e4m3fn)
NAN = np.full((32, 32), np.nan, np.float32)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (Q, None, f"needs tensor {Q}, which is missing"),
        (Q + "_scale", np.ones(3, np.float32), f"has no tensor {Q}_scale"),
        (Q, np.ones((16, 32), np.float32), f"needs {Q} of shape (32, 32), but it is (16, 32)"),
        (Q, NAN, f"{Q} holds NaN or infinite values"),
        (Q, FP8, f"{Q} is stored as F8_E4M3: quantised checkpoints are not"),
    ],
    ids=["missing", "extra", "shape", "nan", "fp8"],
)
def test_a_damaged_tensor_is_named(name, change, message, tmp_path, capsys):
    damaged(tmp_path / "in", name, change)
    assert interop(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type mamba is not known; there are gemma, gemma2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config (fp8)"),
        ({"hidden_act": "relu"}, "hidden_act relu is not supported, only silu"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type dynamic is not supported"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "rope_type dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_attention_heads": "4"}, 'num_attention_heads is "4", but must be a whole number'),
        ({"num_attention_heads": None}, "num_attention_heads is null, but must be a whole number"),
        ({"hidden_size": 32.5}, "hidden_size is 32.5, but must be a whole number above 0"),
        ({"vocab_size": "96"}, 'vocab_size is "96", but must be a whole number'),
        ({"rms_norm_eps": "small"}, 'rms_norm_eps is "small", but must be a number above 0'),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is null, but must be true or false"),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear", but must be an object'),
        ({"rope_parameters": [1]}, "rope_parameters is [1], but must be an object"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": "2"}},
            'factor is "2", but must be a number',
        ),
    ],
)
def test_an_unsupported_config_is_named(change, message, tmp_path, capsys):
    write_tokenizer(write_checkpoint(tmp_path / "in", "llama", **change))
    assert interop(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    for source, message in (
        (str(tmp_path), "has no config.json"),
        ("no/such/place", "is not a folder, nor OWNER/NAME"),
    ):
        assert interop(["import", source, str(tmp_path / "run")]) == 2
        assert message in capsys.readouterr().err
    write_checkpoint(tmp_path / "in", "llama")
    assert interop(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    file = tmp_path / "in" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert interop(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 2
    assert "is cut off" in capsys.readouterr().err


SHARD = "model-00001-of-00002.safetensors"
FILES = {
    "no object": ("config.json", "[]", "config.json holds a list, but must be an object"),
    "index": ("model.safetensors.index.json", "{bad", "index.json is not valid JSON: Expecting"),
    "index empty": ("model.safetensors.index.json", "{}", "weight_map must be an object"),
    "shard": (
        "model.safetensors.index.json", json.dumps({"weight_map": {Q: SHARD}}),
        f"index.json names the file {SHARD}, which is missing",
    ),
    "tokenizer": ("tokenizer.json", "{bad", "tokenizer.json is not valid JSON: Expecting"),
    "tokenizer list": ("tokenizer.json", "[]", "tokenizer.json holds a list"),
    "settings": ("tokenizer_config.json", "{bad", "tokenizer_config.json is not valid JSON"),
    "generation": ("generation_config.json", "{bad", "generation_config.json is not valid JSON"),
    "pickled": ("pytorch_model.bin", "x", "pytorch_model.bin is pickled, which is not read: open"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_by_import_and_start(name, tmp_path, capsys):
    file, text, message = FILES[name]
    write_tokenizer(write_checkpoint(tmp_path / "in", "llama"))
    if file == "pytorch_model.bin":
        (tmp_path / "in" / "model.safetensors").unlink()
    (tmp_path / "in" / file).write_text(text)
    assert interop(["import", str(tmp_path / "in"), str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "in") in line and message in line
    assert not (tmp_path / "run").exists()
    if "tokenizer" not in name:  # of which a run's preparation reads the file
        with pytest.raises(UserError, match=re.escape(message)):
            load_config(None, [f"train.init_from={tmp_path / 'in'}"])


def test_a_dtype_that_is_none_is_asked_for(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "in", "llama", dtype=None, torch_dtype="auto")
    write_tokenizer(folder)
    assert interop(["import", str(folder), str(tmp_path / "run")]) == 0
    export = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert interop(export) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json: dtype auto cannot be written; set --dtype to one of bfloat16" in line
    assert not (tmp_path / "out").exists()
    assert interop([*export, "--dtype", "bfloat16"]) == 0

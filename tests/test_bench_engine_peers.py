"""Other stacks beside the inference engine: what they are asked, and where their rows stand."""

import importlib

import pytest

from benchmarks import peers, tables
from benchmarks.engine_peers import Peers, llama_of, peer_rows, with_peer_rows
from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import vocab_size_of
from jaxtrain.model import Transformer, active, resolve_model, split

main = importlib.import_module("benchmarks.__main__").main
SIZES = {"batches": [1, 32], "prompt": 512, "new": 256, "many": 32, "repeats": 3}
ECHO = """
import json, sys
row = {"name": "engine", "shape": "1 x (512 + 256)", "backend": sys.argv[1]}
print(json.dumps(row | {"decode_tokens_per_s": 50.0, "asked": json.loads(sys.argv[2])}))
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Of nanochat, beside a script that answers with its arguments."""
    monkeypatch.setattr(peers, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "peer_engine.py").write_text(ECHO)
    folder = tmp_path / "clone" / "nanochat"
    folder.mkdir(parents=True)
    for name in ("gpt.py", "engine.py"):
        (folder / name).write_text("")
    return folder.parent


def test_peers_get_the_configurations_size(checkout, capsys):
    llama, nanochat = peer_rows(Peers(True, checkout), "gpt_d12", ["model.kv_heads=2"], SIZES)
    assert llama["asked"] == SIZES | {
        "model": {
            "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128,
            "vocab_size": 32768, "tie_word_embeddings": False, "max_position_embeddings": 768,
        }
    }  # fmt: skip
    assert nanochat["asked"] == SIZES | {
        "model": {
            "sequence_len": 2048, "vocab_size": 32768, "n_layer": 12, "n_head": 6, "n_kv_head": 2,
            "n_embd": 768,
        },
        "checkout": str(checkout),
    }  # fmt: skip
    assert "a gated FFN of 2048, not one without a gate of 3072" in llama["note"]
    assert "transformers, 1 x (512 + 256): 50 tokens/s, decoding" in capsys.readouterr().err
    assert peer_rows(Peers(), "gpt_d12", [], SIZES) == []


@pytest.mark.parametrize("name", ["gpt_d12", "gpt_d24", "llama_8b"])
def test_llama_has_our_parameters_in_matmuls(name):
    c = load_config(find_config(name), [])
    model, vocab_size = resolve_model(c.model, c.train.sequence_length), vocab_size_of(c.data)
    specs = split(Transformer(model, vocab_size))[1]
    ours = active(model, specs)
    s, _ = llama_of(name, model, vocab_size)
    heads = 2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"]
    block = s["hidden_size"] * (s["head_dim"] * heads + 3 * s["intermediate_size"])
    llama = s["num_hidden_layers"] * block + s["vocab_size"] * s["hidden_size"]
    assert llama == pytest.approx(ours, rel=1e-4)


REFUSED = {
    "--transformers model.moe={experts: 4}": "--transformers: gpt_d12 has experts",
    "--peer .": "no checkout of nanochat, it has no nanochat/gpt.py",
    "--peer clone": "it has no nanochat/engine.py",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_no_peer_is_one_line(line, checkout, monkeypatch, capsys):
    (checkout / "nanochat" / "engine.py").unlink()
    monkeypatch.chdir(checkout.parent)
    option, _, value = line.partition(" ")
    assert main(["engine", "--config", "gpt_d12", option, value]) == 2
    assert REFUSED[line] in capsys.readouterr().err
    assert main(["decode", "--transformers"]) == 2
    assert "--transformers is for bench engine" in capsys.readouterr().err


def test_peers_stand_behind_ours_with_a_ratio():
    """Of the first dtype of the cache; none where ours has failed or is not measured."""
    row = {"name": "engine", "shape": "1 x (512 + 256)"}
    more = {"name": "engine", "shape": "32 x (512 + 256)"}
    ours = [
        row | {"backend": "bf16", "tokens_per_s": 600.0, "decode_tokens_per_s": 800.0},
        row | {"backend": "int8", "tokens_per_s": 100.0, "decode_tokens_per_s": 100.0},
        more | {"backend": "bf16", "failed": "out of memory"},
    ]
    theirs = [
        row | {"backend": "peer", "tokens_per_s": 400.0, "decode_tokens_per_s": 400.0},
        more | {"backend": "peer", "tokens_per_s": 400.0, "decode_tokens_per_s": 400.0},
        {"name": "first_token", "shape": "32 x 512", "backend": "peer", "alone_ms": 5.0},
    ]
    rows = with_peer_rows(ours, theirs)
    assert rows[:3] == ours and rows[4:] == theirs[1:]
    assert (rows[3]["our_ratio"], rows[3]["our_decode_ratio"]) == (1.5, 2.0)
    record = {"rows": rows, "device": "H200", "device_count": 1, "variant": "bf16"}
    header, cells = tables.tabulate("engine", [record], [])
    assert header[-3:] == ["ours, times this", "decoding", "figures"]
    assert [(x[2], x[-3], x[-2]) for x in cells[:3]] == [
        ("bf16", "-", "-"), ("int8", "-", "-"), ("peer", "1.50", "2.00"),
    ]  # fmt: skip
    header, _ = tables.tabulate("engine", [record | {"rows": ours}], [])
    assert header[-2:] == ["p99 joining, ms", "figures"]


@pytest.mark.filterwarnings("ignore")  # of torch, as it is imported
def test_decoding_with_a_static_cache_gives_the_models_tokens():
    pytest.importorskip("transformers", exc_type=ImportError)
    torch = pytest.importorskip("torch", exc_type=ImportError)
    peer_engine = importlib.import_module("benchmarks.peer_engine")
    model = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    peer = peer_engine.Transformers({"model": model, "prompt": 9, "new": 5})
    peer.prepare(2)
    peer.step = peer.best  # compiling takes long
    for _ in range(2):
        prompts_BT = peer_engine.prompts_of(peer, 2, 9)
        first, tokens = peer.tokens(prompts_BT, 5)
        ids_BT = prompts_BT
        for _ in range(5):
            best_B1 = peer.model(input_ids=ids_BT, use_cache=False).logits[:, -1:].argmax(-1)
            ids_BT = torch.cat([ids_BT, best_B1], dim=1)
        assert tokens == ids_BT[:, 9:].tolist()
        assert first == [row[:1] for row in tokens]

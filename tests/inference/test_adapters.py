"""LoRA adapters chosen by each request: a batch of them gives each what its merged model says."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
import tokenizers
from chat_cases import make_tokenizer
from engine_cases import GREEDY, SINGLE, letters, model, prompts, run
from server_cases import alone, live
from tiny import FEW_PARTS, assignments, byte_model, random_params, random_run

from jaxtrain.cli import main
from jaxtrain.data import make_reader
from jaxtrain.data.tokenizer.tokenizer import huggingface_tokenizer
from jaxtrain.finetune import LoRAConfig, flatten, lora_scale, make_partition, unflatten
from jaxtrain.inference.engine import Engine, EngineOptions, Request, load_engine
from jaxtrain.inference.engine.adapters import read_factors
from jaxtrain.inference.server.load import served_adapter
from jaxtrain.inference.server.service import Served
from jaxtrain.interop.companions import Prompting
from jaxtrain.runs.saved import load_saved, save_adapter, save_model
from jaxtrain.settings import UserError
from jaxtrain.weights import WEIGHTS
from jaxtrain.weights.adapted import merge_weights
from jaxtrain.weights.contract import is_weight
from jaxtrain.weights.multi_lora import LoRAFactors, choose_adapters, with_adapters
from jaxtrain.weights.params import is_block_matrix

RANKS = {"pirate": 2, "poet": 5}


def tuned(specs, params, seed, **fields):
    """(what LoRA trained, the merged model, its partition and configuration)."""
    c = LoRAConfig.model_validate({"name": "lora", "alpha": 8} | fields)
    partition = make_partition(c, specs, jnp.dtype(jnp.float32))
    trained = random_params(partition.trainable, seed)
    return trained, partition.merge(trained, params), c


def changes_of(adapters, params):
    """What `with_adapters` takes, of tuned models."""
    flat = [(flatten(trained), lora_scale(c)) for trained, _, c in adapters]
    names = {name.rpartition("/")[0] for one, _ in flat for name in one}
    factors = lambda one, scale, n: (
        LoRAFactors(one[f"{n}/a"], scale * one[f"{n}/b"]) if f"{n}/a" in one else None
    )
    return {n: [factors(one, scale, n) for one, scale in flat] for n in names}


def asked(texts, names):
    return [Request(f"r{i}", x, GREEDY, adapter=names[i]) for i, x in enumerate(texts)]


@pytest.mark.slow
def test_each_request_of_a_mixed_batch_gets_what_its_merged_model_says():
    """Of two layers, and of guessed tokens."""
    c, graphdef, specs, params = model("nanochat")
    params = jax.device_put(params)
    adapters = [
        tuned(specs, params, i, rank=rank, targets=targets)
        for i, (rank, targets) in enumerate([(2, ["attention"]), (5, ["q", "down", "up"])])
    ]
    texts = [*prompts(9, 17, 5, 9), prompts(9)[0]]
    names = ["pirate", "poet", None, "pirate", "poet"]
    merged = {None: params} | dict(zip(RANKS, jax.device_put([one for _, one, _ in adapters])))
    wanted = {}
    for request in asked(texts, names):
        alone = Engine(c, graphdef, merged[request.adapter], letters(), options=SINGLE)
        wanted |= run(alone, [request._replace(adapter=None)])
    assert len({tokens for tokens, _, _ in wanted.values()}) == 5
    both = with_adapters(params, changes_of(adapters, params))
    options = SINGLE._replace(drafts=3)
    engine = Engine(c, graphdef, both, letters(), options=options, adapters=list(RANKS))
    assert run(engine, asked(texts, names)) == wanted
    # One prompt of two adapters: neither may read the other's pages, but its own.
    assert engine.stats().prefix_hits == 0
    assert run(engine, asked(texts, names)[:1]) == {"r0": wanted["r0"]}
    assert engine.stats().prefix_hits == 8
    with pytest.raises(UserError, match="no adapter is called 'sailor'; there are pirate, poet"):
        engine.add(Request("a", (1,), GREEDY, adapter="sailor"))


def test_a_row_without_an_adapter_has_the_plain_product():
    w, x = jnp.ones((1, 4, 3)), jax.random.normal(jax.random.key(0), (3, 2, 4))
    factors = LoRAFactors(jnp.ones((1, 4, 2)), jnp.ones((1, 2, 3)), jnp.full((1, 3), 2.0))
    params = with_adapters({"w": w}, {"w": [None, factors]})
    chosen = choose_adapters(params, jnp.array([0, 2, 1]))["w"]
    y = jax.tree.map(lambda leaf: leaf[0], chosen).matmul(x)
    np.testing.assert_allclose(y[0], x[0] @ w[0], rtol=1e-5)
    np.testing.assert_allclose(y[2], x[2] @ w[0], rtol=1e-5)
    np.testing.assert_allclose(y[1], 2 * (x[1] @ (w[0] + 2)), rtol=1e-5)
    with pytest.raises(NotImplementedError):
        chosen.dequantize()


# ---- folders ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    fields = byte_model(64, "train.precision=float32", *assignments(**FEW_PARTS))
    return random_run(tmp_path_factory.mktemp("run"), fields)


def lora_run(folder, base, seed=1, **fields):
    """A run's folder as LoRA on a base leaves it."""
    saved = load_saved(base)
    trained, merged, c = tuned(saved.specs, saved.params, seed, **fields)
    config = saved.config.model_copy(update={"finetune": c})
    save_model(folder / "model", config, merged, saved.tokenizer)
    save_adapter(folder / "model" / "adapter", config, trained)
    return folder


@pytest.mark.slow
def test_runs_and_folders_of_pefts_are_read(base, tmp_path):
    run_dir = lora_run(tmp_path / "tuned", base, rank=3, rslora=True, dora=True)
    adapter = run_dir / "model" / "adapter"
    options = EngineOptions(slots=1, page_size=8, chunk=16, decode_steps=1)
    both = options._replace(adapters=(("run", run_dir), ("peft", adapter)))
    engine, merged = load_engine(base, None, both), load_engine(run_dir, None, options)
    text = (256, *b"To be, or not to be")
    plain = run(load_engine(base, None, options), [Request("r0", text, GREEDY)])
    wanted = run(merged, [Request("r0", text, GREEDY)])
    for name in ("run", "peft"):
        assert run(engine, [Request("r0", text, GREEDY, adapter=name)]) == wanted != plain
    assert run(engine, [Request("r0", text, GREEDY)]) == plain


@pytest.mark.slow
def test_a_quantized_base_is_kept_packed():
    """Rows have the packed product, and their adapters' change of it."""
    c, graphdef, specs, params = model("plain")
    packed = lambda spec, x: WEIGHTS["nf4"].encode(x) if is_block_matrix(spec) else x
    packed = jax.tree.map(packed, specs, jax.device_put(params))
    trained, _, config = tuned(specs, params, 1, rank=3)
    both = with_adapters(packed, changes_of([(trained, None, config)], params))
    plain = jax.tree.map(
        lambda w: merge_weights(w) if is_weight(w) else w, packed, is_leaf=is_weight
    )
    merged = tuned(specs, plain, 1, rank=3)[1]
    texts, names = prompts(9, 17, 5), ["a", None, "a"]
    engine = Engine(c, graphdef, both, letters(), options=SINGLE, adapters=["a"])
    found = run(engine, asked(texts, names))
    for request in asked(texts, names):
        weights = jax.device_put(plain if request.adapter is None else merged)
        alone = Engine(c, graphdef, weights, letters(), options=SINGLE)
        wanted = run(alone, [request._replace(adapter=None)])[request.id]
        assert found[request.id] == wanted


@pytest.mark.slow
def test_on_two_devices_adapters_say_the_same(base, tmp_path):
    run_dir = lora_run(tmp_path / "tuned", base, rank=2, dora=True)
    options = EngineOptions(slots=2, page_size=8, chunk=16, decode_steps=1)
    options = options._replace(adapters=(("a", run_dir),))
    requests = [Request(f"{i}", (256, 65, 66), GREEDY, adapter=x) for i, x in enumerate("a")]
    requests.append(Request("none", (256, 65, 66), GREEDY))
    found = [run(load_engine(base, None, options._replace(tensor=n)), requests) for n in (1, 2)]
    assert found[0] == found[1] and found[0]["0"] != found[0]["none"]


# ---- the server --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_model_of_a_request_is_the_base_or_an_adapter(base, tmp_path):
    run_dir = lora_run(tmp_path / "tuned", base, rank=2)
    with live(load_saved(base), adapters=(("pirate", run_dir),)) as one:
        client = one.client()
        listed = {model.id: model for model in client.models.list()}
        assert list(listed) == ["tiny", "pirate"] and listed["pirate"].parent == "tiny"
        assert client.models.retrieve("pirate").id == "pirate"
        ask = dict(prompt="To be", max_tokens=12, temperature=0)
        for name, saved in (("pirate", load_saved(run_dir)), ("tiny", load_saved(base))):
            answer = client.completions.create(model=name, **ask)
            assert answer.model == name
            assert answer.choices[0].text == alone(saved, [256, *b"To be"], 12)
        with pytest.raises(openai.NotFoundError, match="there is 'tiny', 'pirate'") as found:
            client.completions.create(model="sailor", **ask)
        assert (found.value.code, found.value.param) == ("model_not_found", "model")


@pytest.mark.slow
def test_whole_texts_go_through_the_adapter(base, tmp_path):
    """Embeddings, and log-probabilities of a prompt, as the merged model has them."""
    run_dir = lora_run(tmp_path / "tuned", base, rank=2)
    ask = dict(prompt="To be", max_tokens=0, echo=True, logprobs=0)
    found = []
    for saved, adapters, names in (
        (load_saved(base), (("pirate", run_dir),), ("tiny", "pirate")),
        (load_saved(run_dir), (), ("tiny",)),
    ):
        with live(saved, adapters=adapters) as one:
            for name in names:
                vector = one.client().embeddings.create(model=name, input="a").data[0].embedding
                logprobs = one.client().completions.create(model=name, **ask).choices[0].logprobs
                found.append([*vector, *logprobs.token_logprobs[1:]])
    plain, adapted, merged = found
    np.testing.assert_allclose(adapted, merged, atol=1e-4)
    assert not np.allclose(adapted, plain, atol=1e-2)


def test_a_peft_folder_has_its_own_rule_for_bos(base, tmp_path):
    """Read from its tokenizer.json, which may otherwise not differ from the base's."""
    tokenizer = huggingface_tokenizer(make_tokenizer().encode())
    prompting = Prompting(False, (tokenizer.bos_id,))
    model = Served("base", tokenizer, prompting, 64, make_reader(tokenizer), {})
    saved = load_saved(base)._replace(tokenizer=tokenizer)
    (tmp_path / "adapter_config.json").write_text("{}")
    served = lambda: served_adapter(saved, model, "a", tmp_path)
    assert served() == model._replace(name="a", adapter=True)
    inner = tokenizers.Tokenizer.from_str(make_tokenizer())
    bos = inner.id_to_token(tokenizer.bos_id)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    assert served().prompting == prompting._replace(bos=True)
    tree = json.loads(inner.to_str())
    tree["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=f"--adapter a={tmp_path}: its tokenizer differs"):
        served()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapter", "pirate"], "argument --adapter: got 'pirate', must be NAME=FOLDER"),
        (
            ["--adapter", "a=NONE"],
            "--adapter a: NONE: not an adapter: it has no adapter_config.json",
        ),
        (["--adapter", "tiny=TUNED", "--name", "tiny"], "--adapter: tiny is the name of two"),
        (["--adapter", "a=TUNED"], "adapter a=TUNED: it does not fit .* embeddings differ"),
    ],
)
def test_what_serve_cannot_read_is_one_line(base, tmp_path, capsys, words, message):
    tuned_dir = lora_run(tmp_path / "tuned", base, rank=2)
    saved = load_saved(base)
    embed = flatten(saved.params) | {"embed": saved.params["embed"] + 1}
    save_model(tuned_dir / "model", saved.config, unflatten(embed), saved.tokenizer)
    words = [word.replace("TUNED", str(tuned_dir)) for word in words]
    assert main(["serve", str(base), "--port", "0", "--no-warm-up", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: {message.replace('TUNED', str(tuned_dir))}", line)


# ---- what is refused -----------------------------------------------------------------------------


def changed_config(**changes):
    def change(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_config(target_modules=["q"]), r"does not fit .*holds .*finetune.targets"),
        (changed_config(r=7), "does not fit .*has rank 7 for .*, its tensor has 2"),
        (changed_config(peft_type="LOHA"), "peft_type LOHA is not supported, only LORA"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
    ],
    ids=["targets", "rank", "kind", "none"],
)
def test_what_is_no_adapter_of_the_model_is_refused(base, tmp_path, change, message):
    folder = lora_run(tmp_path / "tuned", base, rank=2) / "model" / "adapter"
    change(folder)
    with pytest.raises(UserError, match=rf"adapter a\b.*{message}"):
        load_engine(base, None, EngineOptions(adapters=(("a", folder),)))


@pytest.mark.slow
def test_another_base_is_refused(base, tmp_path):
    more = assignments(**FEW_PARTS)
    fields = byte_model(64, "train.precision=float32", "model.width=48", *more)
    other = random_run(tmp_path / "other", fields)
    folder = lora_run(tmp_path / "tuned", other, rank=2)
    with pytest.raises(UserError, match="it was tuned from another model"):
        load_engine(base, None, EngineOptions(adapters=(("a", folder),)))
    with pytest.raises(UserError, match=r"does not fit .* has .*, the run needs"):
        (folder / "model" / "adapter").rename(tmp_path / "alone")
        load_engine(base, None, EngineOptions(adapters=(("a", tmp_path / "alone"),)))
    saved = load_saved(base)
    embed = flatten(saved.params) | {"embed": saved.params["embed"] + 1}
    other = lora_run(tmp_path / "same_shape", base, rank=2)
    save_model(other / "model", saved.config, unflatten(embed), saved.tokenizer)
    with pytest.raises(UserError, match="its embeddings differ"):
        read_factors(saved, saved.params, "a", other)

"""Tuning a part through the command and the step: what trains, what is kept, what comes out."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter
from safetensors.numpy import load_file
from tiny import (
    LLAMA,
    VOCAB,
    batch,
    make_spec,
    mesh_of,
    on_one_device,
    random_params,
    resolved,
    rows_of,
    run_overrides,
    same,
)

from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.evaluation import evaluate
from jaxtrain.finetune import FinetuneConfig, apply_lora_plus, make_partition
from jaxtrain.finetune.partition import flatten, map_named
from jaxtrain.inference import generate
from jaxtrain.main import main
from jaxtrain.model import Transformer, merge_weights, split
from jaxtrain.optim import AdamWConfig, make_optimizer
from jaxtrain.parallel import place_batch
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.train.run_directory import check_run
from jaxtrain.train.step import init_state, make_step

LORA = {"finetune.name": "lora", "finetune.rank": 2, "optim.learning_rate": 0.01}


def tuning(directory, start, name, **changes):
    """The command that tunes a part of `start`; model and tokenizer are that run's."""
    given = run_overrides(directory, run__name=name, train__init_from=start, **changes)
    keep = [x for x in given if not x.startswith(("model.", "data.tokenizer", "optim.schedule"))]
    return keep


@pytest.fixture(scope="module")
def tuned(whole, tmp_path_factory):
    """A run of LoRA with norms (DoRA) on 4-bit matrices, from the run `whole`."""
    directory = tmp_path_factory.mktemp("tuned")
    more = {k.replace(".", "__"): v for k, v in LORA.items()}
    more |= {"finetune__dora": True, "finetune__base_quantization": "nf4", "eval__every": 3}
    arguments = tuning(directory, whole, "lora", **more)
    with on_one_device():
        assert main(arguments) == 0
    return directory / "lora", arguments


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_resumed_is_uninterrupted_and_checkpoints_hold_what_trains(tuned, whole):
    run, arguments = tuned
    before, rows = load_file(run / "model" / "model.safetensors"), rows_of(run)
    adapter = load_file(run / "model" / "adapter" / "adapter_model.safetensors")
    assert all(adapter[name].any() for name in adapter if "lora_B" in name)
    same(before["embed"], load_file(whole / "model" / "model.safetensors")["embed"])
    shutil.rmtree(run / "checkpoints" / "6")
    shutil.rmtree(run / "model")
    assert main(arguments) == 0
    same(load_file(run / "model" / "model.safetensors"), before)
    assert rows_of(run) == rows
    size = lambda folder: sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert size(run / "checkpoints" / "6") < size(whole / "checkpoints" / "6") / 2


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_what_comes_out_is_a_model_and_an_adapter(tuned, tmp_path, capsys):
    """The merged model generates and is evaluated as the run said; a checkpoint gives the same;
    the adapter starts another run where this one ended."""
    run, _ = tuned
    same(load_saved(run, 6).params, load_saved(run).params)
    assert generate.main([str(run), "--tokens", "4", "--temperature", "0"]) == 0
    capsys.readouterr()
    assert evaluate.main([str(run)]) == 0
    loss = float(capsys.readouterr().out.split()[1])
    assert loss == pytest.approx(rows_of(run, "validation")[-1]["loss"], abs=2e-3)
    base = load_saved(run).config.train.init_from
    more = {
        "finetune__name": "lora",
        "finetune__init_adapter": run,
        "finetune__base_quantization": "nf4",
    }
    again = tuning(tmp_path, base, "again", **more, train__steps=1, optim__learning_rate=1e-9)
    assert main(again) == 0, capsys.readouterr().err
    c = load_saved(tmp_path / "again").config.finetune
    assert (c.rank, c.dora) == (2, True)
    a, b = (load_file(r / "model" / "model.safetensors") for r in (run, tmp_path / "again"))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=1e-5)


# ---- the step ----------------------------------------------------------------------------------

CASES = {
    "lora": ({"name": "lora", "rank": 4, "lora_plus_ratio": 4.0}, "/a /b"),
    "lora-fa": ({"name": "lora", "rank": 4, "freeze_a": True}, "/b"),
    "dora int8": ({"name": "lora", "rank": 4, "dora": True, "base_quantization": "int8"},
                  "/a /b /magnitude"),
    "qalora": ({"name": "qalora", "rank": 4, "group_size": 8}, "/a /b"),
    "freeze": ({"name": "freeze", "trainable": ("ffn", "q", "final_gain")}, "ffn /q final"),
    "last layers nf4": (
        {"name": "freeze", "trainable": ("attention",), "last_layers": 1,
         "base_quantization": "nf4"}, "attention",
    ),
    "bitfit": ({"name": "bitfit"}, "_bias"),
    "ia3": ({"name": "ia3", "base_quantization": "nf4"}, "/factor"),
    "adapter": ({"name": "adapter", "width": 8, "base_quantization": "nf4"}, "_adapter"),
    "prompt": ({"name": "prompt", "virtual_tokens": 4, "base_quantization": "nf4"}, "prompt"),
    "prefix": ({"name": "prefix", "virtual_tokens": 4}, "prefix"),
}  # fmt: skip


def part_of(case):
    """(task, frozen, state, hyperparams) of a small llama of which a part is tuned."""
    tuning = TypeAdapter(FinetuneConfig).validate_python(CASES[case][0])
    sizes = {"adapter": "width", "prompt": "virtual_tokens", "prefix": "virtual_tokens"}
    inserted = {n: getattr(tuning, size) for n, size in sizes.items() if n == tuning.name}
    one_layer = {} if "layers" in case else {"depth": 1}
    c = resolved(**LLAMA | one_layer, qkv_bias=True, ffn_bias=True, **inserted)
    _, specs = split(Transformer(c, VOCAB))
    partition = make_partition(tuning, specs, jnp.dtype(jnp.float32))
    base = map_named(partition.store, random_params(partition.base))
    frozen, start = partition.init(base, 0)
    optim = apply_lora_plus(
        AdamWConfig(learning_rate=0.02, weight_decay=0.0, schedule={"name": "constant"}), tuning
    )
    optimizer = make_optimizer(optim, partition.trainable, 100)
    task, _ = make_spec(c)
    task = task._replace(specs=partition.trainable, optimizer=optimizer, join=partition.join)
    return partition, task, frozen, init_state(task, 0, start), optimizer.hyperparams


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_part_trains_alone_and_fits_a_batch(case):
    """Nothing but the part is in the gradient and in the optimizer's state."""
    partition, task, frozen, state, hyperparams = part_of(case)
    names = list(flatten(partition.trainable))
    assert names and all(any(word in n for word in CASES[case][1].split()) for n in names)
    trained = sum(x.nbytes for x in jax.tree.leaves(state.params))
    moments = sum(x.nbytes for x in jax.tree.leaves(state.optimizer) if x.ndim)
    assert moments == 2 * trained
    assert trained < sum(s.size * 4 for s in jax.tree.leaves(partition.base)) * 0.75
    before = jax.tree.map(np.asarray, frozen)
    start = jax.tree.map(np.asarray, state.params)
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        step = make_step(task, mesh)
        rows, losses = place_batch(batch(4, micro=4), mesh, batch_dim=1), []
        for _ in range(12):
            state, metrics = step(state, rows, hyperparams, frozen)
            losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1, losses
    assert len(metrics["checks"].gradient_squares) == len(names)
    same(frozen, before)
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), state.params, start)
    assert all(jax.tree.leaves(moved))


def test_lora_fa_trains_b_alone():
    specs = split(Transformer(resolved(**LLAMA | {"depth": 1}), VOCAB))[1]

    def trained(freeze_a):
        given = {"name": "lora", "rank": 4, "freeze_a": freeze_a}
        config = TypeAdapter(FinetuneConfig).validate_python(given)
        return {*flatten(make_partition(config, specs, jnp.dtype("float32")).trainable)}

    both = trained(freeze_a=False)
    assert trained(freeze_a=True) == {name for name in both if name.endswith("/b")} < both


def test_dora_begins_as_the_model_that_it_tunes():
    """Its magnitudes are the norms of the columns, for B is zero."""
    partition, _, frozen, state, _ = part_of("dora int8")
    joined = flatten(partition.join(state.params, frozen))
    base = flatten(frozen)
    for name in {key.rpartition("/")[0] for key in flatten(state.params)}:
        np.testing.assert_allclose(
            merge_weights(joined[name]), merge_weights(base[name]), rtol=1e-5, atol=1e-6
        )


def test_defaults_of_tuning(whole):
    """Rates and schedule of each method; what is said wins; what must be said is asked for."""
    start = [f"train.init_from={whole}", "train.steps=50"]
    c = load_config(None, [*start, "finetune.name=lora"])
    assert (c.optim.name, c.optim.learning_rate, c.optim.weight_decay) == ("adamw", 2e-4, 0)
    assert (c.optim.schedule.name, c.optim.schedule.warmup_steps) == ("linear", 5)
    c = load_config(None, [*start, "finetune.name=ia3", "optim.b1=0.8", "train.batch_size=8"])
    assert (c.optim.learning_rate, c.optim.b1, c.train.batch_size) == (3e-3, 0.8, 8)
    assert load_config(None, [*start, "finetune.name=lora", "optim.name=lion"]).optim.name == "lion"
    assert load_config(None, start).optim.name == "muon"
    with pytest.raises(UserError, match="train.steps: finetune.name=lora needs the number"):
        load_config(None, [*start[:1], "finetune.name=lora"])
    nothing = resolve(load_config(None, [*start[1:], "finetune.name=lora"]), 384)
    with pytest.raises(UserError, match="train.init_from: finetune.name=lora needs"):
        check_run(nothing)
    with pytest.raises(UserError, match="no adapter_config.json"):
        load_config(None, [*start, "finetune.name=lora", f"finetune.init_adapter={whole}"])
    pretraining = [*start, "optim.matrix_lr=0.01", "optim.weight_decay=0.3", "finetune.name=lora"]
    with pytest.raises(UserError, match=r"but matrix_lr are of muon; say optim\.name=adamw, which"):
        load_config(None, pretraining)
    with pytest.raises(UserError, match="optim.matrix_lr: no such field; it belongs to .*muon"):
        load_config(None, [*pretraining, "optim.name=adamw"])
    c = load_config(None, [*start, *pretraining[-2:], "optim.name=adamw"])
    assert (c.optim.learning_rate, c.optim.weight_decay) == (2e-4, 0.3)
    assert load_config(None, ["optim.name=muon", *pretraining]).optim.matrix_lr == 0.01


def test_defaults_of_conversations_and_preferences(whole):
    """All of a model is tuned as well, where it starts from one: not with pretraining's rates."""
    start = [f"train.init_from={whole}", "train.steps=50"]
    chat = ["data.train.name=chat", "data.train.path=chat.jsonl"]
    c = load_config(None, [*start, *chat])
    assert (c.optim.name, c.optim.learning_rate, c.optim.weight_decay) == ("adamw", 2e-5, 0)
    assert (c.optim.clip_norm, c.optim.schedule.warmup_steps, c.train.batch_size) == (1, 5, 16)
    assert load_config(None, [*start[1:], *chat]).optim.name == "muon"  # from nothing
    with pytest.raises(UserError, match="train.steps: finetune.name=full needs the number"):
        load_config(None, [*start[:1], *chat])
    pairs = ["data.train.name=preference", "data.train.path=pairs.jsonl"]
    rates = {("dpo", "full"): 5e-7, ("dpo", "lora"): 5e-6, ("orpo", "full"): 8e-6}
    for (objective, tuned), rate in rates.items():
        names = [f"objective.name={objective}", f"finetune.name={tuned}"]
        assert load_config(None, [*start, *pairs, *names]).optim.learning_rate == rate


def test_float8_and_a_tuned_part_are_refused_in_one_line(whole):
    given = [f"train.init_from={whole}", "train.steps=50", "finetune.name=lora", "model.fp8=blocks"]
    with pytest.raises(
        UserError, match="fp8=blocks does not go with finetune.name=lora: .* model.fp8=nul"
    ):
        resolve(load_config(None, given), 384)


def test_targets_take_the_names_of_peft():
    made = lambda *targets: TypeAdapter(FinetuneConfig).validate_python(
        {"name": "lora", "targets": targets}
    )
    assert made("q_proj", "v_proj", "q").targets == ("q", "v")
    assert made("all-linear").targets == ("attention", "ffn")
    assert made("blocks/attention/*", "c_attn").targets == ("blocks/attention/*", "q", "k", "v")


def test_lora_plus_is_a_ratio_of_rates():
    c = TypeAdapter(FinetuneConfig).validate_python({"name": "lora", "lora_plus_ratio": 16.0})
    optim = AdamWConfig(learning_rate=1e-3)
    assert apply_lora_plus(optim, c).multipliers == {"lora_b": 16.0}
    assert apply_lora_plus(
        optim.model_copy(update={"multipliers": {"lora_b": 2.0}}), c
    ).multipliers == {"lora_b": 2.0}

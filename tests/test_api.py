"""The public API: `import jaxtrain` and nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import run_overrides

import jaxtrain
from jaxtrain import data
from jaxtrain.evaluation.evaluate import evaluate, held_out_batches
from jaxtrain.parallel import make_mesh

TEXTS = ["To be, or not to be", "Friends, Romans, countrymen, lend me your ears; " * 3]


@pytest.fixture(scope="module")
def model(whole):
    return jaxtrain.load(whole)


def test_import_loads_no_jax_and_every_name_is_there():
    code = "import jaxtrain, sys; assert not {'jax', 'numpy', 'pydantic'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in jaxtrain.__all__:
        assert getattr(jaxtrain, name) is not None
    assert set(dir(jaxtrain)) == set(jaxtrain.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = jaxtrain.nothing


def test_the_names_that_editors_see_are_those_that_are_there():
    tree = ast.parse(Path(jaxtrain.__file__).read_text())
    seen = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        for alias in node.names if alias.asname
    }  # fmt: skip
    assert seen == {f"jaxtrain.{module}.{name}" for name, module in jaxtrain._MODULES.items()}


def test_a_configuration_by_name_by_path_and_as_a_tree(tmp_path):
    (tmp_path / "c.yaml").write_text("train: {steps: 7}\n")
    tree = {"train": {"steps": 7}}
    from_file = jaxtrain.load_config(tmp_path / "c.yaml")
    assert from_file == jaxtrain.load_config(tree) == jaxtrain.load_config(None, ["train.steps=7"])
    assert tree == {"train": {"steps": 7}}
    assert jaxtrain.load_config("quickstart").run.name == "quickstart"
    with pytest.raises(
        jaxtrain.UserError, match="^model.dept: no such field; did you mean model.d"
    ):
        jaxtrain.load_config({"model": {"dept": 3}})
    with pytest.raises(jaxtrain.UserError, match="did you mean quickstart"):
        jaxtrain.load_config("quickstrat")


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_train_two_steps_then_load(tmp_path):
    config = jaxtrain.load_config(None, run_overrides(tmp_path, train__steps=2))
    result = jaxtrain.train(config)
    assert result.directory == tmp_path / "tiny" and result.metrics["loss"] > 0
    loaded = jaxtrain.load(result.directory)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, jax.device_get(result.params))


@pytest.mark.slow
def test_log_likelihood_is_the_sum_over_logits(model):
    found = model.log_likelihood([*TEXTS, ("To be, or", " not to be")])
    ids = model.encode(TEXTS[0])
    logp = jax.nn.log_softmax(model.logits(ids)[0], axis=-1)
    each = np.take_along_axis(np.asarray(logp[:-1]), ids[1:, None], axis=1)
    assert found[0] == pytest.approx(each.sum(), rel=1e-4)
    assert found.shape == (3,) and found[0] < found[2] < 0


@pytest.mark.slow
def test_logits_give_the_loss_of_evaluate(model):
    total, weight = 0.0, 0.0
    store = data.prepare(model.config.data).validation
    for batch in held_out_batches(store, model.config, make_mesh(model.config.mesh)):
        logp = jax.nn.log_softmax(model.logits(batch.tokens_BT), axis=-1)
        each = np.take_along_axis(np.asarray(logp), batch.targets_BT[..., None], axis=2)[..., 0]
        total, weight = total - (each * batch.weights_BT).sum(), weight + batch.weights_BT.sum()
    assert total / weight == pytest.approx(evaluate(model.saved, model.config)["loss"], rel=1e-4)
    one = model.logits(np.zeros(5, int))
    assert one.shape == (1, 5, model.tokenizer.vocab_size) and one.dtype == jnp.float32


@pytest.mark.slow
def test_generate_takes_one_prompt_or_several(model):
    one = model.generate("ROMEO:", tokens=8, temperature=0)
    assert one == model.generate("ROMEO:", tokens=8, temperature=0, seed=5)
    assert model.generate(["ROMEO:", "A"], tokens=8, temperature=0)[0] == one
    with pytest.raises(jaxtrain.UserError, match="no chat template"):
        model.chat([{"role": "user", "content": "Hi"}])


@pytest.mark.slow
def test_saved_and_exported_it_is_the_same_model(model, tmp_path):
    again = jaxtrain.load(model.save(tmp_path / "saved"))
    np.testing.assert_array_equal(again.log_likelihood(TEXTS), model.log_likelihood(TEXTS))
    with pytest.raises(jaxtrain.UserError, match="is there already"):
        model.save(tmp_path / "saved")


@pytest.mark.slow
def test_batches_that_end_early_are_an_error(model):
    loss = lambda network, batch: network(batch["tokens"]).states.mean()
    rows = np.zeros((8, 16), np.int32)
    with pytest.raises(jaxtrain.UserError, match="batches ended after 1 of 30 steps"):
        jaxtrain.fit(model, loss=loss, batches=[{"tokens": rows}], steps=30)


def test_build_fit_export_load(tmp_path):
    """A Llama of bytes, trained by a loss and batches of one's own, out and in again."""
    config = jaxtrain.load_config(
        {"model": {"depth": 1, "width": 32, "head_dim": 8, "hidden": 48, "ffn": "swiglu",
                   "qk_norm": False, "window_pattern": "L", "norm_gain": True,
                   "embed_norm": False, "logit_softcap": None, "value_embeddings": False,
                   "residual_scales": False, "smear": False, "backout": False, "init": "gpt2",
                   "vocab_multiple": 1},
         "data": {"tokenizer": {"name": "bytes"}},
         "train": {"sequence_length": 16, "batch_size": 8, "steps": 30}},
        [f"run.directory={tmp_path}", "optim.name=adamw", "optim.learning_rate=0.01"],
    )  # fmt: skip
    model = jaxtrain.build(config)
    before = model.params

    # The fifteen lines of the manual: a loss of one's own, batches of one's own.
    def loss(network, batch):
        logits = network.logits(network(batch["tokens"]).states)
        labels = jnp.roll(batch["tokens"], -1, axis=1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    rows = np.tile(np.arange(97, 113, dtype=np.int32), (8, 1))
    losses = jaxtrain.fit(model, loss=loss, batches=iter([{"tokens": rows}] * 30), steps=30)
    assert losses[-1] < losses[0] - 1 and len(losses) == 30
    assert model.params is not before

    family = model.export(tmp_path / "hf")
    again = jaxtrain.load(tmp_path / "hf")
    assert family == "llama"
    np.testing.assert_allclose(again.logits(rows[:1]), model.logits(rows[:1]), atol=2e-4)
    with pytest.raises(jaxtrain.UserError, match="^optimizer"):
        jaxtrain.fit(model, loss=loss, batches=[], steps=1, optimizer={"name": "adm"})

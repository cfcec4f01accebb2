"""The smallest models, batches and command lines that still use everything."""

import shutil
from contextlib import contextmanager
from math import prod
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.data import Batch
from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
from jaxtrain.model import ModelConfig, Transformer, resolve_model, split
from jaxtrain.objectives import LossOptions
from jaxtrain.objectives.next_token import make_next_token
from jaxtrain.optim import AdamWConfig, make_optimizer
from jaxtrain.parallel import MeshConfig, make_mesh
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.saved import save_model
from jaxtrain.train.float8_scaling import Float8
from jaxtrain.train.loss_scale import DynamicLossScale
from jaxtrain.train.step import StepSpec, init_state, make_step, state_shardings
from jaxtrain.weights.float8 import Fp8Options

VOCAB, T = 61, 32
SHIPPED = sorted(path.stem for path in (Path(__file__).parents[1] / "configs").glob("*.yaml"))
CACHE = Path(__file__).parents[1] / ".cache" / "data-tests"  # prepared once, as compiled programs

SMALL = {"depth": 2, "width": 32, "head_dim": 8, "short_window": 5, "vocab_multiple": 16}
LLAMA = {
    **SMALL, "kv_heads": 2, "hidden": 48, "ffn": "swiglu", "qk_norm": False,
    "window_pattern": "L", "norm_gain": True, "embed_norm": False, "tied_head": True,
    "logit_softcap": None, "value_embeddings": False, "residual_scales": False, "smear": False,
    "backout": False, "init": "gpt2",
}  # fmt: skip

NANOCHAT = [  # what Hugging Face's NanoChat has a place for
    "data.tokenizer.name=bytes", "train.sequence_length=32", "model.depth=2", "model.width=32",
    "model.head_dim=8", "model.hidden=48", "model.window_pattern=L", "model.qk_scale=1",
    "model.value_embeddings=false", "model.residual_scales=false", "model.smear=false",
    "model.backout=false", "model.embed_norm=true",
]  # fmt: skip


def byte_model(context, *more):
    """Fields of the configuration of a small model of bytes, and more of them."""
    return [
        "model.depth=2", "model.width=32", "model.head_dim=8", "model.kv_heads=2",
        "model.hidden=48", "model.window_pattern=SL", "model.short_window=7",
        f"train.sequence_length={context}", "train.batch_size=8", "train.device_batch_size=1",
        "train.steps=1", "data.tokenizer.name=bytes", *more,
    ]  # fmt: skip


def resolved(**changes):
    return resolve_model(ModelConfig.model_validate(SMALL | changes), T)


def build(seed=0, **changes):
    """(config, graphdef, specs, params) of the small model."""
    c = resolved(**changes)
    graphdef, specs = split(Transformer(c, VOCAB))
    return c, graphdef, specs, random_params(specs, seed)


def random_params(specs, seed=0):
    """Values away from zero everywhere, so that no path is closed (as some are at the start)."""
    random = np.random.default_rng(seed)

    def value(spec):
        noise = random.normal(size=spec.shape)
        if spec.role in ("matrix", "head"):
            noise = noise / np.sqrt(spec.shape[-2])
        elif spec.role in ("gain", "scalar"):
            noise = 0.5 + 0.1 * noise
        return jnp.asarray(noise, spec.dtype)

    return jax.tree.map(value, specs)


def random_run(folder, overrides):
    """`folder` with what a run's holds in the end: a random model of bytes."""
    tokenizer = byte_tokenizer()
    config = resolve(load_config(None, overrides), tokenizer.vocab_size)
    _, specs = split(Transformer(config.model, tokenizer.vocab_size))
    save_model(folder / "model", config, random_params(specs), tokenizer)
    return folder


def tokens(rows=4, length=T, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)


def batch(rows=8, length=T, seed=0, micro=None):
    """Random tokens with random weights, a few of them 0; [A, B, T] when micro rows are given."""
    random = np.random.default_rng(seed)
    stream = random.integers(0, VOCAB, (rows, length + 1)).astype(np.int32)
    weights = (random.random((rows, length)) < 0.8).astype(np.float32)
    one = Batch(stream[:, :-1], stream[:, 1:], weights, None, None)
    return one if micro is None else stacked(one, micro)


def stacked(one, micro):
    """A batch as microbatches of `micro` rows."""
    return jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), one)


def make_spec(c=None, optim=None, steps=100, dtype=jnp.float32, **changes):
    """A StepSpec over the small model; returns it with the optimizer's hyperparams."""
    c = c or resolved(**changes)
    graphdef, specs = split(Transformer(c, VOCAB))
    optim = optim or AdamWConfig.model_validate({"schedule": {"name": "constant"}})
    optimizer = make_optimizer(optim, specs, steps)
    bytes_V = jnp.full(VOCAB, 2.0)
    options = Fp8Options(*(getattr(c, f"fp8_{name}") for name in Fp8Options._fields))
    transforms = [Float8(c.fp8_history, options)] if c.fp8 else []
    transforms += [DynamicLossScale()] if dtype == jnp.float16 else []
    objective = make_next_token(options=LossOptions(head="fp8" if c.fp8 == "all" else None))
    spec = StepSpec(
        graphdef, specs, optimizer, jnp.dtype(dtype), bytes_V, optim.clip_norm,
        objective=objective, transforms=tuple(transforms), draws=c.draws,
    )  # fmt: skip
    return spec, optimizer.hyperparams


def begin(task, mesh, seed=0):
    """The initial state, where the step wants it."""
    create = lambda: init_state(task, seed)
    return jax.jit(create, out_shardings=state_shardings(task, mesh))()


def begin_random(task, mesh):
    """The same from random parameters: zeros make gradients vanish, and rounding visible."""
    state = begin(task, mesh)
    where = jax.tree.map(lambda x: x.sharding, state.params)
    return state._replace(params=jax.device_put(random_params(task.specs), where))


def mesh_of(data=1, fsdp=1, tensor=1, expert=1, context=1, pipeline=1):
    sizes = dict(data=data, fsdp=fsdp, tensor=tensor, expert=expert)
    sizes |= dict(context=context, pipeline=pipeline)
    return make_mesh(MeshConfig(**sizes), jax.devices()[: prod(sizes.values())])


# Each axis that a step can be split over, those that need nothing of the model at once.
MESHES = {"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2}, {"pipeline": 2}


def assert_same_metrics(spec, hyperparams, names, meshes=MESHES, given=None, micro=4):
    """Of a step of one device in one microbatch of 8 rows, and on each mesh in some of `micro`.

    given(micro): the batch in microbatches of so many rows; default `batch(8)`.
    """
    given = given or (lambda micro: batch(8, micro=micro))

    def metrics(micro, sizes):
        mesh = mesh_of(**sizes)
        with jax.set_mesh(mesh):
            start = begin_random(spec, mesh)
            return make_step(spec, mesh)(start, given(micro), hyperparams)[1]

    expected = metrics(8, {})
    for sizes in meshes:
        found = metrics(micro, sizes)
        for name in names:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, err_msg=str(sizes))


def close(a, b, rtol=1e-5, atol=1e-6):
    """Trees equal up to rounding."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def same(a, b):
    """Trees equal bit for bit."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# For tests of what happens around the model, of which a run compiles a third less then.
FEW_PARTS = {
    "model__value_embeddings": False, "model__residual_scales": False, "model__smear": False,
    "model__backout": False, "model__window_pattern": "L",
}  # fmt: skip
PLAIN_MODEL = {name.removeprefix("model__"): value for name, value in FEW_PARTS.items()}
QUICK = {"optim__name": "adamw"} | FEW_PARTS
SAMPLES = {"sample__prompts": "['']", "sample__tokens": 8}
WHOLE = {"eval__every": 2, "sample__every": 4} | SAMPLES | FEW_PARTS  # of the fixture


def run_overrides(directory, **changes):
    """`key.path=value` arguments of a run of a few seconds; later ones win."""
    fields = {
        "run.directory": directory, "run.name": "tiny", "data.cache_dir": CACHE,
        "data.tokenizer.vocab_size": 384, "model.depth": 1, "model.width": 32,
        "model.head_dim": 8, "model.hidden": 48, "train.sequence_length": 32,
        "train.batch_size": 8, "train.device_batch_size": 1, "train.steps": 6,
        "optim.schedule.warmup_steps": 0, "sample.prompts": "[]", "eval.tokens": 256,
        "eval.batch_size": 64, "eval.every": "null", "sample.every": "null",
        "checkpoint.every": 3, "metrics.every": 1, "metrics.tensorboard": False,
    }  # fmt: skip
    if "train__init_from" in changes and not any(key.startswith("data__train") for key in changes):
        fields["data.train.path"] = "tinyshakespeare"  # a start from a model has to name its text
    if not any(key.startswith(("data__train", "data__validation")) for key in changes):
        # A run ends with a validation on all that is held out: a third of its time with a tenth.
        fields["data.validation.fraction"] = 0.01
    for key, value in changes.items():  # to the end, as the command line has it
        fields.pop(key := key.replace("__", "."), None)
        fields[key] = value
    return assignments(**fields)


def assignments(**fields):
    """`key.path=value` arguments of fields named key__path."""
    return [f"{key.replace('__', '.')}={value}" for key, value in fields.items()]


def rows_of(run_dir, kind="train"):
    """The rows without what depends on the clock and the machine."""
    clock = {"time", "mfu", "memory_bytes", "data_wait"}
    rows = read_rows(run_dir / "metrics.jsonl")
    keep = lambda name: name not in clock and not name.endswith("_s")
    return [{k: v for k, v in r.items() if keep(k)} for r in rows if r["kind"] == kind]


@contextmanager
def on_one_device():
    """Runs that begin in here see one device."""
    devices = jax.devices()[:1]
    with mock.patch.object(jax, "devices", lambda *_: devices):
        yield


def weights_of(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


def steps_of(run_dir):
    return sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit())


def forget_end(run_dir, *steps):
    """Removes the checkpoints of these steps and the final model: what is left is to be resumed."""
    for step in steps:
        shutil.rmtree(run_dir / "checkpoints" / str(step))
    shutil.rmtree(run_dir / "model")


def assert_same_run(a, b):
    """Parameters and every logged number, bit for bit."""
    assert weights_of(a).keys() == weights_of(b).keys()
    same(weights_of(a), weights_of(b))
    assert rows_of(a) == rows_of(b)
    assert rows_of(a, "validation")[-1] == rows_of(b, "validation")[-1]
    last = sorted(p.name for p in (a / "samples").glob("*"))[-1:]
    assert [(a / "samples" / x).read_text() for x in last] == [
        (b / "samples" / x).read_text() for x in last
    ]


def whole_overrides(run_dir, **changes):
    """Those of the fixture `whole`, in another directory."""
    return run_overrides(run_dir.parent, **WHOLE | changes)

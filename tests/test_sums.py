"""What is written has checksums, and a flipped byte is an error that names the file."""

import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import WHOLE, run_overrides

from jaxtrain.cli import main as interop
from jaxtrain.evaluation import evaluate
from jaxtrain.inference import generate
from jaxtrain.interop.tensors import read, read_header, write
from jaxtrain.main import main
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError
from jaxtrain.storage import checksums as sums
from jaxtrain.train.preference import read_references


def flip(path, at, bit=0):
    """Another bit at a byte of a file, counted from its end where `at` is negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def edit(path, name, value):
    """A tensor of one of our files with another first value, as if it had been trained so."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    arrays = {key: np.array(x) for key, x in load_file(path).items()}
    arrays[name].flat[0] = value
    table = {key: (x.dtype, x.shape) for key, x in arrays.items()}
    write(path, table, arrays.values(), header["__metadata__"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_flipped_bit_anywhere_in_a_tensor_is_found(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(sums, "BLOCK", 16)  # so that tensors have several
    arrays = {"a": np.arange(21).astype(dtype).reshape(3, 7), "b": np.ones((), dtype)}
    arrays["empty"] = np.zeros((0, 2), dtype)
    table = {name: (x.dtype, x.shape) for name, x in arrays.items()}
    file = tmp_path / "x.safetensors"
    write(file, table, arrays.values(), {"format": "pt"})
    stored = read_header(file)
    for name, x in arrays.items():
        np.testing.assert_array_equal(read(name, stored[name]), x)
        np.testing.assert_array_equal(load_file(file)[name], x)
    size = sum(x.nbytes for x in arrays.values())
    for at in range(-size, 0):
        flip(file, at)
        name = "b" if at >= -arrays["b"].nbytes else "a"
        with pytest.raises(UserError, match=f"x.safetensors: {name} is damaged"):
            read(name, stored[name])
        flip(file, at)


def test_a_file_of_others_has_no_checksums(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"a": np.ones(3, np.float32)}, file, metadata={"format": "pt"})
    assert read("a", read_header(file)["a"]).tolist() == [1, 1, 1]


@pytest.mark.slow
def test_a_model_is_written_byte_for_byte_the_same_by_every_process(tmp_path):
    code = (
        "import sys, pathlib, tiny; "
        "tiny.random_run(pathlib.Path(sys.argv[1]), ['model.depth=1', 'model.width=8', "
        "'model.head_dim=8', 'data.tokenizer.name=bytes', 'train.steps=1'])"
    )
    folder = os.path.dirname(__file__)
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / seed],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": folder},
        )
        for seed in ("1", "2")
    ]
    assert [job.wait() for job in jobs] == [0, 0]
    one, two = (
        (tmp_path / seed / "model" / "model.safetensors").read_bytes() for seed in ("1", "2")
    )
    assert one == two


def test_a_flipped_byte_in_a_model_is_named(copy, capsys):
    file = copy / "model" / "model.safetensors"
    name = list(read_header(file))[-1]
    flip(file, -1)
    for command in (
        lambda: generate.main([str(copy), "--tokens", "1"]),
        lambda: evaluate.main([str(copy)]),
        lambda: interop(["export", str(copy), str(copy / "out")]),
    ):
        assert command() == 2
        error = capsys.readouterr().err
        assert f"{file}: {name} is damaged" in error and error.count("\n") == 1
    assert not (copy / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(copy, capsys, value):
    file = copy / "model" / "model.safetensors"
    edit(file, "embed", value)
    for command in (
        lambda: generate.main([str(copy), "--tokens", "1"]),
        lambda: evaluate.main([str(copy)]),
        lambda: interop(["export", str(copy), str(copy / "out")]),
    ):
        assert command() == 2
        error = capsys.readouterr().err
        assert f"{file}: embed holds NaN or infinite values" in error and error.count("\n") == 1
    assert not (copy / "out").exists()


def files_of(folder):
    return {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}


def test_a_flipped_byte_in_any_file_of_a_checkpoint_is_named(tmp_path):
    params = {"a": jnp.arange(3000.0), "b": {"c": jnp.ones((2, 2))}}
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(3, params, {"step": np.ones(1)}, {"read": 12})
        checkpoints.wait()
        checkpoints.restore(3, like, {"step": np.ones(1)})
        step = tmp_path / "checkpoints" / "3"
        for item in ("params", "rest", "position"):
            for path in files_of(step / item).values():
                if path.name in ("sums.json", "commit_success.txt"):
                    continue
                at = path.stat().st_size // 2
                flip(path, at)
                named = re.escape(f"{step} cannot be read ({path.relative_to(step)} is damaged")
                with pytest.raises(UserError, match=named):
                    checkpoints.restore(3, like, {"step": np.ones(1)})
                flip(path, at)
        (step / "position" / "metadata").unlink()
        with pytest.raises(UserError, match="is missing"):
            checkpoints.restore(3, like, {"step": np.ones(1)})


def test_a_damaged_checkpoint_stops_generate_evaluate_and_resuming(copy, capsys):
    data = max(
        files_of(copy / "checkpoints" / "3" / "params").values(), key=lambda p: p.stat().st_size
    )
    flip(data, data.stat().st_size // 2)
    shutil.rmtree(copy / "checkpoints" / "6")
    shutil.rmtree(copy / "model")
    for command in (
        lambda: generate.main([str(copy), "--tokens", "1"]),
        lambda: evaluate.main([str(copy), "--step", "3"]),
        lambda: main(run_overrides(copy.parent, **WHOLE)),
    ):
        assert command() == 2
        error = capsys.readouterr().err
        assert data.name in error and "is damaged" in error and error.count("\n") == 1


def test_a_checkpoint_that_is_not_finite_is_named(copy, capsys):
    saved = load_saved(copy, step=6)
    saved.params["embed"] = saved.params["embed"].at[0, 0].set(jnp.nan)
    shutil.rmtree(copy / "checkpoints")
    with Checkpointer(copy, CheckpointConfig()) as checkpoints:
        checkpoints.save(6, saved.params, {"step": np.ones(1)}, {})
    for command in (generate.main, evaluate.main):
        assert command([str(copy), "--step", "6"]) == 2
        error = capsys.readouterr().err
        assert "checkpoints/6: embed holds NaN" in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_flipped_byte_in_the_reference_is_named(tmp_path):
    file = tmp_path / "reference.npz"
    wanted = {"train": np.arange(12, dtype=np.float32).reshape(6, 2), "held out": np.ones((1, 2))}
    np.savez(file, allow_pickle=False, **wanted)
    damaged = 0
    for at in range(file.stat().st_size):
        flip(file, at, bit=at % 8)
        try:
            found = read_references(file, wanted)  # the byte was of a date, or says nothing else
            assert all((found[name] == x).all() for name, x in wanted.items())
        except UserError as error:
            assert f"{file} is damaged (" in str(error) and "\n" not in str(error)
            damaged += 1
        flip(file, at, bit=at % 8)
    assert damaged > sum(x.nbytes for x in wanted.values())
    read_references(file, wanted)

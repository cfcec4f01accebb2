"""What is written has checksums, and a flipped byte is an error that names the file."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxtrain import evaluate, generate, sums
from jaxtrain.interop.__main__ import main as interop
from jaxtrain.interop.tensors import read, read_header, write
from jaxtrain.settings import UserError


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

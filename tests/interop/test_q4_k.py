"""Q4_K: its bytes are read by llama.cpp's own library, and its error is that of llama.cpp."""

import gguf
import numpy as np
import pytest

from jaxtrain.interop.q4_k import quantize_q4_k

Q4_K = gguf.GGMLQuantizationType.Q4_K
RANDOM = np.random.default_rng(0)
SHAPE = (64, 1024)
# Relative squared error of `ggml_quantize_chunk` of llama.cpp (ggml 0.25.3) on the same numbers.
REFERENCE = {
    "normal": (RANDOM.standard_normal(SHAPE), 0.005107),
    "heavy tails": (RANDOM.standard_t(4, SHAPE) * 0.02, 0.007576),
    "laplace": (RANDOM.laplace(size=SHAPE) * 0.02, 0.007214),
    "uniform": (RANDOM.uniform(-1, 1, SHAPE), 0.002961),
}


def error_of(x):
    back = gguf.dequantize(quantize_q4_k(x), Q4_K)
    assert back.shape == x.shape
    return np.square(back - x).sum() / np.square(x).sum()


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.quick("heavy tails")
def test_the_error_is_that_of_llama_cpp(name):
    x, theirs = REFERENCE[name]
    assert error_of(x.astype(np.float32)) < 1.02 * theirs


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_of_one_sign_and_alike(sign):
    """An offset cannot lift: weights above 0 lie on a line through zero."""
    ramp = np.linspace(0.5, 1.0, 256, dtype=np.float32)[None]
    assert error_of(sign * ramp) < (5e-4 if sign > 0 else 1e-5)
    assert error_of(np.full((1, 256), sign, np.float32)) < 1e-6
    assert not gguf.dequantize(quantize_q4_k(np.zeros((2, 512), np.float32)), Q4_K).any()

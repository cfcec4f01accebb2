"""An engine of a run on disk."""

from pathlib import Path

import jax
import pytest
from jaxtrain_kernels.attention import paged
from jaxtrain_kernels.attention.paged import triton
from tiny import FEW_PARTS, assignments, byte_model, random_run

from jaxtrain.cli import main as jaxtrain
from jaxtrain.inference.engine import EngineOptions, Request, SamplingParams, load_engine
from jaxtrain.inference.generate import Sampling, generate, model_of
from jaxtrain.runs.saved import load_saved
from jaxtrain.settings import UserError

OPTIONS = EngineOptions(slots=2, page_size=8, chunk=16, decode_steps=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    fields = byte_model(64, "train.precision=float32", *assignments(**FEW_PARTS))
    return random_run(tmp_path_factory.mktemp("run"), fields)


def texts_of(engine, prompts):
    for i, prompt in enumerate(prompts):
        tokens = (256, *prompt.encode())
        engine.add(Request(str(i), tokens, SamplingParams(max_tokens=12, temperature=0)))
    found = ["" for _ in prompts]
    while engine.busy:
        for update in engine.step():
            found[int(update.id)] += update.text
    return found


def in_parts(engine):
    """Whether two devices hold different heads of each page."""
    pages = jax.tree.leaves(engine.state.kv)
    return all(len(x.devices()) == 2 and not x.is_fully_replicated for x in pages)


PROMPTS = ["To be, or not", "A", "We few, we happy few, we band of brothers"]


@pytest.mark.slow
def test_its_text_is_that_of_generate(run):
    saved = load_saved(run)
    how = Sampling(tokens=12, temperature=0)
    wanted = generate(model_of(saved), PROMPTS, how)
    assert texts_of(load_engine(run, None, OPTIONS), PROMPTS) == wanted


@pytest.mark.slow
def test_by_the_kernel_over_pages_it_says_the_same(run, monkeypatch):
    """Of two devices, where it is called by each for its own heads."""
    wanted, calls = texts_of(load_engine(run, None, OPTIONS), PROMPTS), []

    def kernel(q_BTNH, *arrays, **options):
        calls.append(q_BTNH.shape)
        return triton.paged_attention(q_BTNH, *arrays, interpret=True, **options)

    monkeypatch.setitem(paged.BACKENDS, "triton", kernel)
    monkeypatch.setattr(triton, "supports", lambda *_: None)
    jax.clear_caches()
    assert texts_of(load_engine(run, None, OPTIONS._replace(tensor=2)), PROMPTS) == wanted
    assert calls
    jax.clear_caches()


@pytest.mark.slow
def test_on_two_devices_it_says_the_same(tmp_path):
    run = random_run(tmp_path, byte_model(64, "train.precision=float32"))  # with all its parts
    two = load_engine(run, None, OPTIONS._replace(tensor=2))
    assert in_parts(two)
    assert texts_of(two, PROMPTS) == texts_of(load_engine(run, None, OPTIONS), PROMPTS)
    assert in_parts(two)


def test_devices_that_do_not_divide_are_refused(run):
    with pytest.raises(UserError, match="tensor=3 does not divide"):
        load_engine(run, None, OPTIONS._replace(tensor=3))


@pytest.mark.slow
def test_the_page_about_it_is_true(run):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "engine.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    shown: dict[str, dict[str, str]] = {}
    exec(code.replace("40", "8").replace('"runs/quickstart"', repr(str(run))), shown)
    assert all(shown["texts"].values())


@pytest.mark.slow
def test_a_quantized_model_is_served(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("We few, we happy few. " * 40)
    options = ["--method", "int8", "--out", str(tmp_path / "int8"), "--text", str(text)]
    assert jaxtrain(["quantize", str(run), *options]) == 0
    saved = load_saved(tmp_path / "int8")
    how = Sampling(tokens=12, temperature=0)
    wanted = generate(model_of(saved), PROMPTS, how)
    assert texts_of(load_engine(tmp_path / "int8", None, OPTIONS), PROMPTS) == wanted

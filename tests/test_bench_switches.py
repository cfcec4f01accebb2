"""Variants of a step that differ in their kernels."""

import pytest
from jaxtrain_kernels.dispatch import on_target

from benchmarks import switches
from benchmarks.__main__ import main
from jaxtrain.config import find_config, load_config


def test_each_variant_switches_what_it_says():
    configs = {
        name: load_config(find_config("gpt_d12"), lines)
        for name, lines in switches.variants().items()
    }
    xla = configs["xla"]
    assert (xla.model.attention, xla.model.kernels.norm, xla.optim.symmetric) == (
        "cudnn", "xla", False,
    )  # fmt: skip
    assert configs["bf16"].model.attention is None and configs["bf16"].optim.symmetric
    assert configs["xla and attention"].model.attention == "mosaic"
    ops = configs["xla and rows"].model.kernels
    assert (ops.loss, ops.norm, ops.rope, ops.ffn) == ("mosaic", "mosaic", "mosaic", "xla")
    assert configs["xla and ffn"].model.kernels.ffn == "mosaic"
    assert configs["xla and symmetric"].optim.symmetric
    assert (configs["fp8"].model.fp8, configs["fp8"].model.fp8_history) == ("blocks", None)
    delayed = configs["fp8_delayed"].model
    assert (delayed.fp8, delayed.fp8_history) == ("blocks", 16)
    every = configs["fp8_delayed and all"]
    assert (every.model.fp8, every.model.kernels.qkv) == ("blocks", "mosaic")
    assert every.model.kernels.loss == "fp8_head"
    assert not every.model.fp8_epilogue and not delayed.fp8_epilogue
    for name in ("fp8_delayed and epilogue", "fp8_delayed and all with epilogue"):
        assert (configs[name].model.fp8_epilogue, configs[name].model.fp8_history) == (True, 16)
    both = configs["fp8_delayed and all with both"].model
    assert (both.fp8_epilogue, both.fp8_norms) == (True, True) and both.kernels.qkv == "mosaic"
    norms = configs["fp8_delayed and all with norms"].model
    assert (norms.fp8_epilogue, norms.fp8_norms) == (False, True) and not every.model.fp8_norms
    apart = configs["bf16 and three arrays"].model.kernels
    assert (apart.qkv, apart.loss) == ("xla", None)
    assert configs["bf16 and polar_express_4"].optim.orthogonalize == "polar_express_4"
    for name in ("fp8_logits", "fp8_head"):
        assert configs[f"bf16 and {name}"].model.kernels.loss == name


def test_one_process_measures_them_all(monkeypatch):
    calls = []
    # Other tests of this process still use what is compiled.
    monkeypatch.setattr(switches.jax, "clear_caches", lambda: None)
    monkeypatch.setattr(switches.gc, "collect", lambda: 0)

    def bench_step(name, lines, variant, folder, parts):
        calls.append((variant, lines))
        yield {}

    monkeypatch.setattr(switches, "bench_step", bench_step)
    with on_target("cuda", (9, 0)):
        assert len(list(switches.bench_switches("gpt_d12", ["model.depth=2"]))) == 20
        assert calls[0] == ("bf16", ["model.depth=2"])
        assert calls[1] == ("xla", ["model.depth=2", *switches.NONE])
        calls.clear()
        list(switches.bench_switches("gpt_d12", [], "fp8"))
        assert calls == [("fp8", ["model.fp8=blocks"])]
        calls.clear()
        list(switches.bench_switches("gpt_d12", [], "bf16 and fp8_head, bf16"))
        assert calls == [("bf16 and fp8_head", ["model.kernels.loss=fp8_head"]), ("bf16", [])]
        calls.clear()
        list(switches.bench_switches("gpt_d12", ["optim={name: adamw}"]))
        assert "xla and symmetric" not in dict(calls)
        assert not any(line.startswith("optim.s") for _, lines in calls for line in lines)


def test_each_precision_stands_beside_nanochat_in_its_own(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(switches.jax, "clear_caches", lambda: None)
    monkeypatch.setattr(switches.gc, "collect", lambda: 0)
    monkeypatch.setattr(switches, "bench_step", lambda *_: iter([{}]))
    row = lambda checkout, name, lines: asked.append(lines) or [{"peer": len(asked)}]
    monkeypatch.setattr(switches, "nanochat_step", row)
    with on_target("cuda", (9, 0)):
        names = "bf16, fp8_delayed and all, bf16 and fp8_head"
        records = list(
            switches.bench_switches("gpt_d12", ["model.depth=2"], names, checkout=tmp_path)
        )
        assert asked == [["model.depth=2"], ["model.depth=2", "model.fp8=blocks"]]
        assert [one["beside"][0]["peer"] for one in records] == [1, 2, 1]
        list(switches.bench_switches("gpt_d12", [], "fp8", checkout=tmp_path))
        assert asked[2:] == [["model.fp8=blocks"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "compares the kernels for Hopper: needs an NVIDIA GPU"), (["--variant", "x"], "xla and")],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert main(["step", "--switches", *arguments]) == 2
    assert message in capsys.readouterr().err

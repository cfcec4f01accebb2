"""What somebody meets who starts for the first time."""

import re

import jax
import pytest
import yaml
from tiny import QUICK, assignments, run_overrides

from jaxtrain.config import load_config
from jaxtrain.config.resolve import resolve
from jaxtrain.estimate import dry_run as preflight
from jaxtrain.estimate.traffic import device_named, rates_of
from jaxtrain.main import main
from jaxtrain.runs.environment import peak_flops
from jaxtrain.runs.history import read_rows
from jaxtrain.settings import UserError
from jaxtrain.train import prepare
from jaxtrain.train.memory_advice import memory_advice
from jaxtrain.train.run_directory import check_text


def test_no_arguments_show_what_to_begin_with(capsys, monkeypatch):
    monkeypatch.setattr("jaxtrain.train.loop.train", lambda *_: pytest.fail("a run begins"))
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("usage: jaxtrain") and "--config quickstart" in out and "--help" in out
    assert max(map(len, out.splitlines())) <= 100 and len(out.splitlines()) < 35 and not err


@pytest.mark.slow
def test_a_warm_up_longer_than_the_run_is_shortened_and_said(tmp_path, capfd):
    changes = {"train__steps": 2, "optim__schedule__warmup_steps": 40} | QUICK
    assert main(run_overrides(tmp_path, **changes)) == 0
    out = capfd.readouterr().out
    assert "\nwarm-up  optim.schedule.warmup_steps 40 -> 0: the run has 2 steps\n" in out
    assert "\ndata     tinyshakespeare: " in out
    saved = yaml.safe_load((tmp_path / "tiny" / "config.yaml").read_text())
    assert saved["optim"]["schedule"]["warmup_steps"] == 0
    rows = read_rows(tmp_path / "tiny" / "metrics.jsonl")
    assert max(row["lr"] for row in rows if row["kind"] == "train") > 0
    assert main(run_overrides(tmp_path, **changes)) == 0  # the same run, not another


def test_a_warm_up_as_long_as_the_run_stays(capsys):
    steps = lambda n: load_config(None, [f"train.steps={n}", "data.tokenizer.name=bytes"])
    assert resolve(steps(40), 256).optim.schedule.warmup_steps == 40
    assert resolve(steps(39), 256).optim.schedule.warmup_steps == 3
    assert main(["--print-config", "train.steps=39"]) == 0
    assert "# warm-up  optim.schedule.warmup_steps 40 -> 3: the run has 39 steps" in (
        capsys.readouterr().out
    )


def test_a_start_from_a_model_names_its_text(whole, capsys):
    start = f"train.init_from={whole}"
    line = f"data.train.path: training from {whole} needs a text; "
    for more in ([], ["data.train.document=line"]):
        with pytest.raises(UserError, match="data.train.path=tinyshakespeare is the one that"):
            check_text(load_config(None, [start, *more]))
    assert main([start]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")
    assert prepare.main([start]) == 2
    check_text(load_config(None, [start, "data.train.path=tinyshakespeare"]))
    check_text(load_config(None, []))


# ---- the dry run ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dry_run_that_does_not_fit_exits_with_1_and_gives_the_advice(capsys):
    small = ["--config", "quickstart", "--dry-run", "--device", "4090", "--memory", "0.01"]
    assert main([*small, "model.depth=1", *assignments(**QUICK)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("on 1 x RTX-4090") and any("does NOT fit" in x for x in out)
    assert re.fullmatch(
        r"out of device memory: a step needs [\d.]+ MiB, the device has 10.2 MiB; lower "
        r"train.device_batch_size \(now 8\) or set model.remat=block", out[-1],
    )  # fmt: skip


def test_advice_names_what_is_still_open():
    base = ["data.tokenizer.name=bytes", "train.batch_size=8", "train.steps=1"]
    advice = lambda *more: memory_advice(
        resolve(load_config(None, [*base, *more]), 256, jax.devices()[:1]), 3 * 2**30, None
    ).partition("; ")[2]
    assert advice() == "lower train.device_batch_size (now 8) or set model.remat=block"
    one = "train.device_batch_size=1"
    assert advice(one) == "set model.remat=block or set optim.offload.name=host"
    block = [one, "model.remat=block"]
    assert advice(*block, "finetune.name=lora") == (
        "set finetune.base_quantization=nf4 or set optim.offload.name=host"
    )
    assert advice(*block, "optim.offload.name=host") == (
        "shorten train.sequence_length, or take more devices (mesh.data=1 mesh.fsdp=auto)"
    )


@pytest.mark.slow
def test_a_dry_run_from_a_model_alone(whole, capsys, monkeypatch):
    adam = "optim.name=adamw"  # which compiles in half of the time
    assert main(["--dry-run", "--device", "L4", f"train.init_from={whole}", adam]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny: ") and lines[1].startswith("on 1 x L4")
    with monkeypatch.context() as patch:
        patch.setattr(
            preflight, "preflight", lambda name, overrides, *_: pytest.fail(str(overrides))
        )
        with pytest.raises(pytest.fail.Exception, match="train.steps=1"):
            main(["--dry-run", f"train.init_from={whole}", "finetune.name=lora"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("4090", "RTX-4090"), ("RTX 4090", "RTX-4090"), ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("rtx3090", "RTX-3090"), ("l4", "L4"), ("NVIDIA L40S", "L40S"), ("a10", "A10"),
        ("rtx 6000 ada", "RTX-6000-Ada"), ("RTX PRO 6000 Blackwell", "RTX-PRO-6000"),
        ("b200", "B200"), ("H100", "H100"), ("CPU", "CPU"),
    ],
)  # fmt: skip
def test_a_device_by_any_of_its_names(text, kind):
    assert device_named(text) == kind
    name = kind.replace("-", " ")
    assert kind == "CPU" or peak_flops(name), name
    assert rates_of(kind).memory >= 16 * 10**9


def test_a_device_that_is_not_there_or_two(capsys):
    for text, message in {"6000": "is RTX-6000-Ada or RTX-PRO-6000", "MI50": "has no fig"}.items():
        assert main(["--config", "quickstart", "--dry-run", "--device", text]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --device {text} {message}") and "RTX-3090" in line

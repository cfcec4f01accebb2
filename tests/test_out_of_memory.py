"""Steps that need more memory than the device has: one line that says what makes them smaller."""

import re
from types import SimpleNamespace

import jax
import pytest
from test_train import refused
from tiny import QUICK, run_overrides

from jaxtrain.runs.metrics import MetricsWriter
from jaxtrain.train import program

ADVICE = r"set model\.remat=block or set optim\.offload\.name=host"


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_refused_before_it_runs(tmp_path, capfd, monkeypatch):
    device = SimpleNamespace(
        platform="cpu", device_kind="cpu", memory_stats=lambda: {"bytes_limit": 2**14}
    )
    monkeypatch.setattr(program.jax, "local_devices", lambda: [device])
    message = refused(capfd, run_overrides(tmp_path, **QUICK))
    needed = re.match(
        r"out of device memory: a step needs (.*), the device has 16.0 KiB; ", message
    )
    assert needed and "iB" in needed[1] and re.search(ADVICE, message)


@pytest.mark.slow
def test_memory_that_runs_out_later_is_explained(tmp_path, capfd, monkeypatch):
    def push(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(MetricsWriter, "push", push)
    message = refused(capfd, run_overrides(tmp_path, **QUICK))
    assert re.match(r"out of device memory: a step needs [^,;]*iB; " + ADVICE, message)

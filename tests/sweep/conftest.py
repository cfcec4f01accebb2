"""Runs of one device: a step of eight takes longer to compile."""

import jax
import pytest


@pytest.fixture
def one_device(monkeypatch):
    """Here, and in the processes that a test starts."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")

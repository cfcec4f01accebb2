"""What a process says and sets at its start."""

import logging
import os

import pytest
from jaxtrain_kernels.dispatch import on_target

from jaxtrain.parallel.runtime import show_kernel_choices, take_memory


@pytest.fixture
def logger():
    logger = logging.getLogger("jaxtrain_kernels")
    before = logger.handlers, logger.propagate, logger.level
    yield logger
    logger.handlers, logger.propagate, logger.level = before


def test_kernel_choices_are_shown_but_on_a_cpu(logger, capsys):
    show_kernel_choices()
    logger.info("attention: xla")
    assert capsys.readouterr().err == ""
    with on_target("cuda", (9, 0), "NVIDIA H200"):
        logger.info("attention: mosaic")
    assert capsys.readouterr().err == "kernel   attention: mosaic\n"


@pytest.mark.parametrize(
    "said", [None, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"]
)
def test_most_of_the_memory_is_taken_unless_somebody_says_how_much(said, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    if said:
        monkeypatch.setenv(said, "0.5")
    take_memory()
    found = {name: value for name, value in os.environ.items() if name.endswith("MEM_FRACTION")}
    assert found == ({said: "0.5"} if said else {"XLA_CLIENT_MEM_FRACTION": "0.9"})

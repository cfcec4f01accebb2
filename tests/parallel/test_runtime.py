"""What a process says at its start: which kernel serves what, where there is a choice."""

import logging

import pytest
from jaxtrain_kernels.dispatch import on_target

from jaxtrain.parallel.runtime import show_kernel_choices


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

"""What a process says and sets at its start."""

import logging
import os
import threading
from importlib import metadata

import jax
import pytest
from jaxtrain_kernels.dispatch import on_target

from jaxtrain.cluster import runtime
from jaxtrain.cluster.runtime import show_kernel_choices, start_devices, take_memory


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


HOST = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


@pytest.mark.parametrize(
    "said", [None, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"]
)
def test_most_of_the_memory_is_taken_unless_somebody_says_how_much(said, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    if said:
        monkeypatch.setenv(said, "0.5")
    monkeypatch.setenv(HOST, "0")
    monkeypatch.delenv(HOST)
    take_memory()
    found = {name: value for name, value in os.environ.items() if name.endswith("MEM_FRACTION")}
    assert found == ({said: "0.5"} if said else {"XLA_CLIENT_MEM_FRACTION": "0.9"})
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert 0.85 * most - 1 < int(os.environ[HOST]) <= 0.9 * most
    os.environ[HOST] = "7"
    take_memory()
    assert os.environ[HOST] == "7"


@pytest.mark.parametrize(
    ("platforms", "plugins", "expected"),
    [("cpu", ["xla_cuda13"], True), ("cuda,cpu", [], False), (None, [], True), ("", ["x"], False)],
)
def test_freed_memory_is_kept_where_there_are_only_cpus(platforms, plugins, expected, monkeypatch):
    """With a GPU, the threads that compile for it would wait for each other."""
    kept = []
    monkeypatch.setattr(runtime, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", platforms)
        runtime.start(quiet=True)
    finally:
        jax.config.update("jax_platforms", before)
    assert bool(kept) == expected


@pytest.mark.parametrize(("asked", "kept"), [(1.0, 0.1), (0.0, 0.0)])
def test_programs_of_a_tenth_of_a_second_are_kept_or_of_less_where_asked(asked, kept):
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, asked)
        runtime.start(quiet=True)
        assert getattr(jax.config, name) == kept
    finally:
        jax.config.update(name, before)


def joined():
    for thread in set(threading.enumerate()) - {threading.main_thread()}:
        if "start_devices" in repr(getattr(thread, "_target", None)):
            thread.join()


def test_devices_and_workers_start_in_a_thread(monkeypatch):
    begun, put = [], jax.device_put
    note = lambda x, where: begun.append((threading.current_thread(), where)) or put(x, where)
    monkeypatch.setattr(jax, "device_put", note)
    monkeypatch.setattr(runtime, "start_workers", lambda: begun.append("workers"))
    start_devices()
    joined()
    assert begun[0] == "workers" and [where for _, where in begun[1:]] == jax.local_devices()
    assert threading.main_thread() not in {thread for thread, _ in begun[1:]}


def test_a_device_that_does_not_start_is_left_to_its_first_use(monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    monkeypatch.setattr(jax, "local_devices", lambda: [][0])
    start_devices()
    joined()
    assert not said

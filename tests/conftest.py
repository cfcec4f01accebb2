"""Test set-up: eight virtual CPU devices, a compilation cache, jaxtyping annotations checked.

The slow tier does not check annotations, for a fifth of its time; JAXTRAIN_TYPES=1 does there, too.
"""

import gc
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import annotations
import hypothesis
import pytest

# Its threads wait in loops, and there is a process of tests on each core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Where the environment writes no bytecode, each process would compile every library anew.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
# Before the first import of the packages under test: their annotations are checked at calls.
if os.environ.get("JAXTRAIN_TYPES") or not os.environ.get("JAXTRAIN_SLOW"):
    annotations.install("jaxtrain", "jaxtrain_kernels")

# JAX reads its settings from the environment when it is imported, not here: the process that gives
# tests to others needs none.
assert "jax" not in sys.modules

SETTINGS = {
    "jax_compilation_cache_dir": str(Path(__file__).parents[1] / ".cache" / "jax-tests"),
    # Also single operations: each process of tests would compile them anew, at twice the time that
    # reading them takes.
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
    "jax_numpy_rank_promotion": "raise",
}
if os.environ.get("JAXTRAIN_GPU"):
    SETTINGS["jax_platforms"] = "cuda,cpu"
else:
    # Programs this small take longer to optimise than to run.
    SETTINGS |= {"jax_platforms": "cpu", "jax_num_cpu_devices": 8}
    SETTINGS |= {"jax_disable_most_optimizations": True}
    if version("jax").startswith("0.11."):  # a process ends at a flag that its XLA does not know
        # Half of compiling was in the newer emitters, of which each kernel is an MLIR module.
        # A module cut into 32 parts, for as many threads, takes longer than one.
        flags = "--xla_cpu_opt_preset=FAST_COMPILE --xla_cpu_parallel_codegen_split_count=1"
        options = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        os.environ.setdefault("XLA_FLAGS", f"{flags} {options}")
os.environ["MPLBACKEND"] = "agg"
# A hub on this machine answers late when it is busy.
os.environ |= {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
# Ray's processes would get what the other tests leave of a core, and a node would begin with one
# that no task uses: ours have an environment of their own.
os.environ |= {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
for name, value in SETTINGS.items():
    os.environ.setdefault(name.upper(), str(value))  # also for the processes that tests start
# A first example may wait for a compilation; and every machine tries the same examples.
hypothesis.settings.register_profile("jaxtrain", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxtrain")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    import jax

    mark_slow_cases(config, items)
    if jax.default_backend() != "gpu":
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if not os.environ.get("JAXTRAIN_SLOW"):
        leave_out_slow(config, items)


def leave_out_slow(config, items):
    """A test that the command line names is skipped, with the reason; the others are not there."""
    slow = [x for x in items if "slow" in x.keywords and "default_tier" not in x.keywords]
    if any("::" in argument for argument in config.args):
        for item in slow:
            item.add_marker(pytest.mark.skip(reason="takes long: JAXTRAIN_SLOW=1"))
    elif slow:
        gone = set(slow)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=slow)


def mark_slow_cases(config, items):
    """Of a test with `quick(*ids)` the other cases are slow; UsageError for an id that is none."""
    cases = {}
    for item in items:
        if marker := item.get_closest_marker("quick"):
            cases.setdefault(item.nodeid.split("[")[0], {})[item.callspec.id] = item
            if item.callspec.id not in marker.args:
                item.add_marker(pytest.mark.slow)
    if config.getoption("lf", default=False) or any("::" in argument for argument in config.args):
        return  # some cases by themselves
    for name, items_of in cases.items():
        marker = next(iter(items_of.values())).get_closest_marker("quick")
        if missing := set(marker.args) - items_of.keys():
            raise pytest.UsageError(f"{name}: quick names cases that are not there: {missing}")


def pytest_runtest_setup():
    annotations.begin_test()


def pytest_collection_finish():
    """What is there by now stays: a tenth of the suite's time was in looking for garbage in it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """An uninterrupted run of six steps with a checkpoint at the third; not to be changed."""
    from tiny import WHOLE, run_overrides

    from jaxtrain.main import main  # under the hook

    directory = tmp_path_factory.mktemp("whole")
    assert main(run_overrides(directory, **WHOLE)) == 0
    return directory / "tiny"


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "tiny"))


@pytest.fixture
def one_device(monkeypatch):
    """Here, and in the processes that a test starts: a run of eight takes half as long again, and
    shows nothing more where the mesh is not the point."""
    import jax

    devices = jax.devices()[:1]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setattr(jax, "devices", lambda *_: devices)  # undone after what the test patches


@pytest.fixture(scope="session")
def s3_server():
    import s3_server  # moto takes a second to import

    before = dict(os.environ)
    server = s3_server.start()
    yield server
    server.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def s3(s3_server):
    """A server of S3 whose faults are the test's own."""
    s3_server.reset()
    yield s3_server
    s3_server.reset()

"""Compiled steps in JAX's compilation cache folder. They need neither a trace nor a lowering.

JAX's own cache finds a compiled program by its lowered text, so a second start still traces and
lowers. Here the key is what the trace depends on: the configuration, the token tables, the
arguments' types and shardings, the mesh, versions of all installed packages, our sources, JAX's
settings and XLA's flags. A process whose `__main__` is not a command of ours may have changed our
functions, so it neither reads nor writes these files; nor does a job of several processes.

The files contain pickles and machine code, as JAX's own. See `disk_cache` for who must be trusted.
"""

import contextlib
import hashlib
import logging
import os
import pickle
import platform
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh
from jaxtrain_kernels.disk_cache import cache_folder, hash_of_sources, read_file, write_file
from jaxtrain_kernels.hopper import export_cache
from jaxtyping import PyTree

from jaxtrain.config.resolve import Resolved

COMMANDS = ("jaxtrain.cli", "jaxtrain.main")  # their processes run our functions alone
SOURCES = hash_of_sources(Path(__file__).parents[1]), export_cache.SOURCES
KERNELS = logging.getLogger("jaxtrain_kernels")
VARIABLES = ("XLA_", "TF_", "NVIDIA_TF32", "TRITON_")  # of the environment, which XLA reads
PLACE = {"name", "directory", "preemption"}  # fields of `run` that no program depends on


def origin_of(c: Resolved, pieces: Sequence[bytes]) -> str:
    """Describe all that `features.step_of` makes a step from, without the mesh. pieces: tokens."""
    tokens = hashlib.sha256(repr(pieces).encode()).hexdigest()
    return f"{c.model_dump_json(exclude={'run': PLACE})} {tokens}"


def cached_executable(
    compile_step: Callable[[], jax.stages.Compiled],
    origin: str | None,
    arguments: tuple[PyTree, ...],
    options: dict[str, Any],
) -> jax.stages.Compiled:
    """Read a compiled step from the folder, or else compile it and keep it there.

    origin: `origin_of`; None if it is not known, then nothing is read or kept. arguments: arrays of
    the current mesh, or their types. options: of the compiler.
    """
    mesh = jax.sharding.get_mesh()
    path = _path(origin, arguments, mesh, options)
    if path and (kept := _read(path, arguments, mesh)):
        return kept
    before = MISSES[threading.get_ident()]
    with _noting_lines() as lines:
        compiled = compile_step()
    # A program that JAX read from its own cache cannot be serialized again (on a CPU it would lack
    # its functions), so only one that XLA has compiled just now is kept. Kernels of fa4-jax are
    # known to XLA only in a process that traces them.
    if path and MISSES[threading.get_ident()] > before and "fa4_jax" not in sys.modules:
        _write(path, compiled, lines)
    return compiled


def _path(
    origin: str | None, arguments: PyTree, mesh: Mesh, options: dict[str, Any]
) -> Path | None:
    """Path of a compiled step's file; None if it is not kept."""
    folder = cache_folder("steps")
    if origin is None or folder is None or None in SOURCES or not runs_command():
        return None
    if jax.process_count() > 1 or jax.config.jax_disable_jit:
        return None
    leaves, tree = jax.tree.flatten(arguments)
    types = [(str(jax.typeof(x)), str(x.sharding)) for x in leaves]
    key = origin, str(tree), types, mesh_key(mesh), sorted(options.items()), process_key()
    return folder / hashlib.sha256(repr(key).encode()).hexdigest()


def runs_command() -> bool:
    """Whether this process runs `jaxtrain` or one of its modules."""
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):
        return spec.name in COMMANDS
    return Path(getattr(main, "__file__", None) or "").name == "jaxtrain"


def mesh_key(mesh: Mesh) -> Any:
    """Describe a mesh: its axes, and its devices in their order."""
    devices = [(d.id, d.device_kind) for d in mesh.devices.flat]
    client = mesh.devices.flat[0].client
    known = [(d.id, d.device_kind) for d in client.devices()]
    axes = mesh.axis_names, mesh.devices.shape, str(mesh.axis_types)
    return axes, devices, known, client.platform, client.platform_version


def process_key() -> Any:
    """Describe what else a trace and a compilation depend on in this process."""
    settings = {name: str(getattr(jax.config, name, None)) for name in jax.config.values}
    flags = {name: x for name, x in os.environ.items() if name.startswith(VARIABLES)}
    packages = {
        entry
        for folder in sys.path
        if os.path.isdir(folder or ".")
        for entry in os.listdir(folder or ".")
        if entry.endswith((".dist-info", ".egg-info"))
    }
    host = sys.version, platform.machine(), cpu_features()
    return sorted(settings.items()), sorted(flags.items()), sorted(packages), host, SOURCES


def cpu_features() -> str:
    """Instruction sets of the CPU, on which compiled host code depends; "" if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _read(path: Path, arguments: tuple[PyTree, ...], mesh: Mesh) -> jax.stages.Compiled | None:
    """Load a compiled step onto the mesh's devices; None if there is none that can be read."""
    content = read_file(path)
    if content is None:
        return None
    devices = list(mesh.devices.flat)
    try:
        parts, lines = pickle.loads(content)
        compiled = deserialize_and_load(
            *parts, backend=devices[0].client, execution_devices=devices
        )
    except Exception:  # a damaged file, or one of a runtime that the key does not tell apart
        return None
    if compiled.in_tree != jax.tree.structure((arguments, {})):
        return None
    for line in lines:
        KERNELS.info("%s", line)
    return compiled


def _write(path: Path, compiled: jax.stages.Compiled, lines: Sequence[str]) -> None:
    """Keep a compiled step, if it can be kept: one that calls Python cannot."""
    try:
        content = pickle.dumps((serialize(compiled), lines))
    except Exception:  # such as a callback, or constants that are arguments
        return
    write_file(path, content)


@contextlib.contextmanager
def _noting_lines() -> Iterator[list[str]]:
    """The kernel choices that are logged inside, for runs that do not trace the step."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    KERNELS.addHandler(handler)
    try:
        yield lines
    finally:
        KERNELS.removeHandler(handler)


def _count(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_misses":
        MISSES[threading.get_ident()] += 1


MISSES = Counter[int]()  # programs that XLA compiled and JAX wrote to its cache, by thread
jax.monitoring.register_event_listener(_count)

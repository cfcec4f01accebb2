"""Backend selection: one rule for every op.

An op keeps a dict literal `{name: module}`, fastest first. Each module has
`supports(target, ...) -> str | None`, which returns why it cannot serve the call (None = it can).
"""

import contextlib
import contextvars
import functools
import logging
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

logger = logging.getLogger("jaxtrain_kernels")


class Target(NamedTuple):
    """The device of a trace: "cpu", "cuda", "rocm" or "tpu"; for CUDA also (major, minor).

    kind: JAX's device kind ("NVIDIA H200"); None if no such device is attached.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    kind: str | None = None


_override: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def on_target(
    platform: str, compute_capability: tuple[int, int] | None = None, kind: str | None = None
) -> Iterator[None]:
    """Traces made inside choose backends for this device instead of JAX's default device.

    For lowering without the device: `jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))`.
    jit's cache key does not include the target, so create the traced function inside the block.
    """
    token = _override.set(Target(platform, compute_capability, kind))
    try:
        yield
    finally:
        _override.reset(token)


def target() -> Target:
    """Return the device that backends are currently chosen for."""
    if (override := _override.get()) is not None:
        return override
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return Target(device.platform, kind=device.device_kind)
    if "cuda" not in device.client.platform_version:
        return Target("rocm", kind=device.device_kind)
    major, minor = device.compute_capability.split(".")
    return Target("cuda", (int(major), int(minor)), device.device_kind)


def mesh_devices() -> int:
    """Number of devices along the current mesh's axes that no enclosing `jax.shard_map` splits."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(n for name, n in mesh.shape.items() if name not in mesh.manual_axes)


def triton_unsupported(on: Target) -> str | None:
    """Return why an unpartitioned Triton kernel cannot run on this target; None = it can."""
    cc = on.compute_capability
    if on.platform != "cuda":
        return f"needs an NVIDIA GPU, this is {on.platform}"
    if cc is None or cc < (8, 0):
        return f"needs compute capability 8.0 (Ampere), this is {cc}"
    if (devices := mesh_devices()) > 1:
        return f"has no partitioning rule, and the mesh has {devices} devices"
    return None


def choose_backend(
    op: str, reasons: Mapping[str, str | None], implementation: str | None, signature: str
) -> str:
    """Return the name of the backend: `implementation`, or else the first that can serve the call.

    `reasons`: why each backend cannot serve (None = it can), fastest first. `signature` describes
    shapes, dtype and options for the log. Raises ValueError for an unknown name,
    NotImplementedError if the named backend (or, without a name, every backend) cannot serve.
    """
    if implementation is not None:
        if implementation not in reasons:
            raise ValueError(f"{op} has no backend {implementation!r}; it has {', '.join(reasons)}")
        if reason := reasons[implementation]:
            raise NotImplementedError(f"{op}: {implementation} cannot serve {signature}: {reason}")
        _log_once(op, implementation, signature, "")
        return implementation
    passed_over = []
    for name, reason in reasons.items():
        if reason is None:
            _log_once(op, name, signature, "; ".join(passed_over))
            return name
        passed_over.append(f"{name}: {reason}")
    raise NotImplementedError(f"{op}: no backend for {signature}: {'; '.join(passed_over)}")


@functools.cache
def _log_once(op: str, backend: str, signature: str, passed_over: str) -> None:
    note = f" (passed over {passed_over})" if passed_over else ""
    logger.info("%s %s: %s%s", op, signature, backend, note)

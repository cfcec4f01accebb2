"""Dry run: memory, collectives and time of a step on a mesh of virtual devices.

XLA's CPU compiler compiles the step for that number of virtual devices. Weights, optimizer states
and gradients are exact. Activations and scratch are an estimate (see `liveness`), because the GPU
compiler fuses differently. A deep model is compiled at two small depths, and the results are
extrapolated.
"""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, lcm
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from jaxtrain.config import find_config, load_config
from jaxtrain.estimate.arguments import has
from jaxtrain.estimate.fake_attention import outlined
from jaxtrain.estimate.liveness import peak_bytes
from jaxtrain.estimate.reference import reference_bytes
from jaxtrain.estimate.traffic import (
    Collective,
    collectives,
    device_named,
    rates_of,
    step_seconds,
)
from jaxtrain.estimate.workload import (
    Workload,
    abstract_frozen,
    abstract_state,
    at_depth,
    batch_shapes,
    branch_share,
    idle,
    kinds_of,
    load_workload,
    new_hyperparams,
)  # fmt: skip
from jaxtrain.parallel import partition_spec
from jaxtrain.parallel.axes import ZERO
from jaxtrain.parallel.mesh import AXES, device_grid
from jaxtrain.runs.environment import describe
from jaxtrain.runs.metrics import format_bytes
from jaxtrain.settings import UserError
from jaxtrain.train.features import wrap_step
from jaxtrain.train.memory_advice import memory_advice
from jaxtrain.train.step import make_step

# No fusion and no LLVM optimization: only the HLO text is used. Weights are gathered in each
# iteration of the microbatch loop, as the GPU compiler does it.
OPTIONS: dict[str, Any] = {
    "xla_disable_hlo_passes": "fusion,cpu-instruction-fusion,cpu-multi-output-fusion,ynn-fusion,"
    "library-rewriter,dot-library-rewriter,all-reduce-promotion,while-loop-invariant-code-motion",
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
HOST = "pinned_host"  # the host's memory, as seen from a device
# Fraction of a device's memory that a step may use. The activation estimate may be too low.
USABLE = 0.9


class Facts(NamedTuple):
    """Memory and collectives of one compiled program."""

    live: float  # peak bytes of activations, gradients and scratch
    sent: list[Collective]


def virtual_devices(count: int) -> None:
    """Create `count` CPU devices. Raises UserError if JAX has already started with fewer."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # jax has started already
        pass
    if len(jax.devices("cpu")) < count:
        raise UserError(
            f"this process has started with {len(jax.devices('cpu'))} devices; {count} virtual "
            "ones need a fresh one"
        )


def preflight(
    name: str | None, overrides: Sequence[str], devices: int, kind: str, memory: int | None = None
) -> dict[str, Any]:
    """Dry-run record of a configuration on `devices` virtual devices that stand in for `kind`."""
    rates, begin = rates_of(kind), time.perf_counter()
    path = find_config(name) if name else None
    if kind == "CPU" and load_config(path, overrides).train.precision == "auto":
        overrides = [*overrides, "train.precision=float32"]
    with outlined(f"NVIDIA {kind}", rates.capability) as backend:
        attention, pretended = backend if rates.flash else "xla", jax.devices("cpu")[:devices]
        w = with_replicas(plain_workload(name, overrides, pretended, attention))
        facts = measured(w)
    exact = exact_bytes(w)
    rest = max(0.0, facts.live - exact["gradients"] - exact["copy"])
    resident = sum(exact[kind] for kind in ("frozen", "reference", "parameters", "states"))
    total = resident + max(facts.live, exact["gradients"] + exact["copy"])
    across = hosts_of(w.mesh, rates.per_host)
    seconds = step_seconds(w.flops_per_token * w.tokens / devices, facts.sent, kind, across)
    metrics = {f"{k}_bytes": v for k, v in exact.items()} | {
        "activations_bytes": round(rest),
        "total_bytes": round(total),
        "device_bytes": memory or rates.memory,
        "fits": total < USABLE * (memory or rates.memory),
        "compute_ms": 1e3 * seconds[0] / (1 - idle(w, w.config.model.depth)),
        "near_ms": 1e3 * seconds[1],
        "far_ms": 1e3 * seconds[2],
        "compile_s": time.perf_counter() - begin,
    }
    record = describe("preflight", w.name, w.precision, w.facts(), devices)
    sizes = {axis: size for axis, size in w.mesh.shape.items() if size > 1}
    record["workload"] |= {"mesh": sizes, "zero": w.spec.zero, "remat": w.config.model.remat}
    record["workload"]["steps"] = w.config.train.steps
    advice = (
        None if metrics["fits"] else memory_advice(w.config, round(total), metrics["device_bytes"])
    )
    return record | {
        "device": kind,
        "advice": advice,
        "metrics": metrics,
        "collectives": [c._asdict() for c in facts.sent],
    }


def plain_workload(
    name: str | None, overrides: Sequence[str], devices: Sequence[Any], attention: str
) -> Workload:
    """The workload without fp8 and fused kernels, and with an attention backend for the CPU.

    Reference backends of attention and of the loss stay: they keep all scores or logits in memory.
    """
    asked = load_config(find_config(name) if name else None, overrides).model
    loss = "reference" if asked.kernels.loss == "reference" else "xla"
    attention = "reference" if asked.attention == "reference" else attention
    plain = ["model.fp8=null", "model.fp8_history=null", "model.fp8_hidden=false"]
    plain += [f"model.kernels={{norm: xla, rope: xla, ffn: xla, loss: {loss}}}"]
    plain += [f"model.attention={attention}"]
    load = lambda *more: load_workload(name, [*overrides, *plain, *more], devices, True)
    w, more = load(), []
    # Only the XLA backend supports document masks under context parallelism.
    if w.config.model.document_mask and w.mesh.shape["context"] > 1:
        more += ["model.attention=xla"]
    return load(*more) if more else w


def measured(w: Workload) -> Facts:
    """Facts at the full depth: compiled, or extrapolated from two small depths."""
    c = w.config.model
    chunks = w.mesh.shape["pipeline"] * w.config.mesh.pipeline_repeats
    every = c.moe.every if c.moe else 1
    of_set = lcm(*(getattr(share, "layers", 1) for share in (c.share_layers, c.share_kv)))
    period = lcm(len(c.window_pattern), 2 if c.value_embeddings else 1, every, of_set) * chunks
    small = period * ceil(4 / period)
    if sum(map(len, kinds_of(w))) <= 2 * small:  # number of compiled layers
        return facts_of(w)
    one, two = (facts_of(with_replicas(at_depth(w, n * small))) for n in (1, 2))
    more = (c.depth - 2 * small) / small
    carry = lambda a, b: b + (b - a) * more
    before = {s[:3]: s for s in one.sent}
    sent = []
    for s in two.sent:
        old = before.get(s[:3], s._replace(times=0, bytes=0))
        sent.append(
            s._replace(times=round(carry(old.times, s.times)), bytes=carry(old.bytes, s.bytes))
        )
    return Facts(carry(one.live, two.live), sorted(sent, key=lambda s: -s.bytes))


def with_replicas(w: Workload) -> Workload:
    """The workload with the step's wrappers applied, as local SGD replicas."""
    return w._replace(spec=wrap_step(w.spec, w.config, w.mesh))


def trace_step(w: Workload) -> jax.stages.Traced:
    """The step of a workload, traced on its mesh."""
    with jax.set_mesh(w.mesh):
        return make_step(w.spec, w.mesh).trace(
            abstract_state(w), batch_shapes(w), new_hyperparams(w), abstract_frozen(w)
        )


def lower_step(w: Workload) -> jax.stages.Lowered:
    """The step of a workload, lowered for its mesh."""
    with jax.set_mesh(w.mesh):
        return trace_step(w).lower()


def facts_of(w: Workload) -> Facts:
    lowered = lower_step(w)
    with jax.set_mesh(w.mesh):
        hlo = lowered.compile(compiler_options=OPTIONS).as_text()
    assert hlo is not None
    return Facts(peak_bytes(hlo), collectives(hlo, dict(w.mesh.shape), branch_share(w)))


def exact_bytes(w: Workload) -> dict[str, int]:
    """Bytes on one device that follow from shapes and sharding rules alone.

    host, files: optimizer states in host memory and in files, summed over all devices. With states
    in files, the host buffers a few parts at a time. copy: the weights in the compute dtype.
    gradients: in the compute dtype, or accumulated in float32.
    """
    state = abstract_state(w)
    accumulated = batch_shapes(w).tokens_BT.shape[0] > 1
    width = w.spec.dtype.itemsize

    def split(kind: str, widths: Any) -> int:
        without = None if kind in ZERO[w.spec.zero] else "fsdp"
        total = 0
        for s in jax.tree.leaves(w.spec.specs):
            where = NamedSharding(w.mesh, partition_spec(s.axes, s.shape, w.mesh, without))
            total += shard_bytes(s.shape, where, widths(s))
        return total

    own = lambda s: 4 if s.role in ("gain", "scalar") else width
    copied = w.spec.zero < 3 or w.spec.dtype != jnp.float32
    frozen, loop = abstract_frozen(w), w.spec.update_loop
    waiting = [x for x in jax.tree.leaves(state.optimizer) if x.sharding.memory_kind == HOST]
    return {
        "host": loop.host_bytes if loop else sum(x.size * x.dtype.itemsize for x in waiting),
        "files": loop.files.nbytes if loop else 0,
        "frozen": tree_bytes(frozen),
        "reference": reference_bytes(w.config, w.mesh, w.spec.dtype, w.vocab_size),
        "parameters": tree_bytes(state.params),
        "states": tree_bytes(state.optimizer) + (loop.device_bytes if loop else 0),
        "copy": split("parameters", own) if copied else 0,
        "gradients": split("gradients", (lambda s: 4) if accumulated else own),
    }


def tree_bytes(tree: PyTree) -> int:
    """Bytes of a tree on one device, without arrays in host memory."""
    return sum(
        shard_bytes(x.shape, x.sharding, x.dtype.itemsize)
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind != HOST
    )


def shard_bytes(shape: tuple[int, ...], where: NamedSharding, width: int) -> int:
    size = width
    for n in where.shard_shape(shape):
        size *= n
    return size


def hosts_of(mesh: Mesh, per_host: int) -> dict[str, int]:
    """Number of hosts that each mesh axis spans, on the fewest hosts that have equally many
    devices, at most `per_host` each."""
    count = next(n for n in range(ceil(mesh.size / per_host), mesh.size + 1) if mesh.size % n == 0)
    each = mesh.size // count
    devices = [
        SimpleNamespace(id=n, process_index=n // each, platform="cpu", device_kind="cpu")
        for n in range(mesh.size)
    ]
    hosts = device_grid(dict(mesh.shape), devices)
    across = {}
    for at, axis in enumerate(AXES):
        line: Any = hosts.transpose(at, *(i for i in range(hosts.ndim) if i != at))
        line = line.reshape(mesh.shape[axis], -1)[:, 0]
        across[axis] = len({device.process_index for device in line})
    return across


# ---- the first mesh that fits ------------------------------------------------------------------


def candidate_meshes(devices: int, per_host: int, experts: bool) -> list[list[str]]:
    """Overrides to try, the fastest expected meshes first. experts: whether the model is a MoE.

    data reduces gradients once a step. fsdp also gathers weights, more often with each ZeRO stage;
    traffic between hosts is less with data across hosts and fsdp within a host. model.remat=block
    communicates nothing but recomputes layers. The other axes communicate activations within
    layers: expert the tokens of MoE layers, context keys and values, tensor the whole residual
    stream, four times a layer. pipeline sends little, but its stages idle in the bubble. expert,
    context and tensor stay within a host.
    """
    whole, sharded = ["mesh.data=auto", "mesh.fsdp=1"], ["mesh.data=1", "mesh.fsdp=auto"]
    both = [["mesh.data=auto", f"mesh.fsdp={n}"] for n in shares(devices, per_host)]
    stages = [[*sharded, f"mesh.zero={stage}"] for stage in (1, 2, 3) if devices > 1]
    several = devices > per_host
    before = 1 if several else len(stages)
    found = [whole, *stages[:before], *both, *stages[before:]]
    tight = [*both, sharded] if several else [sharded, *both]
    found += [[*base, "model.remat=block"] for base in (tight if devices > 1 else [whole])]
    divisors = [n for n in range(2, 9) if devices % n == 0]
    near = [n for n in divisors if n <= per_host]
    split = {"expert": near} if experts else {}
    split |= {"context": near, "tensor": near, "pipeline": divisors}
    for axis, sizes in split.items():
        for n in sizes:
            bases = [whole, sharded] if axis == "expert" and n < devices else [sharded]
            found += [[*base, f"mesh.{axis}={n}", "model.remat=block"] for base in bases]
    return found


def shares(devices: int, per_host: int) -> list[int]:
    """Sizes of fsdp to combine with data: the largest divisor of `devices` up to `per_host`, and
    the largest that is a power of two, which divides a model's width more often."""
    few = [n for n in range(2, min(per_host, devices - 1) + 1) if devices % n == 0]
    twos = [n for n in few if n & (n - 1) == 0]
    return list(dict.fromkeys([*few[-1:], *twos[-1:]]))


def first_fit(
    name: str | None,
    overrides: Sequence[str],
    devices: int,
    kind: str,
    memory: int | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The record of the first candidate mesh that fits. Raises UserError if none fits, or, with
    the reasons, if the configuration supports none of them."""
    least, refused = None, []
    path = find_config(name) if name else None
    experts = load_config(path, overrides).model.moe is not None
    for tried in candidate_meshes(devices, rates_of(kind).per_host, experts):
        try:
            record = preflight(name, [*overrides, *tried], devices, kind, memory)
        except UserError as error:  # an axis that does not divide what it splits
            refused.append(str(error))
            continue
        record["overrides"] = tried
        m = record["metrics"]
        say(f"  {' '.join(tried)}: {format_bytes(m['total_bytes'])}")
        if least is None or m["total_bytes"] < least["metrics"]["total_bytes"] or m["fits"]:
            least = record
        if m["fits"]:
            break
    if least is None:
        raise UserError(f"no mesh of {devices} x {kind} to try: {'; '.join(main_reasons(refused))}")
    if refused:
        say(f"  left out: {len(refused)} that this configuration does not take, as {refused[0]}")
    if least["metrics"]["fits"]:
        return least
    raise UserError(
        f"no mesh of {devices} x {kind} ({format_bytes(memory or rates_of(kind).memory)}) holds "
        f"{least['config']}: {' '.join(least['overrides'])} comes closest; {least['advice']}"
    )


def main_reasons(refused: Sequence[str]) -> list[str]:
    """One example of each of the three most frequent kinds of reason.

    A reason begins with the configuration key that it is about."""
    key = lambda reason: re.split("[= :]", reason, maxsplit=1)[0]
    kinds = Counter(map(key, refused)).most_common(3)
    return [next(reason for reason in refused if key(reason) == kind) for kind, _ in kinds]


# ---- on the command line -----------------------------------------------------------------------


def preflight_of(
    a: argparse.Namespace,
    name: str | None,
    overrides: Sequence[str],
    one: Callable[..., dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The record that a command line asks for. one: a function to call instead of `preflight`."""
    if name is None and not has(overrides, "train.init_from"):
        raise UserError(
            "--dry-run: say of which configuration, as in --config gpt_d12, or of which model, as "
            "in train.init_from=runs/NAME"
        )
    if a.fit is not None and a.devices is not None:
        raise UserError(f"--devices {a.devices}: --fit {a.fit} says how many; give one of them")
    count = next(n for n in (a.fit, a.devices, 1) if n is not None)
    if count < 1:
        raise UserError(f"--dry-run on {count} devices: there has to be one")
    virtual_devices(count)
    kind = device_named(a.device) if a.device else "H200"
    memory = int(a.memory * 2**30) if a.memory else None
    if a.fit is None:
        return (one or preflight)(name, overrides, count, kind, memory)
    say = lambda line: print(line, file=sys.stderr, flush=True)
    return first_fit(name, overrides, count, kind, memory, say)

"""NVMe offload: optimizer states in files on a local disk, if the host's memory is too small.

As in ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857). A compiled program computes the
gradients. Then the host loops over parts of the parameters: it updates one part on the device while
threads read the next part and write the previous one. Device and host hold a few parts at a time.
"""

import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from jaxtrain.config.resolve import Resolved
from jaxtrain.model import path_name
from jaxtrain.optim.offload import (
    FileOffload,
    Index,
    OffloadChunk,
    UpdateGroup,
    make_chunk_update,
    masked,
    offload_chunks,
    owner_of,
    part_of,
    with_part,
)
from jaxtrain.optim.state_files import Rows, StateFiles
from jaxtrain.optim.types import Hyper, Hyperparams, OptState
from jaxtrain.settings import UserError
from jaxtrain.train.step import (
    BeforeUpdate,
    State,
    StepSpec,
    after_update,
    init_state,
    state_shardings,
)
from jaxtrain.weights.params import Params

AHEAD = 2  # parts that are prefetched; as many may wait to be written
FOLDER = "states"  # in a run directory
Arrays = list[jax.Array]


class Chunk(NamedTuple):
    """Parameters that are updated together, in a number of parts, and the paths of their states.

    `update(hyper, grads, params, resident, offloaded, shared, i, finite)` updates part i and
    returns (params, resident, offloaded, shared). `begin(params, i)` returns the initial
    `offloaded` states of part i.
    """

    group: str
    names: set[str]
    parts: int
    offloaded: list[str]  # states in files; part i reads its rows
    resident: list[str]  # states on the device, split into parts
    shared: list[str]  # states on the device, used whole by each part
    update: Callable[..., tuple[Params, Arrays, Arrays, Arrays]]
    begin: Callable[[Params, Index], Arrays]


class Part(NamedTuple):
    """The unit of update of one loop iteration."""

    chunk: Chunk
    i: int
    rows: list[tuple[str, Rows | None]]  # file and its rows; None: all rows


def file_offload(spec: StepSpec, c: Resolved, mesh: Mesh, resumed: bool = False) -> StepSpec:
    """Move the step's states into files if `optim.offload` says so; else return the step unchanged.

    UserError for several processes: each would need the files of the others.
    """
    asked = c.optim.offload
    if not isinstance(asked, FileOffload):
        return spec
    if jax.process_count() > 1:
        raise UserError(
            "optim.offload.name=files is for one process, which reads and writes all states; set "
            "optim.offload.name=host, or shard them over the processes (mesh.fsdp=auto)"
        )
    folder = c.run_dir / FOLDER if asked.directory is None else Path(asked.directory)
    loop = FileUpdates(spec, mesh, folder)
    init = lambda params: loop.kept(spec.optimizer.init(params))
    size = loop.files.nbytes
    return spec._replace(
        optimizer=spec.optimizer._replace(init=init),
        update_loop=loop,
        facts=spec.facts | {"file_state_bytes": size},
        summary=f"states   {size:,} bytes in {folder}, read and written in each step",
    )


class FileUpdates:
    """The update of a step with states in files (`UpdateLoop`)."""

    def __init__(self, spec: StepSpec, mesh: Mesh, folder: Path):
        self.spec = spec
        with jax.set_mesh(mesh):
            shapes = jax.eval_shape(functools.partial(init_state, spec, 0))
            self.places = state_shardings(spec, mesh)
            found = jax.tree.map(
                lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
                shapes.optimizer,
                self.places.optimizer,
            )
            table = leaves_by_path(found)
            self.table = table
            offloaded = {k: x for k, x in table.items() if x.sharding.memory_kind == "pinned_host"}
            self.files = StateFiles(folder, offloaded)
            groups = spec.optimizer.groups.items()
            chunks = [one for name, group in groups for one in self._chunks(name, group, shapes)]
        self.parts = [Part(c, i, self._rows(c, i)) for c in chunks for i in range(c.parts)]
        self.in_files = [part for part in self.parts if part.rows]
        self.ahead = min(AHEAD, len(self.in_files))
        self.rates = jax.jit(spec.optimizer.rates)
        self.after = jax.jit(self._after)

    # ---- chunks of parameters --------------------------------------------------------------------

    def kept(self, optimizer: OptState) -> OptState:
        """Return the optimizer state with None in the place of each state that is in a file."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: None if jax.tree_util.keystr(path) in self.files.arrays else x,
            optimizer,
        )

    def _chunks(self, name: str, group: UpdateGroup, shapes: State) -> list[Chunk]:
        """Return the chunks of a group. Parameters without a state in a file come first, if any."""
        params = {
            path_name(path): x
            for path, x in jax.tree_util.tree_leaves_with_path(shapes.params)
            if path_name(path) in group.names
        }
        prefix = prefix_of(name)
        owners = {
            owner_of(path, params)
            for path, _ in jax.tree_util.tree_leaves_with_path(
                shapes.optimizer.inner_states[name].inner_state
            )
            if prefix + jax.tree_util.keystr(path) in self.files.arrays
        }
        specs = {
            path_name(path): s for path, s in jax.tree_util.tree_leaves_with_path(self.spec.specs)
        }
        large = {n: p for n, p in params.items() if n in owners}
        here = OffloadChunk(set(params) - set(large), 1)
        found = offload_chunks(large, {n: specs[n] for n in large}, group.whole)
        return [
            self._chunk(name, group, shapes.params, *chunk)
            for chunk in ([here, *found] if here.names else found)
        ]

    def _chunk(
        self, name: str, group: UpdateGroup, shapes: Params, names: set[str], parts: int
    ) -> Chunk:
        specs, prefix = masked(self.spec.specs, names), prefix_of(name)
        one = make_chunk_update(group.tx, masked(shapes, names), specs)
        keys = [prefix + key for key in one.keys]
        cut = {key: c and parts > 1 for key, c in zip(keys, one.cut)}
        offloaded = [key for key in keys if key in self.files.arrays]
        resident = [key for key in keys if key not in offloaded and cut[key]]
        shared = [key for key in keys if key not in offloaded and not cut[key]]
        assert parts == 1 or all(cut[key] for key in offloaded)

        def take[T](tree: T, i: Index) -> T:
            return tree if parts == 1 else part_of(tree, i, parts)

        def update(
            hyper: dict[str, Hyper], grads: Params, params: Params, resident_arrays: Arrays,
            offloaded_arrays: Arrays, shared_arrays: Arrays, i: Index, finite: jax.Array | None,
        ) -> tuple[Params, Arrays, Arrays, Arrays]:  # fmt: skip
            states = dict(zip(resident, take(resident_arrays, i))) | dict(
                zip(offloaded, offloaded_arrays)
            )
            states |= dict(zip(shared, shared_arrays))
            given = take((grads, params), i)
            moved, new = one.update(hyper, *given, [states[key] for key in keys], finite)
            done = dict(zip(keys, new))
            new_resident = [done[key] for key in resident]
            if parts > 1:
                moved, new_resident = with_part((params, resident_arrays), (moved, new_resident), i)
            return (
                moved,
                new_resident,
                [done[key] for key in offloaded],
                [done[key] for key in shared],
            )

        def begin(params: Params, i: Index) -> Arrays:
            leaves = dict(zip(keys, jax.tree.leaves(group.tx.init(take(params, i)))))
            return [leaves[key] for key in offloaded]

        on = lambda some: [self._on_device(key) for key in some]
        placed = masked(self.places.params, names), on(resident), on(offloaded), on(shared)
        return Chunk(
            name, names, parts, offloaded, resident, shared,
            jax.jit(update, donate_argnums=(2, 3, 4), out_shardings=placed),
            jax.jit(begin, out_shardings=placed[2]),
        )  # fmt: skip

    def _on_device(self, key: str) -> NamedSharding:
        where = self.table[key].sharding
        return NamedSharding(where.mesh, where.spec)

    def _rows(self, chunk: Chunk, i: int) -> list[tuple[str, Rows | None]]:
        """Return the file rows of part i. Each state array is as long as its parameter."""
        if chunk.parts == 1:
            return [(key, None) for key in chunk.offloaded]
        rows = [self.files.arrays[key].shape[0] // chunk.parts for key in chunk.offloaded]
        return [(key, (i * n, (i + 1) * n)) for key, n in zip(chunk.offloaded, rows)]

    def part_bytes(self, device: bool = False) -> int:
        """Return the bytes of the largest part's states, over all devices or on one device."""

        def size(key: str) -> int:
            x = self.table[key]
            return prod(x.sharding.shard_shape(x.shape) if device else x.shape) * x.dtype.itemsize

        sizes = [sum(map(size, p.chunk.offloaded)) // p.chunk.parts for p in self.in_files]
        return max(sizes, default=0)

    @property
    def device_bytes(self) -> int:
        """Peak state bytes on a device: the part in the update, and the parts to be written."""
        return (AHEAD + 1) * self.part_bytes(device=True)

    @property
    def host_bytes(self) -> int:
        """Peak state bytes in the host's memory: parts prefetched, in use, and to be written."""
        return (2 * AHEAD + 1) * self.part_bytes()

    # ---- the run ---------------------------------------------------------------------------------

    def begin(self, params: Params) -> None:
        """Write the initial states, part by part."""
        for part in self.in_files:
            arrays = part.chunk.begin(masked(params, part.chunk.names), np.int32(part.i))
            for (key, rows), x in zip(part.rows, arrays, strict=True):
                self.files.write(key, np.asarray(x), rows)

    def update(
        self, state: State, before: BeforeUpdate, hyperparams: Hyperparams
    ) -> tuple[State, dict[str, Any]]:
        """Return the next state and the step's metrics. `state` is donated."""
        hyper = self.rates(state.step, hyperparams)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state.params)
        params = {path_name(path): x for path, x in leaves}
        old = leaves_by_path(state.optimizer)
        new, pending, waited, n = dict(old), deque[tuple[Arrays, Future[None]]](), 0.0, 0
        for k in range(self.ahead):
            self.files.prefetch(k, self.in_files[k].rows)
        jax.block_until_ready(before.grads)  # from here on, waiting time is the disk's
        for chunk, i, rows in self.parts:
            tree = masked(treedef.unflatten(params.values()), chunk.names)
            offloaded: Arrays = []
            if rows:
                waited += self._drain(pending, AHEAD - 1)
                read, seconds = self.files.take(n)
                waited += seconds
                offloaded = [jax.device_put(x, self._on_device(k)) for (k, _), x in zip(rows, read)]
                del read
            moved, resident, offloaded, shared = chunk.update(
                hyper, masked(before.grads, chunk.names), tree, [new[k] for k in chunk.resident],
                offloaded, [old[k] for k in chunk.shared], np.int32(i), before.accept,
            )  # fmt: skip
            params |= {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(moved)}
            new |= dict(zip(chunk.resident, resident)) | dict(zip(chunk.shared, shared))
            if rows:
                pending.append((offloaded, self.files.put(n, rows, offloaded)))
                n += 1
                for k in range(n, n + self.ahead):
                    k %= len(self.in_files)
                    self.files.prefetch(k, self.in_files[k].rows)
        done = treedef.unflatten(params.values())
        kept = jax.tree.unflatten(jax.tree.structure(state.optimizer), new.values())
        small = before._replace(grads=None)
        rest, metrics = self.after(
            state._replace(params=None, optimizer=None), small, done, kept, hyperparams
        )
        traffic = dict.fromkeys(("state_read_bytes", "state_written_bytes"), self.files.nbytes)
        traffic |= {"state_wait_s": waited}
        return rest._replace(params=done, optimizer=kept), metrics | traffic

    def _drain(self, pending: deque[tuple[Arrays, Future[None]]], most: int) -> float:
        """Wait until at most `most` parts are unwritten; return the seconds that the disk took."""
        waited = 0.0
        while len(pending) > most:
            arrays, written = pending.popleft()
            jax.block_until_ready(arrays)  # the device's time does not count
            begun = time.perf_counter()
            written.result()
            waited += time.perf_counter() - begun
        return waited

    def _after(
        self,
        state: State,
        found: BeforeUpdate,
        params: Params,
        kept: OptState,
        hyperparams: Hyperparams,
    ) -> tuple[State, dict[str, Any]]:
        new, metrics = after_update(self.spec, state, found, params, kept, hyperparams)
        return new._replace(params=None, optimizer=None), metrics


def prefix_of(group: str) -> str:
    """Return the path of a group's state within the optimizer state."""
    return f".inner_states['{group}'].inner_state"


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}

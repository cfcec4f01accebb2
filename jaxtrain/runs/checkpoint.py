"""Checkpoints through orbax: asynchronous, atomic, restored onto any mesh."""

import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from jaxtrain.config.phases import Decision
from jaxtrain.optim.state_files import StateFiles, copied_states
from jaxtrain.runs.config import CheckpointConfig
from jaxtrain.settings import UserError, read_object
from jaxtrain.storage import checksums as sums
from jaxtrain.storage.disk import disk_full
from jaxtrain.weights.params import Params, ShapeTree

# Each replica of an array sends a slice of at least this size to the host, by its own compiled
# program. With orbax's default, slices of any size, the first save waits for hundreds of programs.
PART_BYTES = 2**26
PATIENCE = 3.0  # seconds for the writer threads to end after one of them has failed


def send_in_large_parts() -> None:
    """Make orbax send arrays to the host in slices of at least `PART_BYTES`, in this process."""
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=PART_BYTES)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # orbax warns that its own handler is replaced
    ocp.type_handlers.register_type_handler(jax.Array, arrays, override=True)
    logging.disable(before)


class Summed:
    """Future that commits one item, then writes the checksums of this process's files of it.

    Orbax's background thread waits for it in every process. Only then does the first process
    finalize the item and rename the checkpoint to its final name.
    """

    def __init__(self, folder: Path, commits: Sequence[Any]):
        self.folder, self.commits = folder, commits

    def result(self, timeout: float | None = None) -> None:
        for commit in self.commits:
            commit.result(timeout)
        if index := jax.process_index():
            mine = sums.files_below(self.folder / f"ocdbt.process_{index}")
            files = {f"ocdbt.process_{index}/{name}": path for name, path in mine.items()}
            sums.write_list(self.folder / f"{index}.{sums.LIST}", files, {})

    def cancel(self) -> None:
        for commit in self.commits:
            commit.cancel()


def list_sums(folder: Path) -> None:
    """Write an item's checksums: the lists of the other processes, and all remaining files."""
    known = {}
    for path in [folder / f"{i}.{sums.LIST}" for i in range(1, jax.process_count())]:
        if path.is_file():
            known |= read_object(path)
            path.unlink()
    files = {name: file for name, file in sums.files_below(folder).items() if name not in known}
    sums.write_list(folder / sums.LIST, files, known)


class TreeHandler(ocp.StandardCheckpointHandler):
    """Handler of array trees, with checksums."""

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Any]:
        commits = await super().async_save(directory, *args, **kwargs)
        return [Summed(Path(directory), commits or [])]

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        list_sums(Path(directory))


class JsonHandler(ocp.JsonCheckpointHandler):
    """Handler of a JSON value, with checksums."""

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        list_sums(Path(directory))


class CopyHandler(ocp.CheckpointHandler):
    """Handler of optimizer states in files, with checksums. The copy blocks training."""

    def save(self, directory: epath.Path, args: "CopyFiles") -> None:
        args.files.save(Path(directory))

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        """Not used: `Checkpointer.restore` reads the files in chunks of rows."""
        raise NotImplementedError

    def finalize(self, directory: epath.Path) -> None:
        list_sums(Path(directory))


@ocp.args.register_with_handler(CopyHandler, for_save=True)
@dataclass
class CopyFiles(ocp.args.CheckpointArgs):
    """Arguments of `CopyHandler`."""

    files: StateFiles


def handlers() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Handlers that write and read the items of a checkpoint."""
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ("params", "rest"):
        trees = TreeHandler()
        found.add(item, ocp.args.StandardSave, trees)
        found.add(item, ocp.args.StandardRestore, trees)
    values = JsonHandler()
    found.add("states", CopyFiles, CopyHandler())
    found.add("position", ocp.args.JsonSave, values)
    found.add("position", ocp.args.JsonRestore, values)
    return found


class Failures(logging.Filter):
    """Log filter that keeps the first error of orbax's threads, and suppresses the logged
    tracebacks: the error is raised later."""

    found: Exception | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno < logging.ERROR or not isinstance(error, Exception):
            return True
        self.found = self.found or error
        return False


class Checkpointer:
    """The checkpoints of one run directory: `checkpoints/STEP/{params,rest,position,states}`.

    Each of the four items has its files' checksums in `sums.json`, which are checked on restore.

    `params` and `rest` (optimizer, counters, loss scale, keys) are trees of arrays. `position` is a
    small JSON value: the position in the data stream. If a run keeps optimizer states in `files`,
    `states` contains copies of them, and `rest` has None in their place. `files` are open as long
    as the Checkpointer is.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, files: StateFiles | None = None):
        self.files = files
        self.directory = run_dir.resolve() / "checkpoints"
        self.failures, self.broken = Failures(), False
        logging.getLogger("absl").addFilter(self.failures)
        send_in_large_parts()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep,
            keep_period=config.keep_every,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
            create=True,
        )
        self.manager = ocp.CheckpointManager(
            epath.Path(self.directory), options=options, handler_registry=handlers()
        )

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, params: Params, rest: PyTree, position: dict[str, Any]) -> None:
        """Copy to the host, then write atomically in the background.

        Raises UserError if the disk has no room for it, or had none for the previous checkpoint.
        """
        if step in self.steps():
            return
        self.wait()
        needed = sum(x.nbytes for x in jax.tree.leaves((params, rest)))
        self._check_room(needed + (self.files.nbytes if self.files else 0))
        args = ocp.args.Composite(
            **({"states": CopyFiles(self.files)} if self.files else {}),
            params=ocp.args.StandardSave(params),
            rest=ocp.args.StandardSave(rest),
            position=ocp.args.JsonSave(position),
        )
        try:
            self.manager.save(step, args=args, force=True)
        except Exception as error:
            self._given_up(error)

    def check(self) -> None:
        """Raise UserError if a background write has failed. Does not wait otherwise."""
        if self.failures.found is not None:
            self.wait()

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            self._given_up(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed, free)

    def _given_up(self, error: Exception, *sizes: int) -> NoReturn:
        """Raise the error of a failed save. If the disk is full, first delete incomplete files."""
        said = disk_full(error) or disk_full(self.failures.found)
        if said is None:
            raise error
        self.broken = True
        until = time.monotonic() + PATIENCE  # other writer threads may create files until then
        while remains := list(self.directory.glob("*orbax-checkpoint-tmp*")):
            for folder in remains:
                shutil.rmtree(folder, ignore_errors=True)
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        more = ": a checkpoint needs {:,} bytes, and {:,} are free".format(*sizes) if sizes else ""
        raise UserError(no_room(self.directory.parent, said + more)) from error

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, which the run has rolled back."""
        self.wait()
        for later in [s for s in self.steps() if s > step]:
            self.manager.delete(later)

    def restore(
        self, step: int, params: ShapeTree, rest: PyTree
    ) -> tuple[Params, PyTree, dict[str, Any]]:
        """Restore (params, rest, position). The arguments give shapes, dtypes and shardings.

        Optimizer states may be in files or in arrays, both in the checkpoint and in this run.
        """
        folder = self.directory / str(step) / "states"
        copied = self._copied(step, folder)
        mine = self.files.arrays if self.files else {}
        # The structure of the checkpoint's `rest`: None for states that it has in files.
        like = named_map(lambda key, x: None if key in copied else mine.get(key, x), rest)
        items = self._read(
            step,
            params=ocp.args.StandardRestore(params),
            rest=ocp.args.StandardRestore(like),
            position=ocp.args.JsonRestore(),
        )
        if self.files:
            self.files.settle()

        def restore_leaf(
            key: str,
            x: jax.Array | np.ndarray | None,
            to: jax.Array | jax.ShapeDtypeStruct | None,
        ) -> jax.Array | np.ndarray | None:
            if key in mine and self.files:
                self.files.load(key, copied[key] if key in copied else np.asarray(x))
                return None
            if key in copied and to is not None:
                return jax.make_array_from_callback(to.shape, to.sharding, copied[key].__getitem__)
            return x

        return items["params"], named_map(restore_leaf, items["rest"], rest), items["position"]

    def _copied(self, step: int, folder: Path) -> dict[str, np.ndarray]:
        """Optimizer states that a checkpoint has in files, after a check of their checksums."""
        try:
            self._check(step, ["states"] * folder.is_dir())
            return copied_states(folder)
        except Exception as error:
            raise UserError(self._damage(step, error)) from error

    def shapes(self, step: int) -> PyTree:
        """`rest` of a checkpoint as nested dicts of array metadata, each with a `.shape`."""
        path = epath.Path(self.directory) / str(step) / "rest"
        return ocp.StandardCheckpointHandler().metadata(path)

    def restore_params(self, step: int, params: ShapeTree) -> Params:
        """Restore only the parameters."""
        return self._read(step, params=ocp.args.StandardRestore(params))["params"]

    def _read(self, step: int, **items: Any) -> Any:
        try:
            self._check(step, items)
            return self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise UserError(self._damage(step, error)) from error

    def _check(self, step: int, items: Iterable[str]) -> None:
        """Raise UserError if a file of these items does not match its checksum.

        Each process checks a share of the files. An error in one process ends all.
        """
        share = slice(jax.process_index(), None, jax.process_count())
        for folder in [self.directory / str(step) / item for item in items]:
            if (folder / sums.LIST).is_file():
                sums.check_files(folder, share)
            else:
                print(f"{folder} has no {sums.LIST}: read unchecked", file=sys.stderr, flush=True)

    def _damage(self, step: int, error: Exception) -> str:
        first = (
            str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        )
        earlier = [s for s in self.steps() if s < step]
        offer = (
            f"delete that folder to go on from step {max(earlier)}"
            if earlier
            else "there is none before it: start again in another run directory"
        )
        return f"checkpoint {self.directory / str(step)} cannot be read ({first}); {offer}"

    def wait(self) -> None:
        """Wait until all saves are on disk. Raises UserError if the disk was full."""
        if self.broken:
            return
        begun: float | None = None  # when a failure was first seen
        while self.manager.is_saving_in_progress():
            if self.failures.found is not None:
                begun = begun or time.monotonic()
                if time.monotonic() > begun + PATIENCE:
                    self._given_up(self.failures.found)
            time.sleep(0.01)
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            self._given_up(error)

    def close(self) -> None:
        try:
            self.wait()
            if not self.broken:
                self.manager.close()
        finally:
            logging.getLogger("absl").removeFilter(self.failures)
            if self.files:
                self.files.close()

    def __enter__(self) -> "Checkpointer":
        try:
            if self.files:
                self.files.open()
        except UserError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def named_map(change: Callable[..., Any], rest: PyTree, *others: PyTree) -> PyTree:
    """Map change(path, leaf, ...) over the leaves of `rest`'s optimizer state; None is a leaf."""
    one = lambda path, *xs: change(jax.tree_util.keystr(path), *xs)
    states = [tree["optimizer"] for tree in (rest, *others)] if "optimizer" in rest else []
    if not states:
        return rest
    none = lambda x: x is None
    return {**rest, "optimizer": jax.tree_util.tree_map_with_path(one, *states, is_leaf=none)}


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of a run's complete checkpoints, in ascending order."""
    folders = (run_dir / "checkpoints").glob("*")
    return sorted(int(folder.name) for folder in folders if folder.name.isdigit())


def decisions(run_dir: Path, step: int) -> tuple[Decision, ...]:
    """Decisions that events had made by a checkpoint, which stores them in `position`."""
    file = run_dir / "checkpoints" / str(step) / "position" / "metadata"
    position = read_object(file) if file.is_file() else {}
    return tuple(Decision(step, model) for step, model in position.get("decided", ()))


def no_room(run_dir: Path, said: str) -> str:
    """Message about a full disk that names the newest complete checkpoint."""
    steps = saved_steps(run_dir)
    saved = f"the newest whole one is {steps[-1]}" if steps else "there is none yet"
    return f"{run_dir}: {said}; of checkpoints, {saved}. Free space; then the same command resumes"

"""Checkpoints through orbax: asynchronous, atomic, restored onto any mesh."""

import json
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from pydantic import Field

from jaxtrain import sums
from jaxtrain.settings import Settings, UserError, read_object

# Of an array that several devices hold whole, each sends the host a part of at least this size, by
# a program of its own. Orbax's default, parts of any size, has a first save wait for hundreds.
PART_BYTES = 2**26


class CheckpointConfig(Settings):
    """When the state is saved, and what is kept."""

    every: int | None = Field(
        500, ge=1, description="steps between checkpoints; null: only the end"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept")
    keep_every: int | None = Field(
        None, ge=1, description="checkpoints at multiples of this many steps are kept forever"
    )


def send_in_large_parts() -> None:
    """Arrays are sent to the host in parts of `PART_BYTES` and more, in this process."""
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=PART_BYTES)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # that it takes the place of orbax's own
    ocp.type_handlers.register_type_handler(jax.Array, arrays, override=True)
    logging.disable(before)


class Summed:
    """A commit of one item, and then the checksums of what this process has written of it.

    Orbax waits for it in its background thread, and for that of all processes before the first
    of them finalizes the item and the checkpoint gets its name.
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
    """The checksums of an item: those that the processes have left, and of what is not in them."""
    known = {}
    for path in [folder / f"{i}.{sums.LIST}" for i in range(1, jax.process_count())]:
        if path.is_file():
            known |= read_object(path)
            path.unlink()
    files = {name: file for name, file in sums.files_below(folder).items() if name not in known}
    sums.write_list(folder / sums.LIST, files, known)


class TreeHandler(ocp.StandardCheckpointHandler):
    """Trees of arrays, with checksums."""

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Any]:
        commits = await super().async_save(directory, *args, **kwargs)
        return [Summed(Path(directory), commits or [])]

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        list_sums(Path(directory))


class JsonHandler(ocp.JsonCheckpointHandler):
    """A JSON value, with checksums."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        list_sums(Path(directory))


def handlers() -> Any:
    """Who writes and reads the items of a checkpoint."""
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ("params", "rest"):
        trees = TreeHandler()
        found.add(item, ocp.args.StandardSave, trees)
        found.add(item, ocp.args.StandardRestore, trees)
    values = JsonHandler()
    found.add("position", ocp.args.JsonSave, values)
    found.add("position", ocp.args.JsonRestore, values)
    return found


class Checkpointer:
    """The checkpoints of one run directory: `checkpoints/STEP/{params,rest,position}`.

    Each of the three has the checksums of its files in `sums.json`, compared when it is read.

    `params` and `rest` (optimizer, counters, loss scale, keys) are trees of arrays; `position` is a
    small JSON value, the data stream's.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig):
        self.directory = run_dir.resolve() / "checkpoints"
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

    def save(self, step: int, params: Any, rest: Any, position: dict[str, Any]) -> None:
        """Copy to the host and write in the background; a checkpoint is whole or not there."""
        if step in self.steps():
            return
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(params),
            rest=ocp.args.StandardSave(rest),
            position=ocp.args.JsonSave(position),
        )
        self.manager.save(step, args=args, force=True)

    def delete_after(self, step: int) -> None:
        """Without the checkpoints of later steps, which the run has taken back."""
        self.wait()
        for later in [s for s in self.steps() if s > step]:
            self.manager.delete(later)

    def restore(self, step: int, params: Any, rest: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Parameters, rest and position; the arguments give shapes, dtypes and placement."""
        items = self._read(
            step,
            params=ocp.args.StandardRestore(params),
            rest=ocp.args.StandardRestore(rest),
            position=ocp.args.JsonRestore(),
        )
        return items["params"], items["rest"], items["position"]

    def shapes(self, step: int) -> Any:
        """`rest` as nested dicts of what has a `.shape`: that of each array in the checkpoint."""
        path = epath.Path(self.directory) / str(step) / "rest"
        return ocp.StandardCheckpointHandler().metadata(path)

    def restore_params(self, step: int, params: Any) -> Any:
        """The parameters alone."""
        return self._read(step, params=ocp.args.StandardRestore(params))["params"]

    def _read(self, step: int, **items: Any) -> Any:
        try:
            self._check(step, items)
            return self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise UserError(self._damage(step, error)) from error

    def _check(self, step: int, items: Iterable[str]) -> None:
        """Raise UserError if a file of these items is not as it was written.

        Of several processes each looks at some of the files, and a fault of one ends all.
        """
        share = slice(jax.process_index(), None, jax.process_count())
        for folder in [self.directory / str(step) / item for item in items]:
            if (folder / sums.LIST).is_file():
                sums.check(folder, share)
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
        """Until everything saved so far is on disk."""
        self.manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self.manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(path)

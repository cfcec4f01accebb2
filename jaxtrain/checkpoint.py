"""Checkpoints through orbax: asynchronous, atomic, restored onto any mesh."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from pydantic import Field

from jaxtrain.settings import Settings, UserError

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


class Checkpointer:
    """The checkpoints of one run directory: `checkpoints/STEP/{params,rest,position}`.

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
        self.manager = ocp.CheckpointManager(epath.Path(self.directory), options=options)

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
            return self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise UserError(self._damage(step, error)) from error

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

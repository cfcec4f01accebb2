"""Serving of the folder's models: `jaxtrain serve` in a child process, one model at a time, started
by the first message."""

import asyncio
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from jaxtrain.runs.page.dry_run import last_line
from jaxtrain.runs.page.endpoint import Endpoint, endpoint_at
from jaxtrain.runs.page.folder import RunFolder
from jaxtrain.settings import UserError

LIMIT = 600  # seconds that a model may take to load
DRAIN = 10  # seconds for responses in flight to finish before another model is loaded


class ServedModel(NamedTuple):
    """A run's final model, or its checkpoint of a step."""

    run: str
    step: int | None

    @property
    def shown(self) -> str:
        return self.run if self.step is None else f"{self.run} at step {self.step}"


def servable_models(folder: RunFolder) -> list[dict[str, object]]:
    """Runs with a final model or checkpoints, and the steps of the checkpoints."""
    found = []
    for name in folder.names():
        steps = [path.name for path in folder.path(name).glob("checkpoints/*")]
        steps = sorted(int(step) for step in steps if step.isdecimal())
        whole = folder.path(name, "model", "config.yaml").is_file()
        found += [{"run": name, "whole": whole, "steps": steps}] if whole or steps else []
    return found


def serve_command(run_dir: Path, step: int | None) -> list[str]:
    """Command line of the server, which listens on loopback only."""
    which = [] if step is None else [f"--step={step}"]
    limits = ["--port=0", "--no-warm-up", "--max-concurrency=4", f"--drain={DRAIN}"]
    return [sys.executable, "-m", "jaxtrain.cli", "serve", str(run_dir), *which, *limits]


class ModelServer:
    """Starts a server for the requested model, after it has stopped the previous one."""

    def __init__(self, folder: RunFolder):
        self.folder, self.changing = folder, asyncio.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.model: ServedModel | None = None  # the one that is served, or being loaded
        self.endpoint: Endpoint | None = None

    async def endpoint_of(self, run: str, step: str) -> Endpoint:
        """The endpoint of a model, which is loaded if necessary. Raises UserError if it cannot be
        served, or while another one is being loaded."""
        run_dir = self.folder.path(run)
        if step and not step.isdecimal():
            raise UserError(f"step {step!r} must be a whole number")
        wanted = ServedModel(run, int(step) if step else None)
        if self.changing.locked() and self.model and self.model != wanted:
            raise UserError(f"busy: {self.model.shown} is being loaded; try again when it is ready")
        async with self.changing:
            alive = self.process is not None and self.process.poll() is None
            if alive and self.model == wanted and self.endpoint:
                return self.endpoint
            await run_in_threadpool(self.close)
            self.model = wanted
            self.endpoint = await run_in_threadpool(self.start, run_dir, wanted)
            return self.endpoint

    def start(self, run_dir: Path, model: ServedModel) -> Endpoint:
        """Start a server process. Raises UserError with its last line if it fails."""
        with tempfile.TemporaryFile() as errors:
            # Not asyncio's subprocess: uvloop would fork, which multithreaded libraries break on.
            self.process = process = subprocess.Popen(
                serve_command(run_dir, model.step), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
            assert process.stdout is not None
            limit = threading.Timer(LIMIT, process.kill)
            limit.start()
            line = process.stdout.readline()
            limit.cancel()
            if found := re.search(rb" at (http://\S+)/v1$", line.strip()):
                return endpoint_at(found[1].decode())
            self.close()
            errors.seek(0)
            said = last_line(errors.read().decode(errors="replace"))
            raise UserError(f"{model.shown} is not served: {said}")

    def close(self) -> None:
        """Stop the server; responses in flight have DRAIN seconds to finish."""
        process, self.process, self.model, self.endpoint = self.process, None, None, None
        if process is None:
            return
        with process:
            process.terminate()
            try:
                process.wait(DRAIN + 5)
            except subprocess.TimeoutExpired:
                process.kill()

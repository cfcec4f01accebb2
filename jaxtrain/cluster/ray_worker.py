"""Code that runs in the processes of a Ray cluster, for a command on another node.

Arguments are sent as pickled bytes: Ray would unpickle them before any of our code runs. So a
process can first check that it has the same code and packages as the command.
"""

import functools
import hashlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import traceback
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.settings import UserError

ROOT = Path(__file__).parents[1]
# Packages whose versions may change the output bytes.
PACKAGES = ("numpy", "tokenizers", "sentencepiece", "zstandard", "pyarrow", "jinja2", "jax")


class Caller(NamedTuple):
    """The command that sends a task."""

    folder: str  # its working directory
    code: dict[str, str]


def this_caller() -> Caller:
    return Caller(os.getcwd(), code_and_packages())


@functools.cache
def code_and_packages() -> dict[str, str]:
    """Hash of the code, and package versions: the same in a command and all its nodes."""
    total = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return {"jaxtrain": total.hexdigest()[:16]} | {
        name: installed_version(name) for name in PACKAGES
    }


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def run_task(caller: Caller, function: bytes, thing: bytes) -> bytes:
    """Apply a pickled function to a pickled argument. Returns pickled (result, error)."""
    leave_out_jax()
    return run_and_pack(caller, lambda: pickle.loads(function)(pickle.loads(thing)))


class ModelWorker:
    """A process on a node that loads a model once and then serves calls."""

    def __init__(self, make: bytes):
        self.make, self.function = make, None

    def call(self, caller: Caller, *things: bytes) -> bytes:
        """Call the function that `make` returns. Returns pickled (result, error)."""
        return run_and_pack(caller, lambda: self.loaded()(*map(pickle.loads, things)))

    def loaded(self) -> Any:
        if self.function is None:
            self.function = pickle.loads(self.make)()
        return self.function


# The job is killed with its parent process: it must not outlive the node's Ray process. Ray blocks
# SIGINT in its processes, and child processes inherit that, so it is unblocked.
JOB = """
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class JobProcess:
    """One process of a job, on its node."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.asked: int | None = None  # a signal that came before the process was started
        self.guard = threading.Lock()

    def address(self, caller: Caller) -> bytes:
        """Pickled (address, error): a free HOST:PORT for a coordinator on this node."""
        from ray.util import get_node_ip_address

        def free() -> str:
            with socket.create_server(("", 0)) as server:
                return f"{get_node_ip_address()}:{server.getsockname()[1]}"

        return run_and_pack(caller, free)

    def run(self, caller: Caller, module: str, arguments: list[str]) -> bytes:
        """Run `python -m module arguments`. Returns pickled (exit code, error)."""

        def wait() -> int:
            line = [sys.executable, "-u", "-c", JOB, module, *arguments]
            with self.guard:
                if self.asked:
                    return -self.asked
                self.process = subprocess.Popen(line)
            return self.process.wait()

        return run_and_pack(caller, wait)

    def signal(self, number: int) -> None:
        """Send a signal to the process. If it has not been started, it never will be."""
        with self.guard:
            if self.process is None:
                self.asked = number
            else:
                self.process.send_signal(number)


def run_and_pack(caller: Caller, compute: Any) -> bytes:
    """Return pickled (result, error) of `compute`; `task_result` raises the error."""
    try:
        check_code(caller)
        if os.path.isdir(caller.folder):  # relative paths are those of the command
            os.chdir(caller.folder)
        reply = compute(), None
    except UserError as error:
        reply = None, error
    except Exception:
        reply = None, RuntimeError(traceback.format_exc())
    return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)


def missing_on_node(what: str, path: Path | str, instead: str) -> UserError:
    """Error for a file or folder that is missing on this node."""
    return UserError(f"--ray: node {socket.gethostname()} has no {what} {path}; {instead}")


def check_code(caller: Caller) -> None:
    """Raise UserError if this process has other code or packages than the command."""
    mine = code_and_packages()
    for name, theirs in caller.code.items():
        if mine[name] != theirs:
            raise UserError(
                f"--ray: node {socket.gethostname()} has {name} {mine[name]}, this command has "
                f"{theirs}; install the same version on all nodes"
            )


def leave_out_jax() -> None:
    """Skip `jaxtrain.data.__init__`: it imports grain, so jax (4 s and 300 MB per process)."""
    if "jaxtrain.data" not in sys.modules:
        package = types.ModuleType("jaxtrain.data")
        package.__path__ = [str(ROOT / "data")]
        sys.modules["jaxtrain.data"] = package

"""What runs in the processes of a Ray cluster: tasks of a command that is somewhere else.

Ray would unpickle a task's arguments before anything of this is called; they come as bytes, so that
a process can say first whether it has what the command has.
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
# Other versions may give other bytes.
PACKAGES = ("numpy", "tokenizers", "sentencepiece", "zstandard", "pyarrow", "jinja2", "jax")


class Caller(NamedTuple):
    """The command that asks."""

    folder: str  # that it runs in
    code: dict[str, str]


def this_caller() -> Caller:
    return Caller(os.getcwd(), code_and_packages())


@functools.cache
def code_and_packages() -> dict[str, str]:
    """The code and the packages of this process, which a command and its nodes must share."""
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
    """A pickled function applied to a pickled thing: pickled (result, error)."""
    leave_out_jax()
    return run_and_pack(caller, lambda: pickle.loads(function)(pickle.loads(thing)))


class ModelWorker:
    """A process of a node that loads a model once, and then answers by it."""

    def __init__(self, make: bytes):
        self.make, self.function = make, None

    def call(self, caller: Caller, *things: bytes) -> bytes:
        """Pickled (result, error) of the function that `make` returns."""
        return run_and_pack(caller, lambda: self.loaded()(*map(pickle.loads, things)))

    def loaded(self) -> Any:
        if self.function is None:
            self.function = pickle.loads(self.make)()
        return self.function


# Ends with the process that started it: a job must not outlive its node's part of the cluster. Ray
# blocks SIGINT in its processes, and what they start inherits that.
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
        self.asked: int | None = None  # the signal that came before the process
        self.guard = threading.Lock()

    def address(self, caller: Caller) -> bytes:
        """Where a coordinator may listen on this node; packed."""
        from ray.util import get_node_ip_address

        def free() -> str:
            with socket.create_server(("", 0)) as server:
                return f"{get_node_ip_address()}:{server.getsockname()[1]}"

        return run_and_pack(caller, free)

    def run(self, caller: Caller, module: str, arguments: list[str]) -> bytes:
        """The exit code of `python -m module arguments`; packed."""

        def wait() -> int:
            line = [sys.executable, "-u", "-c", JOB, module, *arguments]
            with self.guard:
                if self.asked:
                    return -self.asked
                self.process = subprocess.Popen(line)
            return self.process.wait()

        return run_and_pack(caller, wait)

    def signal(self, number: int) -> None:
        """To the process; one that has not begun does not begin."""
        with self.guard:
            if self.process is None:
                self.asked = number
            else:
                self.process.send_signal(number)


def run_and_pack(caller: Caller, compute: Any) -> bytes:
    """What it computes, or its error, as the command will raise it."""
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
    """Of a file or folder that is on the host of the command, and not on this node."""
    return UserError(f"--ray: node {socket.gethostname()} has no {what} {path}; {instead}")


def check_code(caller: Caller) -> None:
    """Raises UserError where this process has other code than the command."""
    mine = code_and_packages()
    for name, theirs in caller.code.items():
        if mine[name] != theirs:
            raise UserError(
                f"--ray: node {socket.gethostname()} has {name} {mine[name]}, this command "
                f"{theirs}; install the same on all nodes"
            )


def leave_out_jax() -> None:
    """The package's __init__ imports grain, which imports jax: 4 s and 300 MB a process."""
    if "jaxtrain.data" not in sys.modules:
        package = types.ModuleType("jaxtrain.data")
        package.__path__ = [str(ROOT / "data")]
        sys.modules["jaxtrain.data"] = package

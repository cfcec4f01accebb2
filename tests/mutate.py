"""Breaks one core line of each advertised feature and asks the default tier whether it notices.

python tests/mutate.py [--jobs N] [NAME ...]: each mutation is tried in a copy of the tree, with the
default-tier tests of the files named beside it. Prints a line for each; exits with 1 if one
survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """In `file` the text `old` (once) becomes `new`; `tests` are files below tests/."""

    file: str
    old: str
    new: str
    tests: str


def read_mutations(text: str) -> dict[str, Mutation]:
    """Blocks of `NAME: FILE TESTS...`, the lines that go (-) and the lines that come (+)."""
    found = {}
    for block in text.split("\n\n"):
        head, *lines = block.splitlines()
        name, _, words = head.partition(": ")
        file, _, tests = words.partition(" ")
        old, new = ("\n".join(x[1:] for x in lines if x.startswith(mark)) for mark in "-+")
        found[name] = Mutation(file, old, new, tests)
    return found


MUTATIONS = read_mutations((ROOT / "tests" / "mutations.txt").read_text())


def attempt(name: str, m: Mutation, timeout: float) -> tuple[str, str]:
    """(name, what became of it)."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        copy.mkdir()
        for part in ROOT.iterdir():
            if part.name not in (".git", ".venv", ".cache", "runs", "shared"):
                (shutil.copytree if part.is_dir() else shutil.copy)(part, copy / part.name)
        text = (copy / m.file).read_text()
        if text.count(m.old) != 1:
            return name, f"NOT APPLIED: {m.file} has the line {text.count(m.old)} times"
        (copy / m.file).write_text(text.replace(m.old, m.new))
        env = os.environ | {
            "PYTHONPATH": f"{copy}:{copy / 'kernels'}:" + os.environ.get("PYTHONPATH", "")
        }
        env.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax-tests"))
        files = [str(copy / "tests" / part) for part in m.tests.split()]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
            *files,
        ]
        try:
            done = subprocess.run(
                command, cwd=copy, env=env, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return name, "timed out"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and failed:
        return name, "killed by " + failed[0].split(" - ")[0].split("/tests/")[-1]
    return name, "SURVIVED" if done.returncode == 0 else f"NOT RUN: {done.stdout[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*MUTATIONS, []], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one of them")
    a = parser.parse_args()
    chosen = a.names or list(MUTATIONS)
    survived = 0
    with ThreadPoolExecutor(a.jobs) as pool:
        jobs = [pool.submit(attempt, name, MUTATIONS[name], a.timeout) for name in chosen]
        for job in as_completed(jobs):
            name, what = job.result()
            print(f"{name:22s} {what}", flush=True)
            survived += not what.startswith("killed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())

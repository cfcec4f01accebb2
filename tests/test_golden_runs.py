"""The golden runs are what they were, bit for bit: where JAXTRAIN_GOLDEN=1.

Not for CI: the last bits of a run depend on the CPU's instructions and on the version of jax. The
record has both, and elsewhere than where it was made this is skipped.
"""

import json
import os
import subprocess
import sys

import golden_runs
import pytest

pytestmark = [
    pytest.mark.skipif(not os.environ.get("JAXTRAIN_GOLDEN"), reason="JAXTRAIN_GOLDEN=1"),
    pytest.mark.timeout(3600),
]


@pytest.mark.parametrize("group", ["programs/*", "[!p]*"], ids=["programs", "runs"])
def test_the_golden_runs_are_what_they_were(group):
    saved = json.loads(golden_runs.RECORD.read_text())["fingerprint"]
    program = group.startswith("programs")
    if reason := golden_runs.reason_to_skip(saved, golden_runs.fingerprint(), program):
        pytest.skip(reason)
    command = [sys.executable, golden_runs.__file__, "compare", str(golden_runs.RECORD)]
    found = subprocess.run([*command, "--only", group], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]

"""Real jobs of several processes on this host, and the templates for clusters."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from machine import LONG, free_port
from tiny import FEW_PARTS, QUICK, rows_of, run_overrides

from jaxtrain import data
from jaxtrain.cluster import launch
from jaxtrain.cluster.processes import ProcessRank, find_rank
from jaxtrain.config import load_config
from jaxtrain.evaluation.evaluate import main as evaluate
from jaxtrain.inference.generate import main as generate
from jaxtrain.main import main
from jaxtrain.settings import UserError

ROOT = Path(__file__).parents[1]
SIXTEEN = {
    "train__steps": 16, "eval__tokens": 64, "checkpoint__keep": 99,
    "optim__name": "adamw", "optim__schedule__warmup_steps": 0, **FEW_PARTS,
    "processes__heartbeat_timeout": 3,
}  # fmt: skip


# ---- a job -----------------------------------------------------------------------------------


class Job:
    """A command in the background, with its output."""

    def __init__(self, command, log, **variables):
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT
            )

    def until(self, pattern):
        """Wait for a line of output."""
        while not (found := re.search(pattern, self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        return found

    def member(self, index):
        """The process of this number."""
        children = psutil.Process(self.process.pid).children()
        return next(p for p in children if p.cmdline()[-2:] == ["--process", str(index)])

    def end(self):
        """Its exit code and output."""
        return self.process.wait(), self.log.read_text()


LAUNCH = "from jaxtrain.cluster import launch; raise SystemExit(launch.main())"
GATED = LAUNCH.replace("; ", "; launch.COMMANDS['train'] = 'gated'; ")


def launched(log, processes, devices, arguments, *options, gate_step=None):
    """gate_step: the last that is begun before the file `log.gate` is there."""
    code, variables = LAUNCH, {}
    if gate_step is not None:
        code, tests = GATED, str(Path(__file__).parent)
        variables = {"GATE": f"{log}.gate", "GATE_STEP": str(gate_step), "PYTHONPATH": tests}
    command = [sys.executable, "-c", code, "--processes", str(processes), *options]
    command += ["--port", str(free_port()), "--devices-per-process", str(devices)]
    return Job([*command, "--", *arguments], log, **variables)


def steps_of(run_dir):
    return sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit())


def position(run_dir, step):
    """In the data, as a checkpoint says; without what it says of the loop."""
    file = run_dir / "checkpoints" / str(step) / "position" / "metadata"
    of_loop = ("guard", "decided")
    return {k: v for k, v in json.loads(file.read_text()).items() if k not in of_loop}


def position_after(steps):
    """The same of the first steps of a stream that one process reads."""
    c = load_config(None, run_overrides("runs", **SIXTEEN))
    options = {"config": c.data, "batch_size": 8, "sequence_length": 32}
    with data.train_batches(data.prepare(c.data).train, **options) as batches:
        for _ in range(steps):
            next(batches)
        return batches.get_state()


@pytest.mark.slow
def test_a_job_stops_together_dies_loudly_and_goes_on_with_other_processes(tmp_path):
    """8 devices of one process -> 2 processes x 2 -> 4 x 1 -> 8 again: the same run all along."""
    whole = tmp_path / "whole" / "tiny"
    assert main(run_overrides(whole.parent, **SIXTEEN, checkpoint__every=5)) == 0
    run_dir = shutil.copytree(whole, tmp_path / "tiny")
    shutil.rmtree(run_dir / "model")
    for step in steps_of(run_dir)[1:]:
        shutil.rmtree(run_dir / "checkpoints" / str(step))

    # ---- one is asked to stop: all stop after the same step, and it is saved -------------------
    split = {"mesh__data": 1, "mesh__fsdp": "auto"}  # each process has parts of its own to write
    split = run_overrides(tmp_path, **SIXTEEN, **split, checkpoint__every=99)
    job = launched(tmp_path / "2.log", 2, 2, split, gate_step=7)
    job.until(r"\[0\] step +7/16 ")
    job.member(1).send_signal(signal.SIGTERM)
    (tmp_path / "2.log.gate").touch()
    code, out = job.end()
    assert code == 0, out
    assert f"[0] resume   {run_dir}: steps 5 to 16\n" in out
    assert "[1] step" not in out
    five, stopped = steps_of(run_dir)
    assert five == 5 and 7 <= stopped < 16
    assert f"[0] stopped  at step {stopped} of 16, saved; go on with:\n" in out
    assert rows_of(run_dir, "event")[-1]["status"] == "stopped"
    assert position(run_dir, stopped) == position_after(stopped)
    assert {"process_0", "process_1"} <= {
        p.name.removeprefix("ocdbt.") for p in (run_dir / "checkpoints").glob("*/params/ocdbt.*")
    }

    # ---- one is killed: the others say so and end ----------------------------------------------
    arguments = run_overrides(tmp_path, **SIXTEEN, checkpoint__every=2)
    job = launched(tmp_path / "4.log", 4, 1, arguments, gate_step=stopped + 3)
    job.until(rf"\[0\] step +{stopped + 3}/16 ")
    while max(steps_of(run_dir)) == stopped:
        time.sleep(0.02)
    job.member(2).kill()
    code, out = job.end()
    assert code == 128 + signal.SIGKILL
    for i in (0, 1, 3):
        died = rf"\[{i}\] error: process 2 \(\S+\) has not been heard of for 3 s \(in step \d+\)"
        assert len(re.findall(died, out)) == 1, out
    assert "launch: process 2 was killed by SIGKILL; the job has ended\n" in out
    assert max(steps_of(run_dir)) > stopped

    # ---- and on one again ----------------------------------------------------------------------
    assert main(run_overrides(tmp_path, **SIXTEEN, checkpoint__every=99)) == 0
    for mine, other in zip(rows_of(run_dir), rows_of(whole), strict=True):
        assert mine.pop("kind") == other.pop("kind")
        assert mine == pytest.approx(other, rel=1e-5)
    assert position(run_dir, 16) == position(whole, 16)


@pytest.mark.parametrize(
    ("scripts", "code", "said"),
    [
        (["AFTER 1; exit 1", "kill -9 $$"], 137, "was killed by SIGKILL"),
        (["exit 1", "AFTER 0; kill -9 $$"], 137, "was killed by SIGKILL"),  # slow to be gone
        (["AFTER 1; kill -ABRT $$", "exit 3"], 3, "ended with code 3"),
    ],
)
def test_the_launcher_names_the_process_that_died_first(
    scripts, code, said, capfd, tmp_path, monkeypatch
):
    """`AFTER i` waits until the launcher has seen that process i is gone."""
    monkeypatch.setattr(launch, "DYING", 0.0 if code == 3 else LONG)
    after = rf"until [ -s {tmp_path}/\1 ] && ! kill -0 $(cat {tmp_path}/\1); do sleep 0.01; done"
    scripts = [
        f"exec 2> /dev/null; echo $$ > {tmp_path}/{i}; {re.sub(r'AFTER (.)', after, script)}"
        for i, script in enumerate(scripts)
    ]
    lines = [["bash", "-c", script] for script in scripts]
    assert launch.run_processes(lines, [dict(os.environ)] * 2) == code
    assert capfd.readouterr().err == f"launch: process 1 {said}; the job has ended\n"


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_stages_of_two_processes_work_on_the_same_rows(tmp_path):
    """Of one layer and of two, each in a process. Both write the samples together."""
    changes = {"model__depth": 3, "train__steps": 2, "checkpoint__every": "null"}
    changes |= {"sample__prompts": "[To be, '']", "sample__tokens": 4, "sample__temperature": 0}
    changes |= QUICK
    assert main(run_overrides(tmp_path / "one", **changes)) == 0
    stages = {"mesh__data": 1, "mesh__pipeline": 2, "train__device_batch_size": 2}
    arguments = run_overrides(tmp_path / "two", **changes, **stages)
    code, out = launched(tmp_path / "log", 2, 1, arguments).end()
    assert code == 0, out
    one, two = (rows_of(tmp_path / name / "tiny") for name in ("one", "two"))
    assert [r["bpb"] for r in two] == pytest.approx([r["bpb"] for r in one], rel=1e-4)
    wrote = [tmp_path / name / "tiny" / "samples" / "step_000002.txt" for name in ("one", "two")]
    assert wrote[0].read_text() == wrote[1].read_text()


@pytest.mark.slow
def test_two_processes_evaluate_as_one(whole, tmp_path, capsys):
    arguments = [str(whole), "eval.batch_size=8"]
    assert evaluate(arguments) == 0
    expected = capsys.readouterr().out
    job = launched(tmp_path / "log", 2, 1, arguments, "--command", "evaluate")
    code, out = job.end()
    assert code == 0, out
    lines = [line for line in out.splitlines() if not re.search(" kernel   | waiting  ", line)]
    assert len(lines) == 3 and all(line.startswith("[0] ") for line in lines)
    words = [line.removeprefix("[0] ").split() for line in lines]
    alone = [line.split() for line in expected.splitlines()]
    assert [name for name, _ in words] == [name for name, _ in alone]
    numbers = [[float(number) for _, number in pairs] for pairs in (words, alone)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


def test_generate_is_one_process(whole, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert generate([str(whole)]) == 2
    message = (
        "error: jaxtrain generate runs in one process, but SLURM_STEP_NUM_TASKS is 2: start it"
    )
    assert message in capsys.readouterr().err


# ---- the templates ---------------------------------------------------------------------------

FLAGS = ("--coordinator", "--processes", "--process")
SAY = 'echo "$@"; env | grep OMPI_ || true'


@pytest.fixture
def path(tmp_path):
    """A PATH on which `tool(name, script)` puts commands before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def tool(name, script):
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    tool("python", f'exec {sys.executable} "$@"')
    return tool


def place_by(command, variables):
    """Which process `python` would be, and its last argument, in what a template runs."""
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done
    first, *environment = done.stdout.splitlines()
    words = first.split()
    flags = [words[words.index(n) + 1] if n in words else None for n in FLAGS]
    numbers = [n and int(n) for n in flags[1:]]
    seen = dict(line.split("=", 1) for line in environment if "=" in line)
    return find_rank(flags[0], *numbers, environment=seen), words[-1]


def test_slurm(path):
    srun = """
    while [[ $1 == --* ]]; do shift; done
    SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_STEP_NODELIST=a,b \\
    SLURM_STEP_TASKS_PER_NODE="1(x2)" SLURM_JOB_ID=61 "$@"
    """
    path("python", 'echo "$@"; env | grep SLURM_')
    variables = os.environ | {"PATH": path("srun", srun)}
    command = ["bash", "launch/slurm.sbatch", "--config", "gpt_d12"]
    assert place_by(command, variables) == (ProcessRank(1, 2, "a:61501"), "gpt_d12")


@pytest.mark.slow
def test_slurm_and_hosts_with_another_configuration(tmp_path, path):
    """The batch script, by an srun that starts two processes, one of which differs."""
    srun = """
    export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE="1(x2)"
    while [[ $1 == --* ]]; do shift; done
    SLURM_PROCID=0 SLURM_LOCALID=0 "$@" > $OUT.0 2>&1 & first=$!
    SLURM_PROCID=1 SLURM_LOCALID=0 "$@" train.z_loss=0.5 > $OUT.1 2>&1; echo $? > $OUT.code
    wait $first
    """
    variables = {"PATH": path("srun", srun), "OUT": str(tmp_path / "out")}
    arguments = [*run_overrides(tmp_path), "--coordinator", f"localhost:{free_port()}"]
    job = Job(["bash", "launch/slurm.sbatch", *arguments], tmp_path / "log", **variables)
    code, out = job.end()
    lines = (tmp_path / "out.0").read_text() + (tmp_path / "out.1").read_text()
    lines = re.sub(r"waiting  for .*\n", "", lines)  # on a busy machine
    assert code == 2 and (tmp_path / "out.code").read_text() == "2\n", out + lines
    error = r"error: process 1 \((\S+)\) has train.z_loss 0.5, not 0.0 in process 0 \(\1\); all"
    assert len(re.findall(error, lines)) == lines.count("\n") == 2, lines
    assert not (tmp_path / "tiny").exists()


def test_mpirun(path):
    mpirun = """
    [[ "$*" == "-np 2 --host a,b --map-by ppr:1:node "* ]] || exit 1
    while [[ $1 != python ]]; do shift; done
    OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 "$@"
    """
    path("mpirun", mpirun)
    variables = os.environ | {"PATH": path("python", SAY), "HOSTS": "a,b"}
    command = ["launch/mpirun.sh", "--config", "gpt_d12"]
    assert place_by(command, variables) == (ProcessRank(1, 2, "a:7777"), "gpt_d12")
    del variables["HOSTS"]
    assert subprocess.run(command, cwd=ROOT, env=variables, capture_output=True).returncode


def test_the_jobset(path):
    jobset = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())
    (hosts,) = jobset["spec"]["replicatedJobs"]
    job = hosts["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    name = f"{jobset['metadata']['name']}-{hosts['name']}-0-0.{jobset['metadata']['name']}"
    variables = os.environ | {"PATH": path("python", SAY), "JOB_COMPLETION_INDEX": "1"}
    count, cache = job["completions"], "data.cache_dir=/shared/cache"
    assert place_by(container["command"], variables) == (
        ProcessRank(1, count, f"{name}:{port}"),
        cache,
    )
    assert job["parallelism"] == count and job["completionMode"] == "Indexed"


# ---- jaxtrain launch ---------------------------------------------------------------


def start(*codes):
    commands = [[sys.executable, "-c", code] for code in codes]
    return launch.run_processes(commands, [dict(os.environ)] * len(codes))


def test_output_is_prefixed_and_codes_are_passed_on(capsys):
    assert start("print('one')", "print('[Gloo] Rank 1 is connected'); print('two')") == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] one", "[1] two"]


def test_when_one_fails_all_end(capsys, monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.2)
    assert start("import time; time.sleep(9999)", "raise SystemExit(3)") == 3
    assert "launch: process 1 ended with code 3; the job has ended" in capsys.readouterr().err
    assert start("import time; time.sleep(9999)", "import os; os.kill(os.getpid(), 9)") == 137
    assert "launch: process 1 was killed by SIGKILL; the job has" in capsys.readouterr().err


def test_signals_are_passed_on(tmp_path):
    """To all, and what they make of it counts."""
    obey = "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
    path = str(tmp_path / "ready")
    ready = f"open({path!r}, 'w');"
    wait = f"[time.sleep(0.01) for _ in iter(lambda: os.path.exists({path!r}), True)];"
    ask = "os.kill(os.getppid(), signal.SIGTERM);"
    assert start(obey + ready + "time.sleep(9999)", obey + wait + ask + "time.sleep(9999)") == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("devices", "outer", "expected"),
    [
        (None, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "6,7"}),
        (1, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "5"}),
        (3, {"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_devices_are_dealt(devices, outer, expected):
    assert launch.process_environment(1, 2, devices, outer) == expected


def test_more_devices_than_there_are(capsys, monkeypatch):
    with pytest.raises(UserError, match="3 processes of 2 GPUs, but this host has 4 GPUs"):
        launch.process_environment(0, 3, 2, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert launch.main(["--processes", "0", "--", "--config", "gpt_d12"]) == 2
    assert "--processes: got '0', must be a whole number from 1" in capsys.readouterr().err

import io
import json
import math
import os
import re
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from jaxtrain.runs import environment, metrics
from jaxtrain.runs.config import MetricsConfig
from jaxtrain.runs.history import read_rows
from jaxtrain.runs.metrics import MAX_IN_FLIGHT, MetricsWriter, format_row
from jaxtrain.settings import UserError


class Late:
    """A scalar that stays on the device until `ready` is set."""

    def __init__(self, value):
        self.value, self.ready = value, threading.Event()

    def is_ready(self):
        return self.ready.is_set()

    def block_until_ready(self):
        assert self.ready.wait(5)

    def __float__(self):
        assert self.is_ready()
        return float(self.value)


def open_writer(run_dir, every=10, total_steps=100, **more):
    config = MetricsConfig(every=every, tensorboard=more.pop("tensorboard", False))
    return MetricsWriter(run_dir, config, total_steps=total_steps, tokens_per_step=64, **more)


def stored(run_dir, kind="train"):
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == kind]


def events(run_dir):
    """All TensorBoard events, by file; a record is length, crc, data, crc."""
    found = []
    for path in sorted((run_dir / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += length + 16
    return found


def test_rows_hold_means_over_the_interval_and_last_states(tmp_path):
    with open_writer(tmp_path, every=4, total_steps=10) as writer:
        for step in range(1, 11):
            writer.push(step, {"loss": jnp.float32(step), "lr": step / 100})
    rows = stored(tmp_path)
    assert [row["step"] for row in rows] == [1, 4, 8, 10]
    assert [row["loss"] for row in rows] == [1, 3, 6.5, 9.5]
    assert [row["lr"] for row in rows] == [0.01, 0.04, 0.08, 0.10]
    assert [row["tokens"] for row in rows] == [64, 256, 512, 640]
    assert all(row["memory_bytes"] > 1_000_000 for row in rows)


def test_push_waits_only_when_too_far_ahead(tmp_path):
    writer = open_writer(tmp_path, every=1, total_steps=20)
    late = [Late(step) for step in range(1, 21)]
    for step in range(1, MAX_IN_FLIGHT + 1):
        assert writer.push(step, {"loss": late[step - 1]}) == []
    soon = threading.Timer(0.1, late[0].ready.set)
    soon.start()
    rows = writer.push(9, {"loss": late[8]})  # returns when the first step has ended
    assert [row["step"] for row in rows] == [1]
    for value in late[1:]:
        value.ready.set()
    rows = writer.push(10, {"loss": late[9]}) + writer.flush()
    assert [row["step"] for row in rows] == list(range(2, 11))
    writer.close()


def test_the_end_of_a_step_is_noted_while_the_host_is_busy(tmp_path):
    writer = open_writer(tmp_path, every=1, total_steps=3)
    writer.push(1, {"loss": 1.0})
    late = Late(2.0)
    threading.Timer(0.1, late.ready.set).start()
    writer.push(2, {"loss": late})
    time.sleep(0.6)  # as launching a long step keeps the host
    (row, _) = writer.push(3, {"loss": 3.0})
    assert row["step"] == 2 and 0.09 < row["steps_s"] < 0.4
    writer.close()


def test_a_jitted_step_on_eight_devices_is_logged_in_order(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step_fn = jax.jit(lambda x: x + 1, out_shardings=whole)
    loss = jax.device_put(jnp.float32(0), whole)
    with open_writer(tmp_path, every=1, total_steps=30) as writer:
        for step in range(1, 31):
            loss = step_fn(loss)
            writer.push(step, {"loss": loss})
    assert [row["loss"] for row in stored(tmp_path)] == list(range(1, 31))


def test_throughput_leaves_out_compilation_and_pauses(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(metrics, "peak_flops", lambda kind: 1000.0)
    devices = jax.devices()[:2]
    writer = open_writer(tmp_path, every=2, total_steps=6, flops_per_token=10.0, devices=devices)
    for step in range(1, 7):
        now[0] += 60 if step == 1 else 0.5
        writer.push(step, {"loss": 1.0, "wait_s": 0.05 * step})
        if step == 3:
            with writer.pause():
                now[0] += 30
    writer.close()
    rows = stored(tmp_path)
    assert "tokens_per_s" not in rows[0]
    assert [row["tokens_per_s"] for row in rows[1:]] == [128.0] * 3
    assert [row["mfu"] for row in rows[1:]] == [128 * 10 / 2000] * 3
    assert [row["data_wait"] for row in rows[1:]] == pytest.approx([0.2, 0.35, 0.55])
    assert "data_wait" not in rows[0] and "wait_s" not in rows[1]
    assert [row["time"] for row in rows] == [60, 60.5, 91.5, 92.5]


def test_non_finite_values_are_null_and_named(tmp_path):
    with open_writer(tmp_path, every=1, total_steps=1) as writer:
        (row,) = writer.push(1, {"loss": jnp.float32("nan"), "grad_norm": math.inf, "bpb": 1.0})
    assert math.isnan(row["loss"])
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    (row,) = stored(tmp_path)
    assert (row["loss"], row["grad_norm"], row["bpb"]) == (None, None, 1.0)
    assert row["nonfinite"] == ["loss", "grad_norm"]


def test_resume_drops_later_rows_and_purges_tensorboard(tmp_path):
    with open_writer(tmp_path, every=1, total_steps=6, tensorboard=True) as writer:
        for step in range(1, 6):
            writer.push(step, {"loss": 1.0})
            writer.write(step, "validation", {"loss": jnp.float32(2.0)})
    before = stored(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "kind": "tra')
    with open_writer(tmp_path, every=1, total_steps=6, tensorboard=True, start_step=3) as writer:
        for step in range(4, 7):
            writer.push(step, {"loss": 3.0})
    rows = stored(tmp_path)
    assert rows[:3] == before[:3]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows] == [1, 1, 1, 3, 3, 3]
    assert [row["step"] for row in stored(tmp_path, "validation")] == [1, 2, 3]
    times = [row["time"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert times == sorted(times)
    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert starts == [0, 4]
    losses = [
        (event.step, value.tag, value.simple_value)
        for event in events(tmp_path)
        for value in event.summary.value
        if value.tag in ("train/loss", "validation/loss")
    ]
    assert (5, "train/loss", 3.0) in losses and (5, "validation/loss", 2.0) in losses


def test_a_fresh_start_forgets_the_old_rows(tmp_path):
    for _ in range(2):
        with open_writer(tmp_path) as writer:
            writer.write(0, "validation", {"loss": 5.0})
    assert len(stored(tmp_path, "validation")) == 1


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = '{"step": 1, "kind": "train", "time": 0.5}\n'
    path.write_text(row + "12\n" + row)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is not a metrics row"):
        read_rows(path)
    path.write_text(row + '{"step": 2')
    assert len(read_rows(path)) == 1


def test_the_end_is_recorded(tmp_path):
    def last_status():
        return stored(tmp_path, "event")[-1]["status"]

    with open_writer(tmp_path, total_steps=2) as writer:
        writer.push(1, {"loss": 1.0})
    assert last_status() == "stopped"
    with open_writer(tmp_path, total_steps=1) as writer:
        writer.push(1, {"loss": 1.0})
    assert last_status() == "finished"
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path):
        raise KeyboardInterrupt
    assert last_status() == "interrupted"
    with pytest.raises(ValueError), open_writer(tmp_path, every=1) as writer:
        late = Late(7.0)
        threading.Timer(0.1, late.ready.set).start()
        writer.push(1, {"loss": late})
        raise ValueError("no label in the batch")
    assert last_status() == "failed: ValueError: no label in the batch"
    assert stored(tmp_path)[-1]["loss"] == 7.0  # what was in flight is not lost


def test_only_the_primary_process_writes(tmp_path, capsys):
    with open_writer(tmp_path / "run", every=1, primary=False) as writer:
        rows = writer.push(1, {"loss": 1.0})
        writer.write(1, "validation", {"loss": 1.0})
    assert rows[0]["loss"] == 1.0
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_plain_lines(tmp_path, capsys):
    with open_writer(tmp_path, every=2, total_steps=4) as writer:
        for step in range(1, 5):
            writer.push(step, {"loss": 2.5, "lr": 0.02})
        writer.write(4, "validation", {"loss": 2.25, "bpb": 0.75, "perplexity": 9.4877})
        writer.write(4, "event", {"message": "saved [4]"})
    lines = capsys.readouterr().out.splitlines()
    assert [line[:14] for line in lines[:3]] == [f"step     {s}/4  " for s in (1, 2, 4)]
    assert lines[3] == "step     4/4  validation  loss 2.2500  bpb 0.750  ppl 9.49"
    assert lines[4] == "step     4/4  event  saved [4]"


def test_a_terminal_gets_a_live_line(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    with open_writer(tmp_path, every=1, total_steps=3, console=console) as writer:
        for step in range(1, 4):
            writer.push(step, {"loss": 2.5})
        writer.write(3, "validation", {"loss": 2.25})
    assert "step 3/3 eta 0s" in screen.getvalue()
    for row in ("1/3  loss 2.5000", "3/3  validation  loss 2.2500"):
        assert f"step     {row}" in screen.getvalue()


@pytest.mark.parametrize("width", [120, 80, 60, 40, 26])
def test_step_and_time_left_stay_in_a_narrow_terminal(width, tmp_path, monkeypatch):
    """Of a line as a GPU has it, values go from the right; each row and the live line are a line
    each, and the rows are those of a pipe."""
    monkeypatch.setattr(metrics, "peak_flops", lambda kind: 1e6)
    monkeypatch.setattr(metrics, "memory_bytes", lambda: 123 * 2**30)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    given = {"total_steps": 25_000, "console": console, "flops_per_token": 1.0}
    with open_writer(tmp_path, every=1, **given) as writer:
        for step in range(12_344, 12_347):
            writer.push(step, {"loss": 2.5, "bpb": 0.9, "lr": 0.02})
            live = writer._live_line().plain
    assert live.startswith("step 12346/25000")
    assert len(live) <= width and live[16:21] == " eta "
    lines = (
        re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").split("\n")
    )
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if line.startswith("step 12346/25000  ")]
    assert len(rows) == 1 and ("loss 2.5000  bpb" in rows[0]) == (width >= 60)
    assert ("tok/s  mfu" in rows[0]) == (width == 120)


def test_format_row():
    row = {"step": 120, "kind": "train", "time": 3.0, "loss": 2.3456, "bpb": 2.871, "lr": 0.02}
    row |= {"tokens_per_s": 412345.4, "mfu": 0.412, "memory_bytes": 1288490189, "grad_norm": 1.0}
    whole = (
        "step   120/1500  eta 1m32s   loss 2.3456  bpb 2.871  lr 0.0200  412,345 tok/s  "
        "mfu 41.2%  mem 1.2 GiB"
    )
    assert format_row(row, 1500, 92.3) == whole
    for width, last in ((120, "GiB"), (80, "tok/s"), (60, "2.871"), (30, "1m32s")):
        line = format_row(row, 1500, 92.3, width).rstrip()
        assert len(line) <= width and line.endswith(last) and whole.startswith(line)


def test_a_text_is_never_cut_from_a_row():
    row = {"step": 1, "kind": "event", "time": 0.0, "data": "x" * 200, "loss": 1.0}
    assert format_row(row, 10, width=80) == "step     1/10  event  " + "x" * 200


@pytest.mark.parametrize(
    "seconds, text",
    [(0.4, "0s"), (59.7, "1m00s"), (92, "1m32s"), (3725, "1h02m"), (90000, "1d01h")],
)
def test_format_duration(seconds, text):
    assert metrics.format_duration(seconds) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1288490189, "1.2 GiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_format_bytes(count, text):
    assert metrics.format_bytes(count) == text


@pytest.mark.parametrize(
    "kind, tera",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
    ],
)
def test_peak_flops(kind, tera):
    assert environment.peak_flops(kind) == tera * 1e12


@pytest.mark.parametrize(
    "kind",
    ["cpu", "NVIDIA RTX A4000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 MIG 1g.10gb"],
)
def test_peak_flops_unknown(kind):
    assert environment.peak_flops(kind) is None


def test_environment_is_json_and_complete():
    env = json.loads(json.dumps(environment.environment()))
    assert env["device_count"] == jax.device_count()
    assert env["versions"]["jax"] == jax.__version__
    assert set(env["versions"]) == set(environment.PACKAGES)
    assert env["memory_bytes"] > 2**20


def test_wandb_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = MetricsConfig(wandb=True)
    with pytest.raises(UserError, match="uv sync --extra wandb"):
        MetricsWriter(tmp_path / "run", config, total_steps=1, tokens_per_step=1)


def test_wandb_gets_rows_and_config(tmp_path, monkeypatch):
    calls = []

    class Fake:
        def init(self, **arguments):
            calls.append(arguments)
            return self

        def log(self, values, step):
            calls.append((step, values))

        def finish(self, exit_code):
            calls.append(exit_code)

    monkeypatch.setitem(sys.modules, "wandb", Fake())
    (tmp_path / "config.yaml").write_text("model: {depth: 4}")
    config = MetricsConfig(wandb=True, tensorboard=False)
    with MetricsWriter(tmp_path, config, total_steps=1, tokens_per_step=8) as writer:
        writer.push(1, {"loss": 1.5})
    assert calls[0]["project"] == "jaxtrain"
    assert calls[0]["config"] == {"model": {"depth": 4}}
    assert any(call[0] == 1 and call[1].get("train/loss") == 1.5 for call in calls[2:-2])
    assert calls[-1] == 0


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (lambda rows: rows, None),
        (lambda rows: [], "the rows of steps 1 to 17 are gone from metrics.jsonl"),
        (lambda rows: rows[:3], "the rows of steps 6 to 17 are gone from metrics.jsonl"),
        (lambda rows: rows[:1] + rows[3:], "the rows before step 10 are gone from metrics.jsonl"),
        (None, "the rows of steps 1 to 17 are gone from metrics.jsonl"),
    ],
    ids=["whole", "empty", "cut", "beginning", "no file"],
)
def test_a_history_that_was_cut_is_said(tmp_path, capsys, keep, said):
    """Of rows at steps 1, 5, 10 and 15, before a checkpoint of step 17."""
    with open_writer(tmp_path, every=5, total_steps=40) as writer:
        for step in range(1, 18):
            writer.push(step, {"loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(keep(lines))) if keep else path.unlink()
    capsys.readouterr()
    # Rows at other steps now: what counts is when those before were due.
    with open_writer(tmp_path, every=2, total_steps=40, start_step=17) as writer:
        writer.push(18, {"loss": 1.0})
    found = [row["missing"] for row in stored(tmp_path, "event") if "missing" in row]
    assert found == ([said] if said else [])
    assert (said or "step") in capsys.readouterr().out


def test_torch_is_not_imported_for_event_files(tmp_path):
    (tmp_path / "torch.py").write_text("Tensor = int\n")
    code = (
        "import sys; from pathlib import Path; from jaxtrain.runs.tensorboard import open_events\n"
        "open_events(Path(sys.argv[1])).add_scalar('loss', 1.0, 1)\n"
        "assert 'torch' not in sys.modules\n"
        "import torch; assert torch.Tensor is int"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    folder = tmp_path / "events"
    subprocess.run([sys.executable, "-c", code, folder], env=environment, check=True)
    assert list(folder.glob("events.*"))

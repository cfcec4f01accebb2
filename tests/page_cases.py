"""Runs that were never trained, for the tests of the page, and the page's server in a thread."""

import json
import threading
import time
from contextlib import contextmanager

import uvicorn
import yaml

ROW = {"kind": "train", "loss": 3.0, "tokens_per_s": 1000.0, "lr": 0.01, "memory_bytes": 2**30}


def train_rows(steps, every=10, loss=5.0, floor=2.0):
    """Training rows, and a validation at each fifth."""
    for step in range(every, steps + 1, every):
        now = floor + (loss - floor) * (1 - step / (steps + every))
        figures = {"step": step, "time": 0.1 * step, "loss": now, "tokens": 100 * step}
        yield ROW | figures
        if step % (5 * every) == 0:
            yield {
                "step": step,
                "kind": "validation",
                "time": 0.1 * step,
                "loss": now,
                "bpb": now / 2,
            }


def make_run(folder, name, steps=100, end="finished", total=100, floor=2.0, lr=0.01):
    """A run directory with curves, samples, data and an event; end=None: none is recorded."""
    run = folder / name
    (run / "samples").mkdir(parents=True)
    config = {
        "run": {"name": name},
        "train": {"batch_size": 10, "sequence_length": 10, "steps": total},
        "optim": {"name": "adamw", "learning_rate": lr},
    }
    rows = [{"step": 0, "kind": "event", "time": 0.0, "event": "start", "total_steps": total}]
    rows += train_rows(steps, floor=floor)
    rows += [{"step": steps, "kind": "event", "time": 9.0, "loss_spike": "back to step 50"}]
    if end:
        rows += [{"step": steps, "kind": "event", "time": 9.0, "event": "end", "status": end}]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    command = ["/x/bin/jaxtrain", "train", "--config", "quickstart", f"run.name={name}"]
    env = {"device_kind": "H200", "device_count": 1, "command": command}
    (run / "env.json").write_text(json.dumps(env))
    write_rows(run, rows)
    source = {"documents": 10, "tokens": 1000, "bytes": 4000, "lengths": {"64": 4, "128": 6}}
    (run / "data.json").write_text(json.dumps({"web": source, "code": source}))
    for step in (50, 100):
        (run / "samples" / f"step_{step:06d}.txt").write_text(f"{name} writes at {step}")
    return run


def write_rows(run, rows, mode="w"):
    with (run / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@contextmanager
def served(app):
    """The URL of an app that a thread serves."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()

"""nanochat's own training on rows that our loader wrote, for `bench nanochat`: JSON lines.

    python benchmarks/peer_nanochat_train.py CHECKOUT FOLDER

FOLDER has settings.json, the rows train.npy and validation.npy [N, T+1] (uint16 ids; validation's
last row is padded), labels.npy [N] (number of labels of each validation row), bytes.npy [V] (UTF-8
bytes of each token) and weights.npz (initial weights in float32, by the checkout's names). Model,
optimizer and evaluation are the checkout's. The loop and its schedules follow its base_train.py
with two differences: all rows are on the device beforehand, and the loop synchronizes with the GPU
every `log_every` steps, not every step. Seconds exclude validations and, as in base_train.py, the
first steps, which compile.
"""

import gc
import json
import math
import os
import sys
import time
from pathlib import Path

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as base_train.py

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent))
from peer_nanochat import build

UNMARKED = -1  # a target without a label


def schedules(s):
    """Functions of the step: learning rate multiplier, momentum, weight decay of the matrices."""
    steps, decay = s["steps"], round(s["decay_fraction"] * s["steps"])

    def left(step):
        return min(1.0, (steps - step) / decay)

    def rate(step):
        if step < s["warmup_steps"]:
            return (step + 1) / s["warmup_steps"]
        return left(step) + (1 - left(step)) * s["final_fraction"]

    def momentum(step):
        if step < s["momentum_warmup_steps"]:
            share = step / s["momentum_warmup_steps"]
            return (1 - share) * s["momentum_start"] + share * s["momentum"]
        return s["momentum"] * left(step) + s["momentum_end"] * (1 - left(step))

    def weight_decay(step):
        return s["weight_decay"] * 0.5 * (1 + math.cos(math.pi * step / steps))

    return rate, momentum, weight_decay


def on_device(rows, labels=None):
    """Inputs and targets [N, T] on the GPU. Targets past a row's label count are UNMARKED."""
    ids = torch.from_numpy(rows.astype(np.int64)).cuda()
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if labels is not None:
        at = torch.arange(targets.shape[1], device="cuda")
        targets[at[None] >= torch.from_numpy(labels.astype(np.int64)).cuda()[:, None]] = UNMARKED
    return inputs, targets


@torch.no_grad()
def load_weights(model, path):
    """Initial weights by name, each in the dtype that the model keeps it in."""
    parameters = dict(getattr(model, "_orig_mod", model).named_parameters())
    with np.load(path) as weights:
        if missing := parameters.keys() ^ weights.keys():
            sys.exit(f"{path}: the checkout's model has other parameters: {sorted(missing)}")
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[name]))


def main():
    checkout, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, checkout)
    from nanochat.loss_eval import evaluate_bpb

    s = json.loads((folder / "settings.json").read_text())
    torch.manual_seed(s["seed"])
    torch.set_float32_matmul_precision("high")
    rates = {key: s[key] for key in ("unembedding_lr", "embedding_lr", "matrix_lr", "scalar_lr")}
    model, optimizer, attention, _ = build(
        s["depth"], s["sequence_length"], s["fp8"], weight_decay=s["weight_decay"], **rates
    )
    load_weights(model, folder / "weights.npz")
    inputs, targets = on_device(np.load(folder / "train.npy"))
    held_out = on_device(np.load(folder / "validation.npy"), np.load(folder / "labels.npy"))
    bytes_V = torch.from_numpy(np.load(folder / "bytes.npy").astype(np.int64)).cuda()
    rate, momentum, weight_decay = schedules(s)
    batch, each, tokens = s["batch_size"], s["device_batch_size"], s["sequence_length"]
    print(json.dumps({"kind": "peer", "attention": attention, "torch": torch.__version__}))

    def step(i):
        for first in range(i * batch, (i + 1) * batch, each):
            loss = model(inputs[first : first + each], targets[first : first + each])
            (loss / (batch // each)).backward()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate(i)
            if group["kind"] == "muon":
                group["momentum"], group["weight_decay"] = momentum(i), weight_decay(i)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    def validate(i):
        model.eval()
        rows = zip(held_out[0].split(each), held_out[1].split(each))
        bpb = evaluate_bpb(model, rows, -(-len(held_out[0]) // each), bytes_V)
        model.train()
        row = {"kind": "validation", "step": i, "time": time.perf_counter() - begin, "bpb": bpb}
        print(json.dumps(row), flush=True)

    on_host = (inputs, targets, *held_out)  # rows that a usual loader keeps on the host
    rows_bytes = sum(ids.numel() * ids.element_size() for ids in on_host)
    begin = last = time.perf_counter()
    logged = 0
    for i in range(s["steps"]):
        loss = step(i)
        if i + 1 == s["skip_steps"]:  # compiled by now
            torch.cuda.synchronize()
            gc.collect()
            gc.freeze()
            gc.disable()
            last, logged = time.perf_counter(), i + 1
        elif i >= s["skip_steps"] and ((i + 1) % s["log_every"] == 0 or i + 1 == s["steps"]):
            value, now = loss.item(), time.perf_counter()
            rate_now = (i + 1 - logged) * batch * tokens / (now - last)
            row = {"kind": "train", "step": i + 1, "time": now - begin, "loss": value}
            print(json.dumps(row | {"tokens_per_s": rate_now}), flush=True)
            last, logged = now, i + 1
        if (i + 1) % s["eval_every"] == 0 or i + 1 == s["steps"]:
            torch.cuda.synchronize()
            stopped = time.perf_counter()
            validate(i + 1)
            torch.cuda.synchronize()
            last += time.perf_counter() - stopped
    peak = torch.cuda.max_memory_allocated() - rows_bytes
    print(json.dumps({"kind": "peer", "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main()

"""modded-nanogpt's training on rows that our loader wrote, for `bench modded-nanogpt`: JSON lines.

    python benchmarks/peer_modded_nanogpt_train.py FOLDER

FOLDER is as in peer_nanochat_train.py, with modded_nanogpt.py instead of weights.npz: the parts of
the checkout's train_gpt.py that make model, optimizers, rates and attention windows. The loop
follows that script with three differences. A microbatch is whole rows of ours, concatenated (each
begins with BOS, at which the recipe separates documents). Learning rates scale with the square root
of the batch. The momentum's warm-up keeps its share of the steps. As in the script, warm-up steps
that compile come first and are undone. Seconds exclude these, validations and the first steps.
"""

import copy
import importlib
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()
UNMARKED = -100  # label that cross_entropy ignores
ACCUMULATED = 8  # sequences of train_seq_len tokens per step of the script
MOMENTUM = (0.85, 0.95, 300)  # Muon's momentum: start, end, warm-up steps in the script
WARM_UP = 10  # warm-up steps that compile, before training


def say(**row):
    print(json.dumps(row), flush=True)


def wait():
    if CUDA:
        torch.cuda.synchronize()


def load_recipe(folder):
    """Import the recipe's module, in a process group of size one."""
    device = {"device_id": torch.device("cuda", 0)} if CUDA else {}
    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **device)
    sys.path.insert(0, str(folder))
    return importlib.import_module("modded_nanogpt")


def on_device(numbers):
    ids = torch.from_numpy(numbers)
    return ids.pin_memory().to("cuda", non_blocking=True) if CUDA else ids


class HeldOut:
    """The validation rows in microbatches, and their number of bytes."""

    def __init__(self, folder, rows_each):
        rows = np.load(folder / "validation.npy").astype(np.int64)
        labels, bytes_V = np.load(folder / "labels.npy"), np.load(folder / "bytes.npy")
        inputs, targets = rows[:, :-1], rows[:, 1:].copy()
        position = np.arange(targets.shape[1])
        counted = (position[None] < labels[:, None]) & (bytes_V[targets] > 0)
        self.bytes = int(bytes_V[targets][counted].sum())
        targets[~counted] = UNMARKED
        self.parts = [
            (
                inputs[i : i + rows_each].astype(np.int32).reshape(-1),
                targets[i : i + rows_each].reshape(-1),
                int(counted[i : i + rows_each].sum()),
            )
            for i in range(0, len(rows), rows_each)
        ]

    @torch.no_grad()
    def bits_per_byte(self, model, window):
        """Bits per byte of the model, whose loss in eval mode is the mean over counted targets."""
        model.eval()
        nats = 0.0
        for inputs, targets, count in self.parts:
            nats += count * model(on_device(inputs), on_device(targets), window).item()
        model.train()
        return nats / math.log(2) / self.bytes


class Training:
    """The recipe's step on the rows of the folder."""

    def __init__(self, recipe, s, rows):
        self.recipe, self.s, self.rows = recipe, s, rows
        published = ACCUMULATED * recipe.published_tokens
        scale = (s["batch_size"] * s["sequence_length"] / published) ** 0.5
        for group in self.groups():
            group["initial_lr"] *= scale
        self.rate_scale = scale

    def groups(self):
        return [group for one in self.recipe.optimizers for group in one.param_groups]

    def step(self, i, rate=None):
        """Do step i; returns the loss of its last microbatch in nats per token. rate: overrides the
        rate of step i."""
        recipe, s = self.recipe, self.s
        window = recipe.get_window_size_blocks(i)
        batch, each = s["batch_size"], s["device_batch_size"]
        for first in range(i * batch, (i + 1) * batch, each):
            rows = self.rows[first : first + each]
            inputs = on_device(rows[:, :-1].astype(np.int32).reshape(-1))
            targets = on_device(rows[:, 1:].astype(np.int64).reshape(-1))
            loss = recipe.model(inputs, targets, window)
            loss.backward()
        for group in self.groups():
            group["lr"] = group["initial_lr"] * (recipe.get_lr(i) if rate is None else rate)
        begin, end, steps = MOMENTUM
        share = min(i / (steps * s["steps"] / recipe.published_steps), 1)
        for group in recipe.optimizer2.param_groups:
            group["momentum"] = (1 - share) * begin + share * end
        for one in recipe.optimizers:
            one.step()
        recipe.model.zero_grad(set_to_none=True)
        return loss.detach() / len(inputs)

    def warm_up(self, held_out):
        """Run steps that compile, then undo them. Their rates vary as in training."""
        model, optimizers = self.recipe.model, self.recipe.optimizers
        weights = copy.deepcopy(model.state_dict())
        states = [copy.deepcopy(one.state_dict()) for one in optimizers]
        steps = min(WARM_UP, self.s["steps"])
        for i in range(steps):
            self.step(i, rate=1 - i / 20)
        held_out.bits_per_byte(model, self.recipe.get_window_size_blocks(0))
        model.load_state_dict(weights)
        for one, state in zip(optimizers, states):
            one.load_state_dict(state)


def main():
    folder = Path(sys.argv[1])
    s = json.loads((folder / "settings.json").read_text())
    torch.manual_seed(s["seed"])
    rows = np.load(folder / "train.npy", mmap_mode="r")
    if not (rows[:, 0] == rows[0, 0]).all():
        sys.exit("a row does not begin with BOS, where the recipe parts documents")
    recipe = load_recipe(folder)
    training = Training(recipe, s, rows)
    held_out = HeldOut(folder, s["device_batch_size"])
    count = sum(parameter.numel() for parameter in recipe.model.parameters())
    scale = round(training.rate_scale, 4)
    say(kind="peer", parameters=count, rate_scale=scale, torch=torch.__version__)
    training.warm_up(held_out)
    wait()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()  # excludes the warm-up's copy of the state
    tokens = s["batch_size"] * s["sequence_length"]
    begin = last = time.perf_counter()
    logged = 0
    for i in range(s["steps"]):
        loss = training.step(i)
        if i + 1 == s["skip_steps"]:
            wait()
            last, logged = time.perf_counter(), i + 1
        elif i >= s["skip_steps"] and ((i + 1) % s["log_every"] == 0 or i + 1 == s["steps"]):
            value, now = loss.item(), time.perf_counter()
            rate = (i + 1 - logged) * tokens / (now - last)
            say(kind="train", step=i + 1, time=now - begin, loss=value, tokens_per_s=rate)
            last, logged = now, i + 1
        if (i + 1) % s["eval_every"] == 0 or i + 1 == s["steps"]:
            wait()
            stopped = time.perf_counter()
            window = recipe.get_window_size_blocks(i + 1)
            bpb = held_out.bits_per_byte(recipe.model, window)
            say(kind="validation", step=i + 1, time=time.perf_counter() - begin, bpb=bpb)
            last += time.perf_counter() - stopped
    if CUDA:
        say(kind="peer", peak_bytes=torch.cuda.max_memory_allocated())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

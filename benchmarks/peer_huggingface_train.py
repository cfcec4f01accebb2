"""Hugging Face Trainer with torch.compile on rows that our loader wrote, for `bench huggingface`.

    python benchmarks/peer_huggingface_train.py FOLDER

FOLDER is as in peer_nanochat_train.py, without weights.npz. The model is transformers' GPT-2 with
the configuration's sizes, its own initialization and scaled-dot-product attention; the loop is
Trainer's with bfloat16 autocast, fused AdamW and torch.compile. On a CPU (in tests) it is float32
and not compiled. Seconds exclude validations and the first steps, which compile.
"""

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

CUDA = torch.cuda.is_available()
UNMARKED = -100  # label of targets that the loss ignores, as in transformers


def say(**row):
    print(json.dumps(row), flush=True)


def wait():
    if CUDA:
        torch.cuda.synchronize()


class Rows(torch.utils.data.Dataset):
    """Rows [T+1] of token ids: T inputs, and the T targets shifted by one."""

    def __init__(self, path):
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = torch.from_numpy(self.rows[i].astype(np.int64))
        # The loss uses `shift_labels` as given; `labels` alone would be shifted again.
        return {"input_ids": ids[:-1], "labels": ids[1:], "shift_labels": ids[1:]}


class InOrder(Trainer):
    """Trainer on the rows in the order in which they were written."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


@torch.no_grad()
def bits_per_byte(model, folder, rows_each):
    """Bits per byte on the validation rows: loss of the tokens that stand for text, per byte."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.load(folder / "validation.npy").astype(np.int64))
    labels = torch.from_numpy(np.load(folder / "labels.npy").astype(np.int64))
    bytes_V = torch.from_numpy(np.load(folder / "bytes.npy").astype(np.int64)).to(device)
    nats, size, position = 0.0, 0, torch.arange(ids.shape[1] - 1, device=device)
    for first in range(0, len(ids), rows_each):
        part = ids[first : first + rows_each].to(device)
        counted = position[None] < labels[first : first + rows_each].to(device)[:, None]
        targets = part[:, 1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=CUDA):
            logits = model(input_ids=part[:, :-1]).logits
        losses = functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="none"
        )
        text = (counted & (bytes_V[targets] > 0)).flatten()
        nats += (losses * text).sum().item()
        size += (bytes_V[targets].flatten() * text).sum().item()
    return nats / math.log(2) / size


class Watch(TrainerCallback):
    """Prints the loss and the rate every `log_every` steps, and validates every `eval_every`."""

    def __init__(self, s, folder):
        self.s, self.folder, self.logged = s, folder, 0
        self.begin = self.last = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **_):
        step, s = state.global_step, self.s
        if step == s["skip_steps"]:  # compiled by now
            wait()
            self.last, self.logged = time.perf_counter(), step
        if step % s["eval_every"] == 0 or step == s["steps"]:
            wait()
            stopped = time.perf_counter()
            model.eval()
            bpb = bits_per_byte(model, self.folder, s["device_batch_size"])
            model.train()
            say(kind="validation", step=step, time=time.perf_counter() - self.begin, bpb=bpb)
            wait()
            self.last += time.perf_counter() - stopped

    def on_log(self, args, state, control, logs=None, **_):
        step, s = state.global_step, self.s
        if step <= s["skip_steps"] or "loss" not in (logs or {}):
            return
        wait()
        now = time.perf_counter()
        tokens = (step - self.logged) * s["batch_size"] * s["sequence_length"]
        rate = tokens / (now - self.last)
        say(kind="train", step=step, time=now - self.begin, loss=logs["loss"], tokens_per_s=rate)
        self.last, self.logged = now, step


def main():
    folder = Path(sys.argv[1])
    s = json.loads((folder / "settings.json").read_text())
    torch.manual_seed(s["seed"])
    torch.set_float32_matmul_precision("high")
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=s["vocab_size"], n_positions=s["sequence_length"], n_embd=s["width"],
            n_layer=s["depth"], n_head=s["heads"], n_inner=s["hidden"], use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=s["steps"], seed=s["seed"],
        per_device_train_batch_size=s["device_batch_size"],
        gradient_accumulation_steps=s["batch_size"] // s["device_batch_size"],
        learning_rate=s["learning_rate"], weight_decay=s["weight_decay"],
        adam_beta1=s["b1"], adam_beta2=s["b2"], adam_epsilon=s["eps"],
        max_grad_norm=s["clip_norm"] or 0.0, lr_scheduler_type="cosine",
        warmup_steps=s["warmup_steps"], optim="adamw_torch_fused" if CUDA else "adamw_torch",
        bf16=CUDA, torch_compile=CUDA, use_cpu=not CUDA, dataloader_num_workers=2 if CUDA else 0,
        remove_unused_columns=False, logging_steps=s["log_every"], logging_nan_inf_filter=False,
        save_strategy="no", eval_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    count = sum(parameter.numel() for parameter in model.parameters())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    say(kind="peer", parameters=count, compiled=CUDA, **versions)
    watch = Watch(s, folder)
    rows = Rows(folder / "train.npy")
    trainer = InOrder(model, arguments, train_dataset=rows, callbacks=[watch])
    trainer.remove_callback(transformers.PrinterCallback)  # it prints lines that are no JSON
    trainer.train()
    if CUDA:
        say(kind="peer", peak_bytes=torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()

"""CORE as nanochat evaluates it, for `bench tasks`: eager torch, one example per forward pass.

    python benchmarks/peer_tasks.py 12 4x902 1x338

The arguments are the depth, then (sequences x tokens) of each example. One JSON line for each: the
milliseconds of its forward pass in bfloat16 with float32 logits, every token's loss, and the
synchronization for each sequence's mean. The model has the recipe's features (nanochat's gpt.py: QK
norm, RoPE, value embeddings with gates, ReLU^2, smear, backout, residual and x0 scalars, softcap),
random weights, and full causal attention in each layer. Tokenization is not included.
"""

import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, HEAD_DIM, GATE, EXAMPLES = 32768, 128, 12, 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, width, has_values):
        super().__init__()
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.q, self.k, self.v, self.out = (linear(width, width) for _ in range(4))
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.gate = linear(GATE, width // HEAD_DIM) if has_values else None

    def forward(self, x, values, cos, sin):
        B, T, D = x.shape
        h = norm(x)
        q, k, v = (f(h).view(B, T, -1, HEAD_DIM) for f in (self.q, self.k, self.v))
        if self.gate is not None:
            gate = 3 * torch.sigmoid(self.gate(h[..., :GATE]))
            v = v + gate[..., None] * values.view(B, T, -1, HEAD_DIM)
        q, k = (1.2 * norm(rotate(z, cos, sin)) for z in (q, k))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.relu(self.up(norm(x))).square())


class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        width = -(-64 * depth // HEAD_DIM) * HEAD_DIM
        has_values = [i % 2 == (depth - 1) % 2 for i in range(depth)]
        self.embed = nn.Embedding(VOCAB, width)
        self.values = nn.ModuleList(nn.Embedding(VOCAB, width) if h else None for h in has_values)
        self.blocks = nn.ModuleList(Block(width, h) for h in has_values)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.smear = nn.Linear(24, 1, bias=False)
        self.scales = nn.Parameter(torch.ones(2, depth))
        angles = torch.outer(
            torch.arange(4096), 100000 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        )
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", angles.sin()[:, None])

    def forward(self, tokens):
        T = tokens.size(1)
        cos, sin = self.cos[:T], self.sin[:T]
        x = norm(self.embed(tokens))
        gate = torch.sigmoid(self.smear(x[:, 1:, :24]))
        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)
        first, middle = x, None
        for i, (block, table) in enumerate(zip(self.blocks, self.values)):
            x = self.scales[0, i] * x + self.scales[1, i] * first
            x = block(x, None if table is None else table(tokens), cos, sin)
            middle = x if i == len(self.blocks) // 2 else middle
        logits = self.head(norm(x - 0.2 * middle)).float()
        return 15 * torch.tanh(logits / 15)


@torch.no_grad()
def example(model, tokens):
    """The mean loss of each sequence's last tokens, and whether the argmax tokens are right."""
    logits = model(tokens)
    labels = torch.roll(tokens, -1, dims=1)
    loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), reduction="none")
    loss, found = loss.view(tokens.shape), logits.argmax(dim=-1)
    means = [loss[i, -5:-1].mean().item() for i in range(len(tokens))]
    return means, torch.all(found[0, -5:-1] == labels[0, -5:-1]).item()


def main():
    depth, *sizes = sys.argv[1:]
    torch.manual_seed(0)
    model = Model(int(depth)).to(DEVICE, torch.bfloat16)
    for size in sizes:
        tokens = torch.randint(0, VOCAB, tuple(map(int, size.split("x"))), device=DEVICE)
        times = []
        for _ in range(EXAMPLES + 3):
            begin = time.perf_counter()
            example(model, tokens)
            times.append(time.perf_counter() - begin)
        print(json.dumps({"size": size, "ms": 1e3 * statistics.median(times[3:])}), flush=True)


if __name__ == "__main__":
    main()

"""QuACK's kernels in PyTorch (Dao-AILab/quack), forward and backward: a JSON line for each op.

    python benchmarks/peer_quack.py '[{"op": "feed_forward_relu2", "shape": "d12",
        "sizes": [65536, 768, 3072]}]'

sizes: M, K, N of `feed_forward_relu2` (x [M, K], up [K, N], down [N, K]); N, D, V of
`linear_cross_entropy` (x [N, D], head [D, V], labels [N]); rows and D of `residual_norm` (x and y
[rows, D]: x + y and its RMSNorm). Random bfloat16 inputs; times as in `peer_timing.py`. QuACK 0.6.5
has a binding for JAX of softmax alone.
"""

import json
import sys

import torch
from quack.linear_cross_entropy import chunked_linear_cross_entropy
from quack.mlp import mlp_func
from quack.rmsnorm import rmsnorm

from benchmarks.peer_timing import cold_sets, graph_of, median_ms

CHUNK = 8192  # tokens of which QuACK keeps the logits


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.5


def feed_forward_relu2(m, k, n):
    f = lambda x, up, down: mlp_func(x, up, down, activation="relu_sq")
    return f, lambda: [normal(m, k), normal(n, k) * k**-0.5, normal(k, n) * n**-0.5, normal(m, k)]


def linear_cross_entropy(n, d, v):
    def loss(x, head, labels):
        return chunked_linear_cross_entropy(x, head, labels, chunk_size=CHUNK, reduction="sum")

    labels = lambda: torch.randint(0, v, (n,), device="cuda")
    one = lambda: torch.ones((), device="cuda")
    return loss, lambda: [normal(n, d), normal(v, d) * d**-0.5, labels(), one()]


def residual_norm(rows, d):
    f = lambda x, y: rmsnorm(x, residual=y, prenorm=True)
    return f, lambda: [normal(rows, d), normal(rows, d), normal(rows, d), normal(rows, d)]


OPS = {f.__name__: f for f in (feed_forward_relu2, linear_cross_entropy, residual_norm)}
RESULTS = {"residual_norm": 2}  # results of an op, and so cotangents; 1 by default


def with_gradients(f, results):
    def run(*given):
        arguments, cotangents = given[:-results], given[-results:]
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in arguments]
        out = f(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        learned = [x for x in leaves if x.requires_grad]
        return torch.autograd.grad(out, learned, [g.to(y.dtype) for y, g in zip(out, cotangents)])

    return run


def main():
    for asked in json.loads(sys.argv[1]):
        f, make = OPS[asked["op"]](*asked["sizes"])
        row = {"name": asked["op"], "shape": asked["shape"], "backend": "QuACK (torch)"}
        try:
            sets = cold_sets(make)
            run = with_gradients(f, RESULTS.get(asked["op"], 1))
            row["ms"] = median_ms(graph_of(run, sets), len(sets))
        except Exception as error:
            row |= {"ms": None, "failed": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""FlashAttention 4 in PyTorch, for `bench attention`: two JSON lines per shape.

    python benchmarks/peer_attention.py '[{"name": "b16", "B": 16, "T": 2048, "N": 12, "K": 12,
        "H": 128, "causal": true, "window": null, "lengths": null}]'

lengths: lengths of the documents packed into each row, one list per row; FlashAttention's varlen
function then runs on the concatenated rows. Each line has the milliseconds of the forward pass, or
of forward and backward, on random bfloat16 inputs (`peer_timing.py`).
"""

import itertools
import json
import sys

import torch
from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

from benchmarks.peer_timing import cold_sets, graph_of, median_ms


def inputs(s):
    """q, k, v and the output's cotangent; rows are concatenated if documents are packed."""
    lead = (s["B"] * s["T"],) if s["lengths"] else (s["B"], s["T"])
    size = lambda heads: (*lead, heads, s["H"])
    make = lambda heads: torch.randn(size(heads), device="cuda", dtype=torch.bfloat16)
    return [make(s["N"]), make(s["K"]), make(s["K"]), make(s["N"])]


def attention(s):
    """q, k, v -> out"""
    window = (None, None) if s["window"] is None else (s["window"], 0)
    options = {"causal": s["causal"], "window_size": window}
    if not s["lengths"]:
        return lambda q, k, v: first(flash_attn_func(q, k, v, **options))
    lengths = list(itertools.chain.from_iterable(s["lengths"]))
    ends = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)
    options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    options |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return lambda q, k, v: first(flash_attn_varlen_func(q, k, v, **options))


def first(found):
    return found[0] if isinstance(found, tuple) else found


def main():
    for s in json.loads(sys.argv[1]):
        f = attention(s)
        sets = cold_sets(lambda s=s: inputs(s))

        def both(q, k, v, do, f=f):
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(f(q, k, v), (q, k, v), do)

        def forward(q, k, v, do, f=f):
            with torch.no_grad():
                return f(q, k, v)

        for name, run in (("forward", forward), ("forward_backward", both)):
            row = {"name": f"attention_{name}", "shape": s["name"], "backend": "FA4 (torch)"}
            try:
                row["ms"] = median_ms(graph_of(run, sets), len(sets))
            except Exception as error:
                row |= {"ms": None, "failed": f"{type(error).__name__}: {error}"[:200]}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

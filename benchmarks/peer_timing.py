"""Milliseconds of PyTorch functions, replayed as CUDA graphs: Python's time is not counted.

Medians of five windows of 0.2 s. For scripts that run as processes of their own (`peers.rows_of`).
"""

import statistics
import time

import torch

WINDOWS, SECONDS = 5, 0.2
COLD_BYTES = 2**28  # inputs of this total size exceed any device's cache


def cold_sets(make):
    """Sets of inputs that together exceed the cache; `make` returns one."""
    first = make()
    each = sum(x.nbytes for x in first)
    return [first, *(make() for _ in range(max(1, min(7, -(-COLD_BYTES // each) - 1))))]


def graph_of(run, sets):
    """A CUDA graph that calls `run` once for each input set."""
    for args in sets:
        run(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in sets:
            run(*args)
    return graph


def median_ms(graph, calls):
    """Milliseconds per call, where one replay of the graph makes `calls` calls."""

    def window(replays):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    window(3)
    replays = max(1, round(SECONDS / (window(3) / 3)))
    return 1e3 * statistics.median(window(replays) for _ in range(WINDOWS)) / replays / calls

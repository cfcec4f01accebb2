"""Projected time to GPT-2's CORE score on eight GPUs, computed from records; no such run was made.

    python -m benchmarks projection --record

seconds = tokens / (devices x tokens per second of one GPU x efficiency). The rate and the
efficiency on four GPUs are recorded; the efficiency on eight is the latter to the power
log2(8) / log2(4), which assumes the same loss per doubling. The interval goes from the least
efficient recorded sharding to an efficiency of one. The tokens come from the law fitted by
`jaxtrain scaling` if there is a record (`LAW`), with its interval; otherwise from nanochat's run
(peers.json), without one.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.record import Record, describe, read_peers, read_results
from jaxtrain.settings import UserError

DEVICES = 8
CONFIG = "gpt_d24"
RATE = "accumulation 4"  # the variant that gives the rate on one GPU
LAW = "scaling"  # the bench whose records have metrics.tokens_to_core: [low, middle, high]


class Range(NamedTuple):
    """A value with its interval."""

    low: float
    middle: float
    high: float


def rates(records: Sequence[Record], devices: int) -> dict[str, float]:
    """Variant -> tokens per second of the step records on `devices` GPUs."""
    return {
        one["variant"]: one["metrics"]["tokens_per_s"]
        for one in records
        if (one["bench"], one["config"], one["device_count"]) == ("step", CONFIG, devices)
    }


def efficiency(records: Sequence[Record]) -> Range:
    """Efficiency of eight GPUs (over eight times one GPU's rate), from the records of four."""
    one = rates(records, 1).get(RATE)
    four = {k: v for k, v in rates(records, 4).items() if k.startswith(RATE)}
    if one is None or RATE not in four:
        raise UserError(f"projection: no records of {CONFIG}, {RATE}, on one and on four GPUs")
    steps = math.log2(DEVICES) / 2
    shares = {name: (rate / (4 * one)) ** steps for name, rate in four.items()}
    return Range(min(shares.values()), shares[RATE], 1.0)


def tokens_to_core(records: Sequence[Record]) -> tuple[Range, str]:
    """Training tokens to GPT-2's CORE score, and their source."""
    for record in records:
        if record["bench"] == LAW and "tokens_to_core" in record.get("metrics", {}):
            return Range(*record["metrics"]["tokens_to_core"]), record["file"]
    peer = next(p for p in read_peers() if (p["bench"], p["config"]) == ("core", CONFIG))
    tokens = float(peer["metrics"]["tokens"])
    return Range(tokens, tokens, tokens), f"peers.json: {peer['peer']}"


def project(records: Sequence[Record] | None = None) -> dict[str, Any]:
    """The record of the projection. Raises UserError if a required record is missing."""
    found = read_results() if records is None else records
    share, (tokens, source) = efficiency(found), tokens_to_core(found)
    rate = DEVICES * rates(found, 1)[RATE]
    hours = lambda n, share: n / (rate * share) / 3600
    workload = {"devices": DEVICES, "tokens_from": source}
    record = describe("projection", CONFIG, "", workload, DEVICES)
    row = {
        "name": "GPT-2's CORE",
        "tokens": tokens.middle,
        "projected_tokens_per_s": rate * share.middle,
        "efficiency": share.middle,
        "efficiency_low": share.low,
        "hours_low": hours(tokens.low, share.high),
        "hours": hours(tokens.middle, share.middle),
        "hours_high": hours(tokens.high, share.low),
    }
    return record | {"device": "NVIDIA H200, projected", "rows": [row]}

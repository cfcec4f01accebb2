"""Time and cost of training on 10^12 and 10^13 tokens with 1,024 GPUs, computed from records.

    python -m benchmarks at-scale --record

No such run was made. Rates come from records (`RATES`), public prices are in `PRICES`, assumptions
in `ASSUMED`. Host work is assumed to scale linearly with cores: each process has its own files and
waits for no other.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.record import Record, describe, read_results
from jaxtrain.settings import UserError

TOKENS = {"1T": 10**12, "10T": 10**13}
GPUS, GPUS_A_HOST = 1024, 8
HOSTS = GPUS // GPUS_A_HOST
MODEL = "llama_8b"
DOCUMENT_TOKENS = 730  # mean tokens per document, as in the records of plans
BLOCK_TOKENS = 1 << 20
OBJECT_BLOCKS = 64
HOUR = 3600.0


class Rate(NamedTuple):
    """Source of a rate: the record, the name of a row in it (or None), and the metric."""

    bench: str
    config: str
    row: str | None
    metric: str


RATES = {
    "tokenize_mb": Rate("data", "jsonl", "sentencepiece 32768: prepare", "mb_per_cpu_s"),
    "tokenize": Rate("data", "jsonl", "sentencepiece 32768: prepare", "tokens_per_cpu_s"),
    "filters_mb": Rate("filters", "jsonl", "all", "mb_per_cpu_s"),
    "near_duplicates_mb": Rate("filters", "jsonl", "near_duplicates", "mb_per_cpu_s"),
    "plan": Rate("plans", "random", "best_fit, blocks", "plan_tokens_per_cpu_s"),
    "loader": Rate(
        "remote_loader", "random", "URL, blocks, half the store in the cache, cold",
        "tokens_per_cpu_s",
    ),
    "step": Rate("step", MODEL, None, "tokens_per_s"),
}  # fmt: skip
# US dollars, list prices of us-east-1, without a discount.
PRICES = {
    "gpu_hour": 5.408,  # H200 of p5en/p5e: EC2 Capacity Blocks for ML pricing page, end of 2024
    "core_hour": 0.0446,  # vCPU of c7i.48xlarge on demand: EC2 pricing page, 2025
    "gb_month": 0.023,  # S3 Standard, first 50 TB: S3 pricing page, 2025
    "get": 0.4e-6,  # per request: S3 pricing page, 2025
    "put": 5e-6,
}
ASSUMED = {
    "step_efficiency": 0.8,  # rate of 1,024 GPUs over 256 times that of four; not measured
    "host_cores": 96,  # per host with eight GPUs
    "host_bytes_per_s": 1.25e9,  # from an object store to one host: 10 Gbit/s
    "prepare_cores": 4096,
    "bytes_per_parameter": 12,  # in a checkpoint: float32 weights and two moments of AdamW
    "checkpoint_every_s": 1800.0,
    "kept_months": 3.0,
}


def rate_of(records: Sequence[Record], rate: Rate) -> tuple[float, str]:
    """The value of a rate and the file of its record; the best value of several records."""
    found = []
    for record in records:
        if (record["bench"], record["config"]) != (rate.bench, rate.config):
            continue
        rows = [record["metrics"]] if rate.row is None else record.get("rows", ())
        for row in rows:
            if rate.metric in row and (rate.row is None or row["name"] == rate.row):
                scale = record["device_count"] if rate.row is None else 1
                found.append((float(row[rate.metric]) / scale, record["file"]))
    if not found:
        raise UserError(f"at-scale: no record of {rate.bench} {rate.config} has {rate.metric}")
    return max(found)


def bench_at_scale() -> Iterator[Record]:
    """Yield a record for each number of tokens, with the files that its rates come from."""
    records = read_results()
    rates = {name: rate_of(records, rate) for name, rate in RATES.items()}
    step = rates["step"][1]
    parameters = next(r["workload"]["parameters"] for r in records if r["file"] == step)
    values = {name: value for name, (value, _) in rates.items()}
    workload: dict[str, Any] = {"rates": values, "files": {n: f for n, (_, f) in rates.items()}}
    workload |= {"prices": PRICES, "assumed": ASSUMED, "parameters": parameters, "gpus": GPUS}
    for name, tokens in TOKENS.items():
        record = describe("at_scale", MODEL, name, workload=workload)
        rows = list(rows_of(tokens, values, parameters))
        yield record | {"device": "computed", "device_count": GPUS, "rows": rows}


def rows_of(tokens: int, rates: Mapping[str, float], parameters: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each part of a run on `tokens` tokens: hours, dollars, terabytes."""
    a, shape = ASSUMED, f"{tokens / 1e12:g}T tokens"
    text_mb = tokens / rates["tokenize"] * rates["tokenize_mb"]

    def row(name: str, hours: float, dollars: float, moved: float, **more: float) -> dict[str, Any]:
        values = {"hours": hours, "dollars": dollars, "terabytes": moved / 1e12}
        return {"name": name, "shape": shape, **values, **more}

    for name in ("filters", "near_duplicates", "tokenize"):
        core_hours = text_mb / rates[f"{name}_mb"] / HOUR
        cost = core_hours * PRICES["core_hour"]
        yield row(name, core_hours / a["prepare_cores"], cost, text_mb * 1e6, core_hours=core_hours)
    stored = 4 * tokens  # 128,256 ids take 4 bytes
    blocks = tokens / BLOCK_TOKENS
    months = stored / 1e9 * PRICES["gb_month"] * a["kept_months"]
    upload = stored / a["host_bytes_per_s"] / HOSTS / HOUR
    puts = blocks / OBJECT_BLOCKS * PRICES["put"]
    yield row("store at a URL, 3 months", upload, months + puts, stored)
    training = GPUS * rates["step"] * a["step_efficiency"]
    hours = tokens / training / HOUR
    yield row("training", hours, hours * GPUS * PRICES["gpu_hour"], 0, tokens_per_s=training)
    # With data.shuffle.name=blocks, every host reads every block once.
    reads, demand = HOSTS * stored, 4 * training
    yield row(
        "blocks read by all hosts", hours, HOSTS * blocks * PRICES["get"], reads,
        share=demand / a["host_bytes_per_s"],
    )  # fmt: skip
    planning, own = training / rates["plan"], training / GPUS / rates["loader"]
    yield row("plan, in each process", hours, 0, 0, cores=planning)
    yield row("loader, in each process", hours, 0, 0, cores=own)
    documents = tokens / DOCUMENT_TOKENS
    yield row(
        "lengths and first records, in each process", 0, 0, 8 * documents, documents=documents
    )
    saved = parameters * a["bytes_per_parameter"]
    count = hours * HOUR / a["checkpoint_every_s"]
    seconds = saved / HOSTS / a["host_bytes_per_s"]
    cost = saved / 1e9 * PRICES["gb_month"] + count * HOSTS * PRICES["put"]
    yield row(
        "checkpoints to an object store", count * seconds / HOUR, cost, count * saved,
        checkpoint_s=seconds, checkpoint_gb=saved / 1e9,
    )  # fmt: skip

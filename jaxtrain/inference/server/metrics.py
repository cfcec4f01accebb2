"""Prometheus metrics: requests, tokens, latencies, and engine statistics."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxtrain.inference.server.engine_thread import EngineThread

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAUGES = {
    "running": "Requests that are running",
    "waiting": "Requests that wait in the queue",
    "pages_used": "KV cache pages in use",
    "pages_total": "KV cache pages in total",
}
COUNTS = {
    "preemptions": "Preemptions of requests, whose tokens are recomputed later",
    "prefix_hits": "Prompt tokens reused from the prefix cache",
    "prompt_tokens": "Prompt tokens, reused or computed",
    "new_tokens": "Generated tokens",
    "drafts": "Draft tokens that were verified (speculative decoding)",
    "accepted_drafts": "Draft tokens that were accepted",
    "steps": "Engine steps",
}


class EngineCollector(Collector):
    """Engine statistics at the time of a scrape."""

    def __init__(self, thread: EngineThread):
        self.thread = thread

    def collect(self) -> Iterator[Metric]:
        stats = self.thread.stats
        for name, words in GAUGES.items():
            yield GaugeMetricFamily(f"jaxtrain_engine_{name}", words, getattr(stats, name))
        for name, words in COUNTS.items():
            family = CounterMetricFamily(f"jaxtrain_engine_{name}", words)
            family.add_metric([], getattr(stats, name))
            yield family


class Metrics:
    """Metrics of one server."""

    def __init__(self, thread: EngineThread):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(thread))
        self.requests = Counter(
            "jaxtrain_http_requests", "HTTP requests completed; status 499: client disconnected",
            ["path", "status"], registry=self.registry,
        )  # fmt: skip
        self.tokens = Counter(
            "jaxtrain_tokens",
            "Prompt tokens and generated tokens",
            ["kind"],
            registry=self.registry,
        )
        self.duration = Histogram(
            "jaxtrain_http_request_seconds", "Request latency in seconds", ["path"],
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self.first_token = Histogram(
            "jaxtrain_time_to_first_token_seconds", "Time to first token in seconds",
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip

    def text(self) -> bytes:
        return generate_latest(self.registry)

"""Prometheus metrics: requests, tokens, latencies, and engine statistics."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxtrain.inference.server.engine_thread import EngineThread

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAUGES = {
    "running": "Answers that are decoded at the moment",
    "waiting": "Answers that wait for a place in the batch",
    "pages_used": "Pages of the KV cache that answers hold",
    "pages_total": "Pages of the KV cache",
}
COUNTS = {
    "preemptions": "Answers that gave up their pages to older ones, and were computed again",
    "prefix_hits": "Tokens of prompts that were found in the prefix cache",
    "prompt_tokens": "Tokens of prompts, found or computed",
    "new_tokens": "Tokens of answers",
    "drafts": "Tokens that were guessed and tried (speculative decoding)",
    "accepted_drafts": "Guessed tokens that were right",
    "steps": "Steps of the engine",
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
            "jaxtrain_http_requests", "HTTP requests that have ended; status 499: the client left",
            ["path", "status"], registry=self.registry,
        )  # fmt: skip
        self.tokens = Counter(
            "jaxtrain_tokens", "Tokens of prompts and of answers", ["kind"], registry=self.registry
        )
        self.duration = Histogram(
            "jaxtrain_http_request_seconds", "Seconds of a request, to its last byte", ["path"],
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self.first_token = Histogram(
            "jaxtrain_time_to_first_token_seconds", "Seconds from a request to its first token",
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip

    def text(self) -> bytes:
        return generate_latest(self.registry)

"""What Prometheus may ask. The one file that knows its client library.

Names follow vLLM's, with our prefix or, asked for, with both. Mean acceptance length is
1 + spec_decode_num_accepted_tokens_total / spec_decode_num_drafts_total.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from longgraft.config import Output
from longgraft.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX, VLLM = "longgraft", "vllm"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LABEL = "model_name"
DRAFT, ACCEPTED = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
POSITION = "spec_decode_num_accepted_tokens_per_pos"
# What is counted: name, what it means, labels.
COUNTED = (
    ("prompt_tokens", "Prompt tokens of finished requests", ()),
    ("generation_tokens", "Tokens of finished answers", ()),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", ()),
    ("prefix_cache_hits", "Prompt tokens found there", ()),
    ("spec_decode_num_drafts", "Rounds with proposed tokens", ()),
    (DRAFT, "Proposed tokens that were verified", ("source",)),
    (ACCEPTED, "Proposed tokens that were accepted", ("source",)),
    (POSITION, "Accepted tokens by their place in a round", ("position",)),
    ("rounds", "Target passes of finished requests, per request", ()),
    ("request_success", "Finished requests", ("finished_reason",)),
    ("request_failure", "Requests that ended in an error", ("status",)),
    ("requests_refused", "Requests refused because too many were on their way", ()),
)  # fmt: skip


class Metrics:
    """Counts what one server does. Called from the event loop alone."""

    def __init__(self, service: Callable[[], Service | None], model: str, with_vllm: bool = False) -> None:
        self._service, self._model = service, model
        self._prefixes = (PREFIX, VLLM) if with_vllm else (PREFIX,)
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.registry = CollectorRegistry()
        self._first = self._histograms("time_to_first_token_seconds", "From asking to the first token", SECONDS)
        self._gap = self._histograms("inter_token_latency_seconds", "Time of a round by its tokens", GAPS)
        self._whole = self._histograms("e2e_request_latency_seconds", "From asking to the end", SECONDS)
        self.registry.register(self)

    def round(self, asked: float, gap: float | None, num_tokens: int) -> None:
        """Take in a round of one answer: when it was asked for, seconds since the last round (None: the first)."""
        if gap is None:
            self._observe(self._first, time.perf_counter() - asked)
            return
        for _ in range(num_tokens):
            self._observe(self._gap, gap / num_tokens)

    def finished(self, asked: float, output: Output) -> None:
        """Take in an answer."""
        stats = output.stats
        self._observe(self._whole, time.perf_counter() - asked)
        for name, number in (
            ("prompt_tokens", output.prompt_len),
            ("generation_tokens", len(output.token_ids)),
            ("prefix_cache_queries", output.prompt_len),
            ("prefix_cache_hits", stats["prefix_rows"]),
            ("spec_decode_num_drafts", stats["drafted_rounds"]),
            ("rounds", stats["rounds"]),
        ):
            self._counts[name, ()] += number
        for name, numbers in ((DRAFT, stats["nodes_by_source"]), (ACCEPTED, stats["accepted_by_source"])):
            for source, number in numbers.items():
                self._counts[name, (source,)] += number
        for depth, number in stats["accepted_by_depth"].items():
            self._counts[POSITION, (str(depth - 1),)] += number
        self._counts["request_success", (output.finish_reason,)] += 1

    def failed(self, status: int) -> None:
        """Take in a request that ended in an error."""
        self._counts["request_failure", (str(status),)] += 1

    def refused(self) -> None:
        """Take in a request for which there was no room."""
        self._counts["requests_refused", ()] += 1

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield counters and gauges, under every prefix."""
        for prefix in self._prefixes:
            for name, about, labels in COUNTED:
                family = CounterMetricFamily(f"{prefix}:{name}", about, labels=(LABEL, *labels))
                rows = [(key[1], number) for key, number in self._counts.items() if key[0] == name]
                for values, number in rows or ([((), 0)] if not labels else []):
                    family.add_metric((self._model, *values), number)
                yield family
            for name, about, value in self._gauges():
                gauge = GaugeMetricFamily(f"{prefix}:{name}", about, labels=(LABEL,))
                gauge.add_metric((self._model,), value)
                yield gauge

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        service = self._service()
        if service is None:
            return
        pool, running = service.engine.pool, service.num_running
        used = pool.num_chunks - pool.num_free
        yield "num_requests_running", "Requests that compute", running
        yield "num_requests_waiting", "Requests that wait", max(0, service.num_requests - running)
        yield "kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1", used / pool.num_chunks
        yield (
            "kv_cache_kept_perc",
            "Share of it that is kept for later requests, 0 to 1",
            pool.num_idle / pool.num_chunks,
        )

    def _histograms(self, name: str, about: str, buckets: tuple[float, ...]) -> list[Any]:
        return [
            Histogram(f"{prefix}:{name}", about, (LABEL,), registry=self.registry, buckets=buckets)
            for prefix in self._prefixes
        ]

    def _observe(self, histograms: list[Any], value: float) -> None:
        for histogram in histograms:
            histogram.labels(self._model).observe(value)

"""What ``/metrics`` says of a cluster: the figures of every replica, by its name, and those of the gateway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from nanoinfer.cluster.gateway import Counts


class Together:
    """A collector of texts that others have written.

    Args:
        texts: by the replica's name, in Prometheus' format.
        counts: of the gateway.
    """

    def __init__(self, texts: Mapping[str, bytes], counts: Counts) -> None:
        self.texts, self.counts = texts, counts

    def collect(self) -> Iterator[Metric]:
        """One family of each name, and in it a sample for each replica."""
        families: dict[str, Metric] = {}
        for replica, text in self.texts.items():
            for family in text_string_to_metric_families(text.decode()):
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    whole.add_sample(sample.name, labels, sample.value)
        yield from families.values()
        told = {
            "requests": ("requests that came", self.counts.requests),
            "retries": ("requests that were asked again, their replica being gone", self.counts.retried),
            "lost": ("requests that ended with an error, their replica being gone", self.counts.lost),
        }
        for name, (about, value) in told.items():
            yield CounterMetricFamily(f"nanoinfer_gateway_{name}", about, value)


def together(texts: Mapping[str, bytes], counts: Counts) -> bytes:
    """In Prometheus' format."""
    registry = CollectorRegistry()
    registry.register(Together(texts, counts))
    return generate_latest(registry)

"""Layouts priced in tests: a short way to ask."""

from typing import Any

from shardwise.cluster.cluster import Cluster
from shardwise.cost.layouts import Layouts
from shardwise.cost.software import Software
from shardwise.cost.step import Estimate, price
from shardwise.model.catalogue import get_model


def ask(
    cluster: str, *, model: str = "llama3-8b", sequence: int = 4096, software: Software | None = None, **columns: Any
) -> Estimate:
    """Price layouts of a catalogue model on a named cluster."""
    return price(get_model(model), Cluster.parse(cluster), Layouts.of(**columns), sequence=sequence, software=software)

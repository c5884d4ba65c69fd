"""Where the row queue goes in a cluster: to a node that has room beside the roles, or nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from relax_sdk.config import RunConfig, resolve
from relax_sdk.errors import ConfigError
from relax_sdk.registry import Registry
from relax_sdk.runtime import placement


def configured(nodes: int, devices: int) -> RunConfig:
    return resolve(
        {"backend.resource": {"actor": (nodes, devices), "rollout": (nodes, devices)}},
        registry=Registry([]),
        environ={},
    )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the nodes, as (id, address, CPUs, alive), and the nodes of the bundles."""

    def set_up(nodes: list[tuple[str, str, float, bool]], bundles: list[str]) -> None:
        found = [
            {"NodeID": name, "NodeManagerAddress": address, "Resources": {"CPU": cpus} if cpus else {}, "Alive": alive}
            for name, address, cpus, alive in nodes
        ]
        monkeypatch.setattr(placement.ray, "nodes", lambda: found)
        table = {"bundles_to_node_id": dict(enumerate(bundles))}
        monkeypatch.setattr(placement, "placement_group_table", lambda _group: table)

    return set_up


def test_the_queue_goes_where_most_is_left(cluster: Any) -> None:
    nodes = [("a", "10.0.0.1", 8, True), ("b", "10.0.0.2", 16, True), ("gone", "10.0.0.3", 99, False)]
    cluster(nodes, ["a", "b"])
    assert placement.place_row_queue(configured(2, 4), None) == "node:10.0.0.2"
    cluster([*nodes, ("spare", "10.0.0.4", 13, True)], ["a", "b"])
    assert placement.place_row_queue(configured(2, 4), None) == "node:10.0.0.4"


def test_a_head_without_cpus_is_passed_over(cluster: Any) -> None:
    cluster([("head", "10.0.0.1", 0, True), ("b", "10.0.0.2", 6, True)], ["b"])
    assert placement.place_row_queue(configured(1, 4), None) == "node:10.0.0.2"


@pytest.mark.parametrize(("cpus", "most"), [(4, "0"), (5, "1"), (5.5, "1.5")])
def test_nodes_that_the_roles_fill_are_refused(cluster: Any, cpus: float, most: str) -> None:
    cluster([("a", "10.0.0.1", cpus, True), ("b", "10.0.0.2", 4, True)], ["a", "b"])
    with pytest.raises(ConfigError, match=f"for the row queue; the most is {most}\n"):
        placement.place_row_queue(configured(2, 4), None)


def test_nodes_of_one_address_must_all_have_room(cluster: Any) -> None:
    """As TransferQueue takes any of them."""
    cluster([("a", "10.0.0.1", 5, True), ("b", "10.0.0.1", 64, True)], ["a", "b"])
    with pytest.raises(ConfigError, match="the most is 1\n"):
        placement.place_row_queue(configured(2, 4), None)
    cluster([("a", "10.0.0.1", 6, True), ("b", "10.0.0.1", 64, True)], ["a", "b"])
    assert placement.place_row_queue(configured(2, 4), None) == "node:10.0.0.1"

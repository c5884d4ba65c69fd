"""Where roles and the row queue lie in the Ray cluster: checked against what its nodes have, then reserved."""

from __future__ import annotations

from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from relax_sdk.config import RunConfig, is_chosen
from relax_sdk.errors import ConfigError, RunError
from relax_sdk.runtime.rows import ROW_QUEUE_CPUS

__all__ = ["place_roles", "place_row_queue", "uses_gpus"]

_PLACEMENT_TIMEOUT_S = 120.0


def uses_gpus(config: RunConfig, *, owned: bool) -> bool:
    """Whether roles run on CUDA: when there is any, and then every rank needs a device of its own.

    Args:
        config: the resolved configuration.
        owned: this process started the cluster, and it is this machine alone.

    Raises:
        ConfigError: the cluster has fewer devices than ``--resource`` asks for.
    """
    available = int(ray.cluster_resources().get("GPU", 0))
    if available == 0:
        return False
    if owned and torch.cuda.device_count() == 0:
        return False
    if available < config.actor_world and not is_chosen(config.provenance, "backend.resource"):
        # The user did not ask for these devices: a preset that fits a CPU runs there.
        return False
    if available < config.actor_world:
        raise ConfigError(
            f"{config.actor_world} devices asked for, {available} found",
            where="--resource",
            expected=f'at most {available}, e.g. {{"actor": [1, {available}], "rollout": [1, {available}]}}',
        )
    return True


def place_roles(config: RunConfig, *, use_gpu: bool) -> Any:
    """Reserve the roles' devices: a bundle a node, each on another node.

    Ranks of a node then follow each other, which collectives like.

    Returns:
        The placement group, which the caller removes.

    Raises:
        ConfigError: too few nodes have what a bundle needs.
        RunError: they have it, but somebody else holds it.
    """
    nodes, devices = config.backend.resource["actor"]
    bundle = {"CPU": float(devices)} | ({"GPU": float(devices)} if use_gpu else {})
    fitting = sum(
        all(node["Resources"].get(name, 0) >= count for name, count in bundle.items()) for node in _living_nodes()
    )
    if fitting < nodes:
        raise ConfigError(
            f"{nodes} nodes with {bundle} asked for, {fitting} found",
            where="--resource",
            expected="at most that many nodes, or fewer devices of each",
        )
    group = placement_group([dict(bundle) for _ in range(nodes)], strategy="STRICT_SPREAD")
    ready, _ = ray.wait([group.ready()], timeout=_PLACEMENT_TIMEOUT_S)
    if not ready:
        remove_placement_group(group)
        raise RunError(
            f"Ray found no {nodes} node{'s' * (nodes > 1)} with {bundle} free, within {_PLACEMENT_TIMEOUT_S:.0f} s",
            where="--resource",
            expected=f"free resources; the whole cluster has {ray.available_resources()}",
        )
    return group


def place_row_queue(config: RunConfig, group: Any) -> str:
    """The Ray resource of a node that has CPUs for the row queue beside the roles'.

    TransferQueue fixes its storage to one node and lets Ray choose for its controller; where that node has room for
    both, both are placed whatever Ray chooses.

    Raises:
        ConfigError: no node has that room, as far as the run's own roles go.
    """
    taken = dict.fromkeys(
        placement_group_table(group)["bundles_to_node_id"].values(), config.backend.resource["actor"][1]
    )
    free: dict[str, float] = {}
    for node in _living_nodes():
        # Nodes may share an address, where somebody tries several on one machine: then each must do.
        name = f"node:{node['NodeManagerAddress']}"
        left = node["Resources"].get("CPU", 0) - taken.get(node["NodeID"], 0)
        free[name] = min(left, free.get(name, left))
    best = max(free, key=lambda name: free[name])
    if free[best] < ROW_QUEUE_CPUS:
        raise ConfigError(
            f"no node of the Ray cluster has {ROW_QUEUE_CPUS} CPUs beside the roles', for the row queue; "
            f"the most is {free[best]:g}",
            where="--resource",
            expected=f"a node with {ROW_QUEUE_CPUS} CPUs more, as `ray start --num-cpus` counts them, or fewer devices",
        )
    return best


def _living_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]

"""Under which address the processes of a node are reached."""

from __future__ import annotations

import ray

from vime.platform.sockets import LOOPBACK

__all__ = ["node_address"]


def node_address() -> str:
    """Of the node on which this runs, for all other processes of the cluster; loopback where there is one node only.

    It is the address that the node has in Ray: of ``ray start --node-ip-address``, if that was given.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    if len(alive) == 1:
        return LOOPBACK
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in alive if node["NodeID"] == here)

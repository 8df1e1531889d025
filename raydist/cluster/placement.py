"""Wait until Ray has placed a request, log the reason of the wait, and detect requests that can never be placed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import ray
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.core.generated import autoscaler_pb2

from raydist.cluster.resource_check import why_never
from raydist.compat.ray_internals import DEBUG_AUTOSCALING_STATUS, free_resources, gcs_client
from raydist.core.errors import FailedPreconditionError

_SETTLE_S = 2.0  # requests that fit are placed by then; starting nodes have joined
_LOOK_S = 1.0
_REPORT_S = 15.0  # a running autoscaler reports every 5 s
_STATUS_S = 5.0
_NEW_S = 10.0  # for a new cluster, whose first report is empty
_WATCHED_TYPE = "node_"  # prefix of all node types if Ray's monitor does not add nodes

_log = logging.getLogger("raydist")


@final
@dataclass(frozen=True, slots=True)
class Request:
    """A request for resources of the cluster.

    Attributes:
        bundles: Resources of each bundle.
        strategy: Ray's placement strategy.
        key: The autoscaler's name of the request: the id of a placement group; empty for a single actor.
        what: Purpose of the bundles, in the plural: "replicas".
    """

    bundles: tuple[Mapping[str, float], ...]
    strategy: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{describe_amounts(self.bundles)}{' on one node' if self.strategy == 'STRICT_PACK' else ''}"


@final
@dataclass(frozen=True, slots=True)
class Outlook:
    """Expected growth of the cluster.

    Attributes:
        grows: True if an autoscaler adds nodes; None if that is unknown.
        refused: Keys of requests for which the autoscaler cannot add nodes at present.
        refused_shapes: Resources of single actors for which the autoscaler cannot add nodes at present.
        starting: Number of nodes that are being added, by type.
        failed: Reasons why nodes could not be added.
    """

    grows: bool | None
    refused: tuple[str, ...] = ()
    refused_shapes: tuple[Mapping[str, float], ...] = ()
    starting: Mapping[str, int] | None = None
    failed: tuple[str, ...] = ()

    def refuses(self, request: Request) -> bool:
        if request.key:
            return request.key in self.refused
        return dict(request.bundles[0]) in [dict(shape) for shape in self.refused_shapes]

    def __str__(self) -> str:
        if self.grows is False:
            return "No autoscaler adds nodes to this cluster."
        starting = ", ".join(f"{count} x {kind}" for kind, count in (self.starting or {}).items())
        parts = [f"The autoscaler adds {starting}." if starting else "", *self.failed]
        return " ".join(part for part in parts if part) or "An autoscaler may add nodes."


def describe_amounts(bundles: Sequence[Mapping[str, float]]) -> str:
    """Return the number of bundles of each kind, as text.

    >>> describe_amounts([{"CPU": 1.0}, {"CPU": 1.0}, {"GPU": 1.0}])
    "2 x {'CPU': 1.0}, 1 x {'GPU': 1.0}"
    """
    kinds = [tuple(sorted(bundle.items())) for bundle in bundles]
    return ", ".join(f"{kinds.count(kind)} x {dict(kind)}" for kind in sorted(set(kinds)))


def await_placed(
    request: Request,
    wait: Callable[[float], bool],
    *,
    timeout_s: float,
    grows: bool | None = None,
    require_room: Callable[[Request], None] = lambda _: None,
) -> bool:
    """Wait for a request; return True once it is placed, False after `timeout_s` seconds. Logs the wait once.

    Args:
        request: The request.
        wait: Waits up to so many seconds for the request; returns True once it is placed.
        timeout_s: Longest wait in seconds.
        grows: True if nodes may be added, False if not, None to ask the autoscaler.
        require_room: Raises if waiting cannot help on the present nodes.

    Raises:
        FailedPreconditionError: Neither the present nodes nor those that the autoscaler may add can hold the request.
    """
    began = time.monotonic()
    if wait(min(_SETTLE_S, timeout_s)):
        return True
    if timeout_s <= _SETTLE_S:
        return False  # too soon to know more
    told = False
    while (left := timeout_s - (time.monotonic() - began)) > 0:
        outlook = look() if grows is None else Outlook(grows)
        if outlook.grows is None and time.monotonic() - began > _REPORT_S:
            outlook = Outlook(grows=False)
        require_feasible(request, outlook)
        if outlook.grows is False:
            require_room(request)
        if not told:
            told = True
            _log.warning(
                "Waiting for the cluster to place %s (%s), at most %g s. %s", request.what, request, timeout_s, outlook
            )
        if wait(min(_LOOK_S, left)):
            return True
    return False


def require_feasible(request: Request, outlook: Outlook) -> None:
    """Raise FailedPreconditionError if the cluster can never hold the request.

    An autoscaler reports only what it could add now: more may fit once other programs release nodes.
    """
    if outlook.grows is None or (outlook.grows and not outlook.refuses(request)):
        return
    nodes = [node for node in ray.nodes() if node["Alive"]]
    reason = why_never(request.bundles, [node["Resources"] for node in nodes], request.strategy)
    if reason is None or (outlook.grows and _others_use(request, nodes)):
        return
    added = ", and no node that its autoscaler may add would change that" if outlook.grows else ""
    raise FailedPreconditionError(
        f"The cluster can never hold {len(request.bundles)} {request.what}. Asked: {request}; but {reason}{added}. "
        f"There is: {_describe_nodes(request, nodes)}. Ask for fewer or less (resources_per_replica, "
        "resources_per_server, resources_per_input_worker), or give the cluster nodes that can hold it before you "
        "start."
    )


def look() -> Outlook:
    """Return what Ray's autoscaler (either version) reports; an unknown outlook if it does not answer."""
    client, messages = gcs_client(), cast("Any", autoscaler_pb2)  # generated code without types
    reply = messages.GetClusterStatusReply()
    try:
        reply.ParseFromString(client.get_cluster_status(timeout_s=_STATUS_S))
        if reply.autoscaling_state.autoscaler_state_version > 0:
            return _outlook_of(reply.autoscaling_state)
        report = client.internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode(), None, timeout=_STATUS_S)
    except Exception as error:  # Ray has no stable interface for this
        _log.debug("The autoscaler cannot be asked: %s", error)
        return Outlook(grows=None)
    return _outlook_of_report(report)


def may_grow() -> bool:
    """Return True if the cluster of this process has an autoscaler, so that nodes may be added.

    Blocks for some seconds if the cluster has just started and reports nothing yet.
    """
    deadline = time.monotonic() + _NEW_S
    while (grows := look().grows) is None and _is_watched() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return is_autoscaler_v2(fetch_from_server=True) if grows is None else grows


def _is_watched() -> bool:
    """Return True if the cluster has a monitor, which will report."""
    report = gcs_client().internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode(), None)
    return bool(json.loads(report or b"{}"))


def _outlook_of(state: Any) -> Outlook:
    starting: dict[str, int] = {}
    for request in state.pending_instance_requests:
        starting[request.ray_node_type_name] = starting.get(request.ray_node_type_name, 0) + request.count
    for instance in state.pending_instances:
        starting[instance.ray_node_type_name] = starting.get(instance.ray_node_type_name, 0) + 1
    failed = {f"It could not add {one.ray_node_type_name}: {one.reason}" for one in state.failed_instance_requests}
    return Outlook(
        grows=True,
        refused=tuple(gang.details.partition(":")[0] for gang in state.infeasible_gang_resource_requests),
        refused_shapes=tuple(dict(one.resources_bundle) for one in state.infeasible_resource_requests),
        starting=starting,
        failed=tuple(sorted(failed)),
    )


def _outlook_of_report(report: bytes | None) -> Outlook:
    """Parse a report of autoscaler version 1. Without an autoscaler each node is a node type of its own."""
    summary = json.loads(report).get("autoscaler_report") if report else None
    if not summary:
        return Outlook(grows=None)
    types = [*summary.get("active_nodes", {}), *(summary.get("idle_nodes") or {})]
    if all(name.startswith(_WATCHED_TYPE) for name in types):
        return Outlook(grows=False if types else None)
    return Outlook(grows=True, starting=dict(summary.get("pending_launches", {})))


def _others_use(request: Request, nodes: Sequence[Mapping[str, Any]]) -> bool:
    free = free_resources()
    names = {name for bundle in request.bundles for name in bundle}
    return any(
        free.get(node["NodeID"], {}).get(name, 0.0) < node["Resources"].get(name, 0.0)
        for node in nodes
        for name in names
    )


def _describe_nodes(request: Request, nodes: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys([*(name for bundle in request.bundles for name in bundle), "CPU"])
    return "; ".join(
        f"node {node['NodeManagerAddress']}: "
        + ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in names)
        for node in nodes
    )

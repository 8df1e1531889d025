"""Find the TPU hosts of a cluster, and reserve a slice."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any, final

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.tpu import SlicePlacementGroup, slice_placement_group

from raydist.compat.ray_internals import free_resources, global_state
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError
from raydist.tpu_slices.inventory import SliceShape, TpuHost, count_whole, describe_slices, labels_of_single_host

_CPUS = 1.0  # per host, for the replicas' actor
_JOIN_S = 5.0  # hosts that start together join within this time
_LOOK_S = 0.2


def tpu_hosts() -> tuple[TpuHost, ...]:
    """Return the living nodes of the cluster that have TPU chips."""
    free = free_resources()
    return tuple(
        TpuHost(
            address=node["NodeManagerAddress"],
            chips=int(node["Resources"]["TPU"]),
            free_chips=free.get(node["NodeID"], {}).get("TPU", 0),
            slice_name=node["Labels"].get("ray.io/tpu-slice-name", ""),
            pod_type=node["Labels"].get("ray.io/tpu-pod-type", ""),
            topology=node["Labels"].get("ray.io/tpu-topology", ""),
        )
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("TPU")
    )


def cluster_adds_tpus() -> bool:
    """Return True if the cluster autoscales and may add TPU hosts."""
    largest = global_state().get_max_resources_from_cluster_config() or {}
    return bool(largest.get("TPU"))


def place_slice(shape: SliceShape, *, name: str, timeout_s: float) -> PlacementGroup:
    """Reserve all hosts of one slice: one bundle per host, with all chips of the host.

    Blocks until a slice is free, at most `timeout_s` seconds.

    Args:
        shape: Shape of the slice.
        name: Name of the reservation, shown in the errors of other programs that wait for the slice.
        timeout_s: Limit in seconds.

    Raises:
        FailedPreconditionError: Hosts of the slice are missing, and the cluster adds none.
        DeadlineExceededError: No slice was free in time; the message lists the slices and their holders.
    """
    deadline = time.monotonic() + timeout_s
    _require_whole(shape, min(deadline, time.monotonic() + _JOIN_S))
    request = _Request(shape, name, timeout_s).start()
    if not request.wait(timeout_s) or request.error is not None:
        request.abandon()
        raise _late(shape, name, timeout_s) from request.error
    granted = request.granted
    group: PlacementGroup = granted.placement_group
    if not group.wait(max(deadline - time.monotonic(), 0.1)):
        granted.shutdown()
        raise _late(shape, name, timeout_s)
    # All chips are reserved now. Until here the head reservation kept others from taking the same slice.
    granted.release_head_pgs()
    return group


def _require_whole(shape: SliceShape, deadline: float) -> None:
    while not count_whole(hosts := tpu_hosts(), shape) and not cluster_adds_tpus():
        if time.monotonic() >= deadline:
            raise FailedPreconditionError(
                f"All hosts of a {shape} must be nodes of the cluster, and nothing adds nodes to it. There is: "
                f"{describe_slices(hosts)}. Start Ray on the hosts that are missing (ray start --address=...), or name "
                "another topology."
            )
        time.sleep(_LOOK_S)


@final
class _Request:
    """A request to Ray for a slice, made in a thread because Ray's call waits for a task without a limit."""

    def __init__(self, shape: SliceShape, name: str, timeout_s: float) -> None:
        self.error: BaseException | None = None
        self._shape, self._name, self._timeout_s = shape, name, timeout_s
        self._granted: SlicePlacementGroup | None = None
        self._abandoned = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._ask, name="raydist-tpu-slice", daemon=True)

    def start(self) -> _Request:
        self._thread.start()
        return self

    @property
    def granted(self) -> Any:
        return self._granted

    def wait(self, timeout_s: float) -> bool:
        """Return True if Ray answers within the limit. Blocks."""
        self._thread.join(timeout_s + 1.0)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Release the slice, also if Ray grants it later."""
        with self._lock:
            self._abandoned = True
            if self._granted is not None:
                self._granted.shutdown()

    def _ask(self) -> None:
        try:
            labels = labels_of_single_host(tpu_hosts(), self._shape)
            granted = slice_placement_group(
                self._shape.topology,
                self._shape.version,
                resources_per_bundle={"CPU": _CPUS, "TPU": self._shape.chips_per_host},
                strategy="STRICT_SPREAD",
                name=self._name,
                chips_per_vm=self._shape.chips_per_host,
                head_reservation_timeout_s=self._timeout_s,
                bundle_label_selector=[labels] if labels else None,
            )
        except Exception as error:  # raised as the cause of the deadline error
            self.error = error
            return
        with self._lock:
            self._granted = granted
            if self._abandoned:
                granted.shutdown()


def _late(shape: SliceShape, name: str, timeout_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"A {shape} must be free for {name} within {timeout_s:g} s (Timeouts.start_s), and none was. There is: "
        f"{describe_slices(tpu_hosts())}. {_holders(name)} Close what uses the slice, start Ray on hosts that are "
        "missing, or raise Timeouts.start_s where the cluster grows itself."
    )


def _holders(name: str) -> str:
    """Return a sentence about the placement groups that have reserved TPUs."""
    tables: Sequence[Any] = ()
    with contextlib.suppress(Exception):  # the message is not worth another error
        tables = placement_group_table().values()
    held = [
        f"{table['name'] or table['placement_group_id']} ({len(table['bundles'])} bundles)"
        for table in tables
        if table["state"] == "CREATED" and table["name"] != name and _has_tpus(table["bundles"].values())
    ]
    return f"TPUs are reserved by {', '.join(held)}." if held else "No placement group has reserved TPUs."


def _has_tpus(bundles: Sequence[Any]) -> bool:
    return any(bundle.get("TPU") for bundle in bundles)

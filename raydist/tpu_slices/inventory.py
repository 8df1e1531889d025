"""The TPU slices that a cluster's hosts form, and the choice of one. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.core.errors import InvalidArgumentError
from raydist.tpu_slices.shape import SliceShape, parse_version


@final
@dataclass(frozen=True, slots=True)
class TpuHost:
    """One machine with TPU chips, as Ray reports it.

    Attributes:
        address: Address of the machine.
        chips: Number of TPU chips.
        free_chips: Number of chips that are not reserved.
        slice_name: Name of the machine's slice; empty if Ray's labels do not have it.
        pod_type: Pod type of the slice ("v4-16"), or empty.
        topology: Topology of the slice ("2x2x2"), or empty.
    """

    address: str
    chips: int
    free_chips: float
    slice_name: str = ""
    pod_type: str = ""
    topology: str = ""

    @property
    def version(self) -> str | None:
        """The version of the host's chips; None if Ray's labels do not have it."""
        return parse_version(self.pod_type.split("-")[0]) if self.pod_type else None


def choose_shape(
    hosts: Sequence[TpuHost], topology: str | None, version: str | None, *, may_grow: bool = False
) -> SliceShape:
    """Return the shape of the slice to reserve, from the requested names and the hosts of the cluster.

    Args:
        hosts: The TPU hosts of the cluster.
        topology: Requested topology; None to use the topology of the hosts.
        version: Requested chip version; None to use the version of the hosts.
        may_grow: True if the cluster adds TPU hosts on demand.

    Raises:
        InvalidArgumentError: No such slice exists, or the names fit more than one kind of slice.

    >>> hosts = [TpuHost("10.0.0.1", 4, 4, "a", "v4-16", "2x2x2"), TpuHost("10.0.0.2", 4, 4, "a", "v4-16", "2x2x2")]
    >>> str(choose_shape(hosts, None, None))
    'v4 slice 2x2x2 (2 hosts of 4 chips)'
    """
    if may_grow and topology and version:
        fitting = [host for host in hosts if _fits(host, topology, version)]
        return SliceShape.of(version, topology, fitting[0].chips if fitting else None)
    if not hosts:
        raise InvalidArgumentError(
            "TPUStrategy needs nodes with TPU chips, and the cluster has none. Start Ray on the hosts of a slice (ray "
            "start --address=...; it finds their chips), or use rd.MirroredStrategy for GPUs and CPUs. In a cluster "
            "that grows by itself, name topology and accelerator_version."
        )
    fitting = [host for host in hosts if _fits(host, topology, version)]
    kinds = {(host.version or version, host.topology or topology, host.chips) for host in fitting}
    known = {kind for kind in kinds if kind[0] and kind[1]}
    if len(kinds) == len(known) == 1:
        found_version, found_topology, chips = next(iter(known))
        return SliceShape.of(str(found_version), str(found_topology), chips)
    wanted = " ".join(filter(None, (version, topology))) or "any slice"
    raise InvalidArgumentError(
        f"topology and accelerator_version must name one kind of slice, but {wanted} is "
        f"{f'{len(kinds)} kinds' if fitting else 'none'} of those in the cluster: {describe_slices(hosts)}."
    )


def _fits(host: TpuHost, topology: str | None, version: str | None) -> bool:
    """Return True if a host's labels do not contradict the topology and version; missing labels fit everything."""
    return (not host.topology or topology in (None, host.topology)) and (
        not host.version or version in (None, host.version)
    )


def count_whole(hosts: Sequence[TpuHost], shape: SliceShape) -> int:
    """Return the number of slices of this shape whose hosts are all in the cluster, free or not.

    >>> hosts = [TpuHost("10.0.0.1", 4, 4, "a", "v4-16", "2x2x2"), TpuHost("10.0.0.2", 4, 4, "a", "v4-16", "2x2x2")]
    >>> count_whole(hosts, SliceShape.of("v4", "2x2x2")), count_whole(hosts[:1], SliceShape.of("v4", "2x2x2"))
    (1, 0)
    """
    fitting = _hosts_of(hosts, shape)
    if shape.num_hosts == 1:
        return len(fitting)
    sizes = Counter(host.slice_name for host in fitting if host.slice_name)
    return sum(size >= shape.num_hosts for size in sizes.values())


def labels_of_single_host(hosts: Sequence[TpuHost], shape: SliceShape) -> dict[str, str]:
    """Return labels by which Ray finds a slice of one host; by chips alone, Ray may take a host of another slice.

    Empty for slices of several hosts, which Ray finds by slice name, and for hosts without labels.

    >>> hosts = [TpuHost("10.0.0.1", 4, 4, "a", "v4-16", "2x2x2"), TpuHost("10.0.0.3", 4, 4, "b", "v5litepod-4", "2x2")]
    >>> labels_of_single_host(hosts, SliceShape.of("v5litepod", "2x2", 4))
    {'ray.io/tpu-pod-type': 'v5litepod-4', 'ray.io/tpu-topology': '2x2'}
    >>> labels_of_single_host(hosts, SliceShape.of("v4", "2x2x2"))
    {}
    """
    kinds = {(host.pod_type, host.topology) for host in _hosts_of(hosts, shape) if host.pod_type and host.topology}
    if shape.num_hosts > 1 or not kinds:
        return {}
    pod_type, topology = min(kinds)
    return {"ray.io/tpu-pod-type": pod_type, "ray.io/tpu-topology": topology}


def _hosts_of(hosts: Sequence[TpuHost], shape: SliceShape) -> list[TpuHost]:
    return [host for host in hosts if _fits(host, shape.topology, shape.version) and host.chips == shape.chips_per_host]


def describe_slices(hosts: Sequence[TpuHost]) -> str:
    """Return a text of all slices with their hosts, for messages.

    >>> describe_slices([TpuHost("10.0.0.1", 4, 0, "a", "v4-8", "2x2x1")])
    "slice 'a' (v4-8, 2x2x1): host 10.0.0.1 with 0 of 4 chips free"
    >>> describe_slices([])
    'no TPU host at all'
    """
    slices: dict[tuple[str, str, str], list[TpuHost]] = {}
    for host in hosts:
        slices.setdefault((host.slice_name, host.pod_type, host.topology), []).append(host)
    said = []
    for (name, pod_type, topology), members in slices.items():
        kind = f" ({pod_type or 'no pod type'}, {topology or 'no topology'})"
        listed = ", ".join(
            f"host {host.address} with {host.free_chips:g} of {host.chips} chips free" for host in members
        )
        said.append(f"slice {name!r}{kind}: {listed}" if name else f"a host without a slice's name{kind}: {listed}")
    return "; ".join(said) or "no TPU host at all"

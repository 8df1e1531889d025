"""Pure functions that find the TPU slices of a cluster and choose the shape of the slice to reserve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ray.util.tpu import get_tpu_version_from_type, get_tpu_worker_resources

from raydist.compat.ray_internals import VALID_TPU_TOPOLOGY
from raydist.core.errors import InvalidArgumentError

# Versions with two PJRT devices per chip. All others have one (torch_xla/_internal/tpu.py: num_logical_cores_per_chip).
_TWO_DEVICES_PER_CHIP = ("v2", "v3", "v7x")
_CORES_PER_CHIP = {"v5litepod": 1, "v6e": 1}  # pod types of other versions count two cores per chip


@final
@dataclass(frozen=True, slots=True)
class SliceShape:
    """The shape of a slice.

    Attributes:
        version: Version of the chips: "v4", "v5litepod", ...
        topology: Number of chips in each dimension: "2x2x2".
        num_hosts: Number of machines.
        chips_per_host: Number of chips on each machine.
    """

    version: str
    topology: str
    num_hosts: int
    chips_per_host: int

    @staticmethod
    def of(version: str, topology: str, chips_per_host: int | None = None) -> SliceShape:
        """Return the shape of a slice. :func:`check_names` must have accepted both names.

        Args:
            version: Version of the chips.
            topology: Topology of the slice.
            chips_per_host: Number of chips per host; None for the usual number.

        Raises:
            InvalidArgumentError: The chips of the topology do not fill a whole number of such hosts.

        >>> SliceShape.of("v4", "2x2x2")
        SliceShape(version='v4', topology='2x2x2', num_hosts=2, chips_per_host=4)
        >>> SliceShape.of("v6e", "2x4").num_hosts, SliceShape.of("v6e", "2x4", chips_per_host=4).num_hosts
        (1, 2)
        """
        chips = num_chips(topology)
        if chips_per_host is not None and (chips_per_host > chips or chips % chips_per_host):
            raise InvalidArgumentError(
                f"The {chips} chips of topology {topology!r} must fill whole hosts, but each TPU host of the cluster "
                f"has {chips_per_host} chips. Pass the topology of the slice that the hosts form."
            )
        num_hosts, resources = get_tpu_worker_resources(
            topology, version, chips_per_vm=chips_per_host, tpu_resource_per_chip=1
        )
        return SliceShape(version, topology, num_hosts, int(resources["TPU"]))

    @property
    def devices_per_host(self) -> int:
        """The number of torch_xla devices on each host; each runs one replica."""
        return self.chips_per_host * (2 if self.version in _TWO_DEVICES_PER_CHIP else 1)

    @property
    def pod_type(self) -> str:
        """The pod type of the slice in Ray's labels.

        >>> SliceShape.of("v4", "2x2x2").pod_type, SliceShape.of("v5litepod", "4x4").pod_type
        ('v4-16', 'v5litepod-16')
        """
        return f"{self.version}-{num_chips(self.topology) * _CORES_PER_CHIP.get(self.version, 2)}"

    def __str__(self) -> str:
        hosts = "host" if self.num_hosts == 1 else "hosts"
        return f"{self.version} slice {self.topology} ({self.num_hosts} {hosts} of {self.chips_per_host} chips)"


def num_chips(topology: str) -> int:
    """Return the number of chips of a topology.

    >>> num_chips("2x2x4")
    16
    """
    product = 1
    for length in topology.split("x"):
        product *= int(length)
    return product


def parse_version(accelerator_version: str) -> str:
    """Return a chip version in Ray's notation.

    Raises:
        InvalidArgumentError: No chip version has this name.

    >>> parse_version("TPU-V6E"), parse_version("v4")
    ('v6e', 'v4')
    """
    try:
        version: str = get_tpu_version_from_type(accelerator_version.strip())
    except (ValueError, AttributeError) as error:
        known = ", ".join(VALID_TPU_TOPOLOGY)
        raise InvalidArgumentError(
            f"accelerator_version must be one of {known}, got {accelerator_version!r}."
        ) from error
    return version


def check_names(topology: str | None, accelerator_version: str | None) -> tuple[str | None, str | None]:
    """Return topology and version in Ray's notation; None stays None.

    Raises:
        InvalidArgumentError: The version does not exist, or no such version has this topology.

    >>> check_names("2x2x2", "TPU-V4"), check_names("4X4", None)
    (('2x2x2', 'v4'), ('4x4', None))
    """
    version = None if accelerator_version is None else parse_version(accelerator_version)
    if topology is None:
        return None, version
    wanted = str(topology).strip().lower()
    kinds = {name: shapes for name, shapes in VALID_TPU_TOPOLOGY.items() if version in (None, name)}
    if not any(wanted in shapes for shapes in kinds.values()):
        known = sorted(set().union(*kinds.values()), key=num_chips)
        raise InvalidArgumentError(
            f"topology must be one of {', '.join(known)}{f' ({version})' if version else ''}, got {topology!r}."
        )
    return wanted, version


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
            "that adds nodes on demand, pass topology and accelerator_version."
        )
    fitting = [host for host in hosts if _fits(host, topology, version)]
    kinds = {(host.version or version, host.topology or topology, host.chips) for host in fitting}
    known = {kind for kind in kinds if kind[0] and kind[1]}
    if len(kinds) == len(known) == 1:
        found_version, found_topology, chips = next(iter(known))
        return SliceShape.of(str(found_version), str(found_topology), chips)
    wanted = " ".join(filter(None, (version, topology))) or "any slice"
    raise InvalidArgumentError(
        f"topology and accelerator_version must name one kind of slice, but {wanted} matches "
        f"{len(kinds) or 'no'} kinds of slices in the cluster: {describe_slices(hosts)}."
    )


def _fits(host: TpuHost, topology: str | None, version: str | None) -> bool:
    """Return True if the labels of a host match the topology and version. A missing label matches everything."""
    return (not host.topology or topology in (None, host.topology)) and (
        not host.version or version in (None, host.version)
    )


def count_whole(hosts: Sequence[TpuHost], shape: SliceShape) -> int:
    """Return the number of complete slices of this shape: all their hosts are in the cluster, free or reserved.

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
    """Return the node labels that select a slice of one host in Ray.

    If Ray selected by the number of chips alone, it could reserve a host of another kind of slice. The result is empty
    for slices of several hosts, which Ray selects by slice name, and for hosts without labels.

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
    """Return a description of all slices and their hosts, for error messages.

    >>> describe_slices([TpuHost("10.0.0.1", 4, 0, "a", "v4-8", "2x2x1")])
    "slice 'a' (v4-8, 2x2x1): host 10.0.0.1 with 0 of 4 chips free"
    >>> describe_slices([])
    'no TPU host at all'
    """
    slices: dict[tuple[str, str, str], list[TpuHost]] = {}
    for host in hosts:
        slices.setdefault((host.slice_name, host.pod_type, host.topology), []).append(host)
    texts = []
    for (name, pod_type, topology), members in slices.items():
        kind = f" ({pod_type or 'no pod type'}, {topology or 'no topology'})"
        listed = ", ".join(
            f"host {host.address} with {host.free_chips:g} of {host.chips} chips free" for host in members
        )
        texts.append(f"slice {name!r}{kind}: {listed}" if name else f"a host without a slice name{kind}: {listed}")
    return "; ".join(texts) or "no TPU host at all"

"""The hosts and chips of a TPU slice, from the topology and the chip version. Needs no cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ray.util.tpu import get_tpu_version_from_type, get_tpu_worker_resources

from raydist.compat.ray_internals import VALID_TPU_TOPOLOGY
from raydist.core.errors import InvalidArgumentError

# Versions with two PJRT devices per chip, others have one (torch_xla/_internal/tpu.py: num_logical_cores_per_chip).
_TWO_DEVICES = ("v2", "v3", "v7x")
_CORES_A_CHIP = {"v5litepod": 1, "v6e": 1}  # pod types of other versions count two cores per chip


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
        """Return the shape of a slice with valid names (see :func:`check_names`).

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
                f"The {chips} chips of topology {topology!r} must be those of whole hosts, but each TPU host here has "
                f"{chips_per_host}. Name the topology of the slice that the hosts form."
            )
        num_hosts, resources = get_tpu_worker_resources(
            topology, version, chips_per_vm=chips_per_host, tpu_resource_per_chip=1
        )
        return SliceShape(version, topology, num_hosts, int(resources["TPU"]))

    @property
    def devices_per_host(self) -> int:
        """The number of torch_xla devices on each host; each runs one replica."""
        return self.chips_per_host * (2 if self.version in _TWO_DEVICES else 1)

    @property
    def pod_type(self) -> str:
        """The pod type of the slice in Ray's labels.

        >>> SliceShape.of("v4", "2x2x2").pod_type, SliceShape.of("v5litepod", "4x4").pod_type
        ('v4-16', 'v5litepod-16')
        """
        return f"{self.version}-{num_chips(self.topology) * _CORES_A_CHIP.get(self.version, 2)}"

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
    """Return topology and version in Ray's notation, None where not given.

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

"""TensorFlow's cross-device operations of one node: descriptions that a strategy converts into options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.collectives.delegating import RootReduction
from raydist.context.devices import Device, parse_device
from raydist.core.errors import InvalidArgumentError
from raydist.options import CommunicationOptions


class CrossDeviceOps(ABC):
    """Base class: the way in which the replicas of a `MirroredStrategy` reduce gradients and values.

    Source: tf.distribute.CrossDeviceOps.

    >>> isinstance(rd.NcclAllReduce(), rd.CrossDeviceOps)
    True
    """

    @property
    @abstractmethod
    def communication_options(self) -> CommunicationOptions:
        """The communication options of this reduction.

        >>> rd.NcclAllReduce().communication_options.implementation
        'nccl'
        """


@final
@dataclass(frozen=True, slots=True)
class NcclAllReduce(CrossDeviceOps):
    """All-reduce by NCCL: for GPUs, where it is also the default; an error elsewhere.

    Attributes:
        num_packs: Checked, without other effect: gradients are reduced in buckets of
            `CommunicationOptions.bytes_per_pack`, the first of them while backward still runs.

    Raises:
        InvalidArgumentError: num_packs is negative.

    Source: tf.distribute.NcclAllReduce.

    >>> rd.NcclAllReduce(num_packs=2)
    NcclAllReduce(num_packs=2)
    """

    num_packs: int = 1

    def __post_init__(self) -> None:
        _check_packs(self.num_packs)

    @property
    def communication_options(self) -> CommunicationOptions:
        return CommunicationOptions(implementation="nccl")


@final
@dataclass(frozen=True, slots=True)
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Hierarchical all-reduce: through shared memory within a host, over the network between hosts. For CPUs.

    On one host it uses shared memory only. Between GPUs use `NcclAllReduce` or the default.

    Attributes:
        num_packs: See `NcclAllReduce`.

    Raises:
        InvalidArgumentError: num_packs is negative.

    Source: tf.distribute.HierarchicalCopyAllReduce.

    >>> rd.HierarchicalCopyAllReduce().communication_options.implementation
    'hierarchical'
    """

    num_packs: int = 1

    def __post_init__(self) -> None:
        _check_packs(self.num_packs)

    @property
    def communication_options(self) -> CommunicationOptions:
        return CommunicationOptions(implementation="hierarchical")


@final
@dataclass(frozen=True, slots=True)
class ReductionToOneDevice(CrossDeviceOps):
    """One replica adds up the values of all replicas in rank order, and broadcasts the result.

    Slower than the other operations, and simple: each sum is computed in one place and one order, with any transport.
    Gradients are not exchanged during backward.

    Attributes:
        reduce_to_device: The device of the reducing replica, one of the strategy's; None for the first.
        accumulation_fn: Called on that replica with a list of tensors, one per replica in rank order; returns their
            sum, a tensor like each of them (metadata travels with the gradients, so other shapes or dtypes fail). None
            adds one after the other. A MEAN uses the function, too; MIN, MAX and PRODUCT do not. The function is sent
            to the replicas, so it must be picklable.

    Raises:
        InvalidArgumentError: reduce_to_device is no device, or accumulation_fn cannot be called.

    Source: tf.distribute.ReductionToOneDevice.

    >>> rd.ReductionToOneDevice("CPU:1").communication_options.implementation
    'auto'
    """

    reduce_to_device: Any = None
    accumulation_fn: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.reduce_to_device is not None:
            parse_device(self.reduce_to_device)
        if self.accumulation_fn is not None and not callable(self.accumulation_fn):
            raise InvalidArgumentError(
                f"accumulation_fn must be a function of a list of tensors, or None, got {self.accumulation_fn!r}."
            )

    @property
    def communication_options(self) -> CommunicationOptions:
        return CommunicationOptions()


def options_of(cross_device_ops: Any, given: CommunicationOptions | None) -> CommunicationOptions | None:
    """Return the communication options of a strategy that was given both arguments.

    Raises:
        InvalidArgumentError: `cross_device_ops` is not a CrossDeviceOps, or the implementations differ.
    """
    if cross_device_ops is None:
        return given
    if not isinstance(cross_device_ops, CrossDeviceOps):
        raise InvalidArgumentError(
            "cross_device_ops must be rd.NcclAllReduce(), rd.HierarchicalCopyAllReduce(), rd.ReductionToOneDevice() or "
            f"None, got {cross_device_ops!r}. Make one of them, or leave it out."
        )
    asked = cross_device_ops.communication_options
    if given is None:
        return asked
    if "auto" not in (asked.implementation, given.implementation) and asked.implementation != given.implementation:
        raise InvalidArgumentError(
            f"cross_device_ops and communication_options must not ask for different implementations, got "
            f"{cross_device_ops!r} ({asked.implementation!r}) and {given.implementation!r}. Give one of them."
        )
    return given.merged(asked)


def accumulation_of(cross_device_ops: CrossDeviceOps | None, devices: Sequence[Device]) -> RootReduction | None:
    """Return the reducing replica and its function; None if all replicas take part in the reduction.

    Raises:
        InvalidArgumentError: No replica is on the requested device.
    """
    if not isinstance(cross_device_ops, ReductionToOneDevice):
        return None
    function = cross_device_ops.accumulation_fn
    if cross_device_ops.reduce_to_device is None:
        return RootReduction(0, function)
    wanted = parse_device(cross_device_ops.reduce_to_device)
    if wanted not in devices:
        raise InvalidArgumentError(
            f"reduce_to_device must be one of the strategy's devices, {', '.join(map(str, devices))}, got {wanted}. "
            "Name one of them, or None for the first."
        )
    return RootReduction(list(devices).index(wanted), function)


def _check_packs(num_packs: int) -> None:
    if not isinstance(num_packs, int) or isinstance(num_packs, bool) or num_packs < 0:
        raise InvalidArgumentError(f"num_packs must be a number of packs >= 0, got {num_packs!r}. Leave it out.")

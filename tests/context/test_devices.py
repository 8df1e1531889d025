from __future__ import annotations

import pytest
import torch

from raydist.context.devices import Device, parse_device, parse_devices
from raydist.core.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("cpu", Device("CPU", 0)),
        ("CPU:1", Device("CPU", 1)),
        ("GPU:0", Device("GPU", 0)),
        ("cuda:1", Device("GPU", 1)),
        ("/device:GPU:2", Device("GPU", 2)),
        (torch.device("cuda", 3), Device("GPU", 3)),
        (torch.device("cpu"), Device("CPU", 0)),
    ],
)
def test_names(name: object, device: Device) -> None:
    assert parse_device(name) == device
    assert torch.device(device.torch_name).type == {"CPU": "cpu", "GPU": "cuda"}[device.kind]


def test_a_count_takes_gpus_where_there_are_some() -> None:
    assert parse_devices(2, gpus_on_node=4) == (Device("GPU", 0), Device("GPU", 1))
    assert parse_devices(2, gpus_on_node=0) == (Device("CPU", 0), Device("CPU", 1))


@pytest.mark.parametrize("bad", ["tpu:0", "cpu:x", "", None, 1.5])
def test_unknown_name(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r'must be named like "cpu".*got '):
        parse_device(bad)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, r"must be >= 1, got 0"),
        ([], "at least one device"),
        (["cpu", "CPU:0"], r"must differ, got CPU:0, CPU:0"),
        (["cpu", "cuda:0"], r"one kind, got CPU:0, GPU:0"),
        (["cpu", "npu:0"], r"got 'npu:0'"),
    ],
)
def test_bad_lists(devices: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_devices(devices, gpus_on_node=0)


def test_devices_named_twice_are_told_how_cpu_replicas_are_named() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r'differ, got GPU:1, GPU:0, GPU:1\. Several CPU replicas are "CPU:0", "CPU:1"'
    ):
        parse_devices(["cuda:1", "GPU:0", torch.device("cuda", 1)], gpus_on_node=2)

"""Cluster specifications, resolvers, names of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raydist as rd
from raydist.context.devices import Device, parse_device, parse_devices
from raydist.core.errors import InvalidArgumentError

CLUSTER = '"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}'


def resolver(monkeypatch: pytest.MonkeyPatch, text: str, **task: Any) -> rd.TFConfigClusterResolver:
    monkeypatch.setenv("TF_CONFIG", text)
    return rd.TFConfigClusterResolver(**task)


def test_tf_config_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolver(monkeypatch, f'{{{CLUSTER}, "task": {{"type": "worker", "index": 1}}}}')
    assert found.cluster_spec().as_dict() == {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    assert (found.task_type, found.task_id, found.master()) == ("worker", 1, "a:1")
    assert found.num_accelerators() == {}
    named = resolver(
        monkeypatch, f'{{{CLUSTER}, "task": {{"type": "worker", "index": "1"}}}}', task_type="chief", task_id=0
    )
    assert (named.task_type, named.task_id) == ("chief", 0)


def test_without_tf_config_all_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for found in (rd.TFConfigClusterResolver(), resolver(monkeypatch, ""), resolver(monkeypatch, "{}")):
        assert not found.cluster_spec()
        assert (found.task_type, found.task_id, found.master()) == (None, None, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "must be JSON, got '{'"),
        ("[" * 100_000, "must be JSON"),
        ("[]", r"must be a JSON object, got '\[\]'"),
        ('{"cluster": ["a:1"]}', r"is a dict of lists of addresses.*got \['a:1'\]"),
        (f'{{{CLUSTER}, "task": "worker"}}', "must be as .* got 'worker'"),
        (f'{{{CLUSTER}, "task": {{"type": "worker", "index": -1}}}}', "must be as .*-1"),
        (f'{{{CLUSTER}, "task": {{"type": "worker", "index": true}}}}', "must be as .*True"),
        (f'{{{CLUSTER}, "task": {{"type": 3}}}}', "must be as .*3"),
        (f'{{{CLUSTER}, "task": {{"type": "worker", "index": "{"9" * 5000}"}}}}', "must be as"),
    ],
)
def test_a_tf_config_that_is_none_is_shown(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        resolver(monkeypatch, text)


def test_a_resolver_of_plain_values() -> None:
    spec = rd.ClusterSpec({"worker": ["a:1", "b:1"]})
    found = rd.SimpleClusterResolver(spec, "worker", 0, num_accelerators={"GPU": 2})
    assert (found.cluster_spec(), found.task_type, found.task_id) == (spec, "worker", 0)
    assert (found.master(), found.num_accelerators()) == ("a:1", {"GPU": 2})
    with pytest.raises(InvalidArgumentError, match=r"takes an rd\.ClusterSpec, got \{'worker'"):
        rd.SimpleClusterResolver({"worker": ["a:1"]})  # type: ignore[arg-type]  # the point of this test


def test_is_what_it_was_given() -> None:
    given = {"chief": ["a:1"], "worker": ("b:1", "c:1")}
    spec = rd.ClusterSpec(given)
    assert spec.as_dict() == {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    assert (spec.jobs, spec.num_tasks("worker"), spec.task_address("worker", 1)) == (["chief", "worker"], 2, "c:1")
    assert spec == rd.ClusterSpec(spec)
    assert hash(spec) == hash(rd.ClusterSpec(spec))
    assert spec != rd.ClusterSpec({})
    assert bool(spec)
    assert not rd.ClusterSpec({})


@pytest.mark.parametrize("given", [None, ["a:1"], {"worker": "a:1"}, {"worker": [1]}, {1: ["a:1"]}, {"worker": None}])
def test_anything_else_is_an_error(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="is a dict of lists of addresses"):
        rd.ClusterSpec(given)


def test_tasks_that_are_not_there_are_errors() -> None:
    spec = rd.ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(InvalidArgumentError, match=r"one of \['worker'\], got 'chief'"):
        spec.job_tasks("chief")
    for index in (-1, 1):
        with pytest.raises(InvalidArgumentError, match=rf"one of 0 \.\. 0, got {index}"):
            spec.task_address("worker", index)


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
        (["cpu", "CPU:0"], r'must differ, got CPU:0, CPU:0\. Several CPU replicas are "CPU:0", "CPU:1"'),
        (["cpu", "cuda:0"], r"one kind, got CPU:0, GPU:0"),
        (["cpu", "npu:0"], r"got 'npu:0'"),
    ],
)
def test_bad_lists(devices: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_devices(devices, gpus_on_node=0)

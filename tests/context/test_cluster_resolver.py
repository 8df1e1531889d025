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


def test_a_tf_config_that_is_none_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, said in [
        ("{", "must be JSON, got '{'"),
        ("[" * 100_000, "must be JSON"),
        ("[]", r"must be a JSON object, got '\[\]'"),
        ('{"cluster": ["a:1"]}', r"is a dict of lists of addresses.*got \['a:1'\]"),
        (f'{{{CLUSTER}, "task": "worker"}}', "must be as .* got 'worker'"),
        (f'{{{CLUSTER}, "task": {{"type": "worker", "index": -1}}}}', "must be as .*-1"),
        (f'{{{CLUSTER}, "task": {{"type": "worker", "index": true}}}}', "must be as .*True"),
        (f'{{{CLUSTER}, "task": {{"type": 3}}}}', "must be as .*3"),
        (f'{{{CLUSTER}, "task": {{"type": "worker", "index": "{"9" * 5000}"}}}}', "must be as"),
    ]:
        with pytest.raises(InvalidArgumentError, match=said):
            resolver(monkeypatch, text)


def test_a_resolver_of_plain_values() -> None:
    spec = rd.ClusterSpec({"worker": ["a:1", "b:1"]})
    found = rd.SimpleClusterResolver(spec, "worker", 0, num_accelerators={"GPU": 2})
    assert (found.cluster_spec(), found.task_type, found.task_id) == (spec, "worker", 0)
    assert (found.master(), found.num_accelerators()) == ("a:1", {"GPU": 2})
    with pytest.raises(InvalidArgumentError, match=r"takes an rd\.ClusterSpec, got \{'worker'"):
        rd.SimpleClusterResolver({"worker": ["a:1"]})  # type: ignore[arg-type]  # the point of this test


def test_a_specification_is_what_it_was_given() -> None:
    spec = rd.ClusterSpec({"chief": ["a:1"], "worker": ("b:1", "c:1")})
    assert spec.as_dict() == {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    assert (spec.jobs, spec.num_tasks("worker"), spec.task_address("worker", 1)) == (["chief", "worker"], 2, "c:1")
    assert spec == rd.ClusterSpec(spec) != rd.ClusterSpec({})
    assert hash(spec) == hash(rd.ClusterSpec(spec))
    assert (bool(spec), bool(rd.ClusterSpec({}))) == (True, False)
    given: list[Any] = [None, ["a:1"], {"worker": "a:1"}, {"worker": [1]}, {1: ["a:1"]}, {"worker": None}]
    for bad in given:
        with pytest.raises(InvalidArgumentError, match="is a dict of lists of addresses"):
            rd.ClusterSpec(bad)
    with pytest.raises(InvalidArgumentError, match=r"one of \['chief', 'worker'\], got 'ps'"):
        spec.job_tasks("ps")
    for index in (-1, 2):
        with pytest.raises(InvalidArgumentError, match=rf"one of 0 \.\. 1, got {index}"):
            spec.task_address("worker", index)


def test_names_and_counts_of_devices() -> None:
    for name, device in [
        ("cpu", Device("CPU", 0)),
        ("CPU:1", Device("CPU", 1)),
        ("GPU:0", Device("GPU", 0)),
        ("cuda:1", Device("GPU", 1)),
        ("/device:GPU:2", Device("GPU", 2)),
        (torch.device("cuda", 3), Device("GPU", 3)),
        (torch.device("cpu"), Device("CPU", 0)),
    ]:
        assert parse_device(name) == device
        assert torch.device(device.torch_name).type == {"CPU": "cpu", "GPU": "cuda"}[device.kind]
    assert parse_devices(2, gpus_on_node=4) == (Device("GPU", 0), Device("GPU", 1))
    assert parse_devices(2, gpus_on_node=0) == (Device("CPU", 0), Device("CPU", 1))


def test_bad_devices() -> None:
    for name in ("tpu:0", "cpu:x", "", None, 1.5):
        with pytest.raises(InvalidArgumentError, match=r'must be named like "cpu".*got '):
            parse_device(name)
    lists: list[tuple[Any, str]] = [
        (0, r"must be >= 1, got 0"),
        ([], "at least one device"),
        (["cpu", "CPU:0"], r'must differ, got CPU:0, CPU:0\. Several CPU replicas are "CPU:0", "CPU:1"'),
        (["cpu", "cuda:0"], r"one kind, got CPU:0, GPU:0"),
        (["cpu", "npu:0"], r"got 'npu:0'"),
    ]
    for devices, message in lists:
        with pytest.raises(InvalidArgumentError, match=message):
            parse_devices(devices, gpus_on_node=0)

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER_YAML = Path(__file__).parent.parent / "cluster.yaml"


def load() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(CLUSTER_YAML.read_text())
    return config


def test_passes_the_validation_of_ray_up() -> None:
    config = prepare_config(load())  # fills in what `ray up` fills in before it validates
    validate_config(config)
    assert config["head_node_type"] in config["available_node_types"]


def test_validation_sees_a_misspelled_key() -> None:
    with pytest.raises(jsonschema.ValidationError, match="availble_node_types"):
        validate_config(prepare_config({**load(), "availble_node_types": {}}))


def test_has_head_input_and_replica_nodes() -> None:
    types = load()["available_node_types"]
    assert set(types) == {"head", "cpu-input", "gpu-replica"}
    assert load()["max_workers"] == sum(node["max_workers"] for node in types.values())

from __future__ import annotations

import gc

import numpy as np
import pytest
import ray

from raydist.actors.workers.mapped_results import MappedResults
from raydist.dataset import Dataset
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from tests.pipelines.engine.toy_stages import block_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ROWS = np.arange(60_000, dtype=np.int32).reshape(6, 10_000)


def test_a_part_is_found_with_where_it_lies() -> None:
    mapped = MappedResults()
    ref = ray.put(StageResult((block_of(Dataset.from_tensor_slices(ROWS)),), (6,), ("",)))
    result = ray.get(ref)
    mapped.remember(ref, result)
    block = result.items[0]
    assert isinstance(block, Block)
    found = mapped.find(block.columns[0][2:4])
    assert found is not None
    assert found[0] == ref
    assert found[1].of(result).tolist() == ROWS[2:4].tolist()
    assert mapped.find(np.array(block.columns[0])) is None, "a copy is no part of it"


def test_results_are_forgotten_with_their_arrays() -> None:
    mapped = MappedResults()
    ref = ray.put(StageResult((block_of(Dataset.from_tensor_slices(ROWS)),), (6,), ("",)))
    mapped.remember(ref, ray.get(ref))
    gc.collect()
    assert mapped._known == {}

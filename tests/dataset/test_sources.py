from __future__ import annotations

import torch

from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec


def test_from_tensors_of_torch_is_one_element() -> None:
    dataset = Dataset.from_tensors((torch.ones(2), {"a": [1, 2, 3]}, "text"))
    assert dataset.cardinality() == 1
    assert dataset.element_spec == (TensorSpec((2,)), {"a": TensorSpec((3,), "int64")}, TensorSpec((), "U"))

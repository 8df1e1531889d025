"""All rewrites together, and each of them alone, on pipelines of all kinds."""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.optimize import REWRITES
from tests.contracts.op import collect, iterate, same
from tests.pipelines.random_pipelines import Pipeline, pipelines

FLAGS = OptimizationOptions.names()
LIMIT = 60


def items_of(dataset: Dataset) -> list[object]:
    iterator = iterate(dataset)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "map_vectorization")
        items = collect(iterator, LIMIT)
    iterator.close()
    return items


def with_flag(dataset: Dataset, flag: str, on: bool) -> Dataset:
    return dataset.with_options(Options(optimization=OptimizationOptions(**{flag: on})))


def test_every_rewrite_has_a_setting_and_every_setting_a_rewrite() -> None:
    in_stages = {"map_fusion", "filter_fusion"}  # these cut stages: see fusion.py
    assert {rewrite.flag for rewrite in REWRITES} | in_stages == set(FLAGS)


@pytest.mark.parametrize("flag", FLAGS)
@settings(max_examples=25)
@given(pipeline=pipelines())
def test_a_setting_changes_no_element(flag: str, pipeline: Pipeline) -> None:
    dataset = pipeline.build()
    on, off = [with_flag(dataset, flag, value) for value in (True, False)]
    assert same(items_of(on), items_of(off))
    assert on.cardinality() == off.cardinality()


@given(pipeline=pipelines(), flags=st.fixed_dictionaries({flag: st.booleans() for flag in FLAGS}), data=st.data())
def test_all_settings_together(pipeline: Pipeline, flags: dict[str, bool], data: st.DataObject) -> None:
    flags["map_vectorization"] = False
    dataset = pipeline.build()
    chosen = dataset.with_options(Options(optimization=OptimizationOptions(**flags)))
    elements = items_of(dataset)
    saved = iterate(chosen)
    done = data.draw(st.integers(0, len(elements)))
    assert same(collect(saved, done), elements[:done])
    resumed = iterate(chosen, epoch=5)
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert same(collect(resumed, LIMIT - done), elements[done:])
    saved.close()
    resumed.close()


def test_explain_names_what_has_changed_the_graph() -> None:
    numbers = Dataset.range(4)
    text = Dataset.zip(numbers.take(-1), numbers).explain()
    assert "as optimised (noop_elimination, common_subgraph_elimination):\n  zip-2: zip\n    range-0" in text


def test_a_state_of_other_stages_is_refused() -> None:
    dataset = Dataset.range(9).map(abs).map(abs)
    state = iterate(with_flag(dataset, "map_fusion", False)).state_dict()
    with pytest.raises(ValueError, match="The state must be of this pipeline"):
        iterate(dataset).load_state_dict(state)

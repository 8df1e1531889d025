from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray.data
from ray.exceptions import RayTaskError

import raydist as rd
from tests.contracts.op import collect, is_error, iterate

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.filterwarnings("ignore")]  # Ray Data's own warnings


@pytest.fixture(scope="module")
def squares() -> Any:
    """100 rows in 5 blocks, of which the first takes longest."""

    def row(values: dict[str, Any]) -> dict[str, Any]:
        x = int(values["id"])
        return {"x": x, "text": str(x), "square": np.full((2, 2), x * x)}

    return ray.data.range(100, override_num_blocks=5).map(row)


def test_rows_come_in_order_with_their_types(squares: Any) -> None:
    rows = list(rd.Dataset.from_ray(squares).as_numpy_iterator())
    assert [int(row["x"]) for row in rows] == list(range(100))
    assert rows[7]["text"] == "7"
    assert rows[7]["square"].tolist() == [[49, 49], [49, 49]]


def test_the_spec_is_that_of_the_rows(squares: Any) -> None:
    spec = rd.Dataset.from_ray(squares).element_spec
    assert spec == {
        "x": rd.TensorSpec((), "int64"),
        "text": rd.TensorSpec((), "U"),
        "square": rd.TensorSpec((2, 2), "int64"),
    }


def test_only_a_materialised_dataset_has_a_length(squares: Any) -> None:
    assert rd.Dataset.from_ray(squares).cardinality() == rd.UNKNOWN_CARDINALITY
    assert len(rd.Dataset.from_ray(squares.materialize())) == 100


def test_the_users_dataset_keeps_its_settings(squares: Any) -> None:
    next(rd.Dataset.from_ray(squares).as_numpy_iterator())
    assert squares.context.execution_options.preserve_order is False


def test_resuming_passes_over_what_was_handed_out(squares: Any) -> None:
    dataset = rd.Dataset.from_ray(squares).batch(7)
    first = dataset.as_numpy_iterator()
    seen = [next(first) for _ in range(4)]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = dataset.as_numpy_iterator()
    second.load_state_dict(state)
    assert len(seen) == 4
    assert next(second)["x"].tolist() == list(range(28, 35))
    second.close()


def test_a_null_stands_in_its_place() -> None:
    dataset = rd.Dataset.from_ray(ray.data.from_arrow(pa.table({"x": [1, None, 3]})))
    items = collect(iterate(dataset))
    assert [is_error(item) for item in items] == [False, True, False]


def test_an_error_in_ray_ends_the_pass() -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("bad row")

    dataset = rd.Dataset.from_ray(ray.data.from_arrow(pa.table({"x": [1, 2]})).map(fail))
    iterator = dataset.as_numpy_iterator()
    with pytest.raises(RayTaskError, match="ZeroDivisionError: bad row") as caught:
        next(iterator)
    assert "given to from_ray" in str(caught.value.__notes__)
    assert list(iterator) == []


def test_something_else_is_refused() -> None:
    with pytest.raises(rd.SpecError, match="from_ray needs a ray.data.Dataset, got 3"):
        rd.Dataset.from_ray(3)

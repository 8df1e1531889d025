"""Random pipelines from all operations over small sources, for property tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.elements.spec import TensorSpec
from tests.pipelines.sources.saved_hub_dataset import save_to_disk

__all__ = ["Pipeline", "jitter", "pipelines"]

NUMBER, PAIR, ROW, TEXT, RECORD, SMALL, NESTED, OTHER = KINDS = (
    *("number", "pair", "row", "text", "record", "small", "nested", "other"),
)
"""int64; two numbers; 1-d int64 of any length; str; a dict of id, name and weight in any order; two bfloat16; a
dataset of numbers; anything."""
TENSORS = tuple(kind for kind in KINDS if kind != NESTED)
BFLOAT16 = TensorSpec((), "bfloat16").dtype
_FILES = tempfile.TemporaryDirectory()


@final
@dataclass(frozen=True, repr=False, eq=False)
class Pipeline:
    """One method call and what it is called on: `input.method(*args, **keywords)`; without input, on the class."""

    method: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    kind: str
    input: Pipeline | None = None

    def build(self, built: dict[int, Dataset] | None = None) -> Dataset:
        """Return a new dataset; `built` are those that were made for it already."""
        built = {} if built is None else built
        if id(self) not in built:
            owner: Any = Dataset if self.input is None else self.input.build(built)
            args = [_argument(arg, built) for arg in self.args]
            built[id(self)] = getattr(owner, self.method)(*args, **self.keywords)
        return built[id(self)]

    def __repr__(self) -> str:
        owner = "Dataset" if self.input is None else repr(self.input)
        shown = [function_label(arg) if callable(arg) else repr(arg) for arg in self.args]
        shown += [f"{name}={value!r}" for name, value in self.keywords.items()]
        return f"{owner}.{self.method}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would show the fields

    def then(self, method: str, *args: Any, kind: str | None = None, **keywords: Any) -> Pipeline:
        """This pipeline with one more operation; the kind of elements stays unless another is given."""
        return Pipeline(method, args, keywords, kind or self.kind, self)


def _argument(value: Any, built: dict[int, Dataset]) -> Any:
    if isinstance(value, Pipeline):
        return value.build(built)
    return [_argument(part, built) for part in value] if isinstance(value, list) else value


Draw = Callable[[st.SearchStrategy[Any]], Any]


def _on_class(method: str, *args: Any, kind: str = NUMBER, **keywords: Any) -> Pipeline:
    return Pipeline(method, args, keywords, kind)


def _slices(draw: Draw) -> Pipeline:
    values = draw(st.lists(st.integers(-4, 12), max_size=12))
    return _on_class("from_tensor_slices", np.array(values, np.int64))


def _smalls(draw: Draw) -> Pipeline:
    values = [(value, 0.5) for value in draw(st.lists(st.integers(-4, 12), max_size=8))]
    return _on_class("from_tensor_slices", np.array(values, BFLOAT16).reshape(-1, 2), kind=SMALL)


def _words(draw: Draw) -> Pipeline:
    return _on_class("from_tensor_slices", draw(st.lists(st.text("ab", max_size=3), min_size=1, max_size=6)), kind=TEXT)


def _records(draw: Draw) -> Pipeline:
    rows, source = draw(st.integers(0, 8)), draw(st.sampled_from(["table", "hub", "slices"]))
    names = [f"n{row % 3}" for row in range(rows)]
    weights = np.arange(rows, dtype=np.float32)
    if source == "slices" and rows:
        return _on_class("from_tensor_slices", {"weight": weights, "name": names, "id": np.arange(rows)}, kind=RECORD)
    table = pa.table({"id": np.arange(rows), "name": pa.array(names, pa.string()), "weight": weights})
    path = Path(_FILES.name) / str(rows)
    if source == "hub":
        directory = str(path) if path.exists() else save_to_disk(path, table)
        return _on_class("from_huggingface", directory, kind=RECORD)
    return _on_class("from_arrow", table, kind=RECORD)


def _count_up(stop: Any) -> Iterator[int]:
    yield from range(int(stop))


def _generator(draw: Draw) -> Pipeline:
    return _on_class("from_generator", _count_up, TensorSpec((), np.int64), (draw(st.integers(0, 9)),))


def _random_numbers(draw: Draw) -> Pipeline:
    numbers = _on_class("random", draw(st.sampled_from([None, 3])), rerandomize_each_iteration=draw(st.booleans()))
    return numbers.then("take", draw(st.integers(0, 9))).then("map", lambda x: x % 11)


def _counted(draw: Draw) -> Pipeline:
    numbers = _on_class("counter", draw(st.integers(-3, 3)), draw(st.integers(1, 3)))
    return numbers.then("take", draw(st.integers(0, 15)))


def _weighted(draw: Draw) -> Pipeline:
    weights = draw(st.lists(st.integers(1, 5), min_size=1, max_size=9))
    number = draw(st.integers(1, len(weights)))
    return _on_class("range", len(weights)).then("sample_by_weight", weights, number, draw(st.booleans()))


SOURCES: tuple[Callable[[Draw], Pipeline], ...] = (
    lambda draw: _on_class("range", draw(st.integers(0, 20))),
    lambda draw: _on_class("range", draw(st.integers(-3, 9)), draw(st.integers(-3, 9)), draw(st.sampled_from([1, -2]))),
    lambda draw: _on_class("from_tensors", draw(st.integers(0, 9))),
    lambda draw: _on_class("from_torch", draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))),
    lambda draw: _on_class("range", draw(st.integers(1, 6))).then("repeat").then("take", draw(st.integers(0, 20))),
    lambda draw: _on_class("range", draw(st.integers(0, 20))).then("global_shuffle", draw(st.sampled_from([None, 2]))),
    _weighted,
    _slices,
    _words,
    _records,
    _records,
    _smalls,
    _generator,
    _random_numbers,
    _counted,
)


# Functions of a number.


def fail_some(x: Any) -> Any:
    if x % 5 == 3:
        raise ValueError("bad element")
    return x + 1


def jitter(x: Any, *, rng: np.random.Generator) -> Any:
    return x + rng.integers(0, 3)


def _double(x: Any) -> Any:
    return x * 2


def _record(x: Any) -> Any:
    return {"id": x, "name": f"n{x % 3}", "weight": np.float32(x)}


def _small(x: Any) -> Any:
    return np.array([x, 0.5], BFLOAT16)


def _jittered_range(x: Any) -> Dataset:
    return Dataset.range(int(x % 5)).map(jitter).shuffle(2)


def _jittered(*parts: Any) -> Dataset:
    return cast(Dataset, parts[-1].map(jitter).shuffle(2))  # of a dataset, or of a key and its window


def _total(row: Any) -> Any:
    return np.int64(row.astype(np.float32).sum())


def _map(draw: Draw, ds: Pipeline, *choices: tuple[Callable[..., Any], str]) -> Pipeline:
    function, kind = draw(st.sampled_from(choices))
    calls = draw(st.sampled_from([None, None, None, 1, 2]))
    keywords = {} if calls is None else {"num_parallel_calls": calls}
    return ds.then("map", function, kind=kind, **keywords)


def _map_number(draw: Draw, ds: Pipeline) -> Pipeline:
    return _map(
        draw,
        ds,
        *((_double, NUMBER), (fail_some, NUMBER), (jitter, NUMBER), (lambda x: x % 11, NUMBER)),
        *((_record, RECORD), (lambda x: dict(reversed(_record(x).items())), RECORD), (_small, SMALL)),
        (lambda x: (x, np.float32(x) / 2), PAIR),
        (lambda x: "t" * int(x % 6), TEXT),
        (lambda x: {"x": (x, None), "none": None}, OTHER),
        (_jittered_range, NESTED),
        (lambda x: {"rest": _jittered_range(fail_some(x)), "at": x}, OTHER),
    )


def _filter(draw: Draw, ds: Pipeline, *choices: Callable[..., bool]) -> Pipeline:
    return ds.then(draw(st.sampled_from(["filter", "filter", "take_while"])), draw(st.sampled_from(choices)))


def _nested(draw: Draw, ds: Pipeline) -> Pipeline:
    functions: list[Callable[[Any], Dataset]] = [
        _jittered_range,
        lambda x: Dataset.from_tensors(x).repeat(int(x % 3)),
        lambda x: Dataset.range(int(fail_some(x) % 6)).map(fail_some),
    ]
    function = draw(st.sampled_from(functions))
    if draw(st.booleans()):
        return ds.then("flat_map", function)
    calls = draw(st.sampled_from([None, None, 1]))
    keywords = {} if calls is None else {"num_parallel_calls": calls}
    return ds.then("interleave", function, draw(st.integers(1, 4)), draw(st.integers(1, 3)), **keywords)


def _window(draw: Draw, ds: Pipeline) -> Pipeline:
    sizes = [draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.booleans())]
    windows = ds.then("window", *sizes)
    if ds.kind == PAIR:
        return windows.then("flat_map", lambda x, y: Dataset.zip(x, y).batch(2), kind=OTHER)
    if draw(st.booleans()):
        return windows.then("flat_map", lambda window: window)
    return windows.then("flat_map", lambda window: window.batch(3), kind=ROW if ds.kind == NUMBER else OTHER)


def _taken_apart(draw: Draw, ds: Pipeline) -> Pipeline:
    """The elements of datasets within the elements."""
    way = draw(st.sampled_from(["flat_map", "interleave", "map", "map"]))
    if way == "flat_map":
        return ds.then("flat_map", lambda window: window, kind=NUMBER)
    if way == "interleave":
        return ds.then(
            "interleave", lambda window: window, draw(st.integers(1, 3)), draw(st.integers(1, 3)), kind=NUMBER
        )
    return _map(
        draw,
        ds,
        (_jittered, NESTED),
        (lambda dataset: next(dataset.as_numpy_iterator(), np.int64(-1)), NUMBER),
        (lambda dataset: dataset.reduce(np.int64(0), np.add), NUMBER),
    )


def _with_nothing(draw: Draw, ds: Pipeline) -> Pipeline:
    """An empty branch; only reading it tells that it is empty."""
    numbers = _on_class("range", draw(st.integers(0, 3)))
    nothing = numbers.then("filter", lambda x: False).then("map", _double)
    way = draw(st.sampled_from(["before", "behind", "sampled"]))
    if way == "sampled":
        return Pipeline("sample_from_datasets", ([nothing, ds], [0.5, 0.5]), {}, NUMBER)
    return nothing.then("concatenate", ds) if way == "before" else ds.then("concatenate", nothing)


def _with_itself(draw: Draw, ds: Pipeline) -> Pipeline:
    """One dataset object at two places."""
    if draw(st.booleans()):
        return ds.then("concatenate", ds)
    other = ds.then("map", jitter) if ds.kind == NUMBER else ds.then("shuffle", 3)
    return Pipeline("zip", (ds, other), {}, PAIR if ds.kind == NUMBER else OTHER)


def _with_another(draw: Draw, ds: Pipeline) -> Pipeline:
    other = draw(pipelines(max_steps=2, kind=ds.kind))
    way = draw(st.sampled_from(["concatenate", "zip", "sample_from_datasets", "choose_from_datasets"]))
    if way == "concatenate":
        return ds.then("concatenate", other)
    if way == "zip":
        return Pipeline("zip", (ds, other), {}, OTHER)
    if way == "sample_from_datasets":
        return Pipeline(way, ([ds, other], [0.7, 0.3]), {}, ds.kind)
    choices = _on_class("from_tensor_slices", draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)))
    return Pipeline(way, ([ds, other], choices, draw(st.booleans())), {}, ds.kind)


def _shuffle(draw: Draw, ds: Pipeline) -> Pipeline:
    size = draw(st.one_of(st.integers(1, 9), st.just(UNKNOWN_CARDINALITY)))
    seed, again = draw(st.sampled_from([(None, True), (3, True), (3, False)]))
    return ds.then("shuffle", size, seed, again)


def _shard(draw: Draw, ds: Pipeline) -> Pipeline:
    count = draw(st.integers(1, 4))
    return ds.then("shard", count, draw(st.integers(0, count - 1)))


def _options(draw: Draw, ds: Pipeline) -> Pipeline:
    return ds.then("with_options", Options(seed=draw(st.integers(0, 3))))


def _batched(draw: Draw, ds: Pipeline) -> Pipeline:
    batches = ds.then("batch", draw(st.integers(1, 5)), draw(st.booleans()))
    way = draw(st.sampled_from(["unbatch", "rebatch", "neither"]))
    if way == "rebatch":
        batches = batches.then("rebatch", draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    if way == "unbatch":
        return batches.then("unbatch")
    return Pipeline(batches.method, batches.args, {}, ROW if ds.kind == NUMBER else OTHER, batches.input)


def _rows(draw: Draw, ds: Pipeline) -> Pipeline:
    return ds.then("map", lambda x: np.arange(x % 4), output_spec=TensorSpec((None,), np.int64), kind=ROW)


def _by_parity(draw: Draw, ds: Pipeline) -> Pipeline:
    functions: list[Callable[[Any], int]] = [lambda x: int(x % 2), lambda x: int(fail_some(x) % 2)]
    function = draw(st.sampled_from(functions))
    if draw(st.booleans()):
        return ds.then("group_by_window", function, _jittered, draw(st.integers(1, 4)))
    initial = draw(st.sampled_from([None, [0.5, 0.5]]))
    return ds.then("rejection_resample", function, [0.7, 0.3], initial, kind=PAIR)


def _by_length(draw: Draw, ds: Pipeline) -> Pipeline:
    sizes = [draw(st.integers(1, 3)) for _ in range(3)]
    return ds.then("bucket_by_sequence_length", len, [2, 3], sizes, kind=OTHER)


Step = Callable[[Draw, Pipeline], Pipeline]

STEPS: tuple[tuple[tuple[str, ...], Step], ...] = (
    ((NUMBER,), _map_number),
    ((NUMBER,), _rows),
    (
        (NUMBER,),
        lambda draw, ds: _filter(
            draw, ds, lambda x: bool(x % 3), lambda x: bool(x < 9), lambda x: bool(fail_some(x) < 9)
        ),
    ),
    ((NUMBER,), lambda draw, ds: ds.then("map_batches", _double, draw(st.integers(1, 5)))),
    ((NUMBER,), lambda draw, ds: ds.then("scan", 0, lambda total, x: (total + x, total + x))),
    ((NUMBER,), _nested),
    ((NUMBER,), _by_parity),
    ((NUMBER,), _with_nothing),
    ((SMALL,), lambda draw, ds: _map(draw, ds, (_double, SMALL), (_total, NUMBER))),
    ((SMALL,), lambda draw, ds: _filter(draw, ds, lambda row: bool(row[0] < 7))),
    ((NESTED,), _taken_apart),
    ((NUMBER, TEXT), lambda draw, ds: ds.then("unique")),
    ((PAIR,), lambda draw, ds: _map(draw, ds, (lambda x, y: (-x, -y), PAIR), (lambda x, y: x, NUMBER))),
    ((PAIR,), lambda draw, ds: _filter(draw, ds, lambda x, y: bool(x < 9))),
    ((ROW,), lambda draw, ds: _map(draw, ds, (_double, ROW), (_total, NUMBER))),
    ((ROW,), _by_length),
    ((ROW, SMALL), lambda draw, ds: ds.then("padded_batch", draw(st.integers(1, 4)), kind=OTHER)),
    ((TEXT,), lambda draw, ds: _map(draw, ds, (len, NUMBER))),
    ((TEXT, ROW), lambda draw, ds: _filter(draw, ds, lambda row: len(row) > 1)),
    (
        (RECORD,),
        lambda draw, ds: _map(
            draw, ds, (lambda row: row["id"], NUMBER), (lambda row: (row["id"], row["weight"]), PAIR)
        ),
    ),
    ((RECORD,), lambda draw, ds: _filter(draw, ds, lambda row: bool(row["weight"] < 5))),
    ((NUMBER, TEXT, PAIR, ROW), _window),
    (KINDS, _with_itself),
    (KINDS[:-1], _with_another),
    (KINDS, _shuffle),
    (KINDS, _shard),
    (KINDS, _options),
    (TENSORS, _batched),
    (KINDS, lambda draw, ds: ds.then("take", draw(st.integers(-1, 12)))),
    (KINDS, lambda draw, ds: ds.then("skip", draw(st.integers(-1, 6)))),
    (KINDS, lambda draw, ds: ds.then("repeat", draw(st.integers(0, 3)))),
    (KINDS, lambda draw, ds: ds.then("cache")),
    (KINDS, lambda draw, ds: ds.then("prefetch", draw(st.sampled_from([None, 0, 1, 3])))),
    (KINDS, lambda draw, ds: ds.then("enumerate", draw(st.integers(0, 3)), kind=OTHER)),
    (KINDS, lambda draw, ds: ds.then("ignore_errors")),
    (KINDS, lambda draw, ds: ds.then("assert_cardinality", draw(st.sampled_from([UNKNOWN_CARDINALITY, 3])))),
)


@st.composite
def pipelines(draw: Draw, max_steps: int = 5, kind: str | None = None) -> Pipeline:
    """Pipelines of a source and up to `max_steps` operations (some of which come in pairs)."""
    pipeline: Pipeline = draw(st.sampled_from(SOURCES))(draw)
    for _ in range(draw(st.integers(0, max_steps))):
        steps = [step for kinds, step in STEPS if pipeline.kind in kinds]
        pipeline = draw(st.sampled_from(steps))(draw, pipeline)
    if kind in (None, pipeline.kind):
        return pipeline
    make: Callable[[Draw], Pipeline] = draw(st.sampled_from(_PLAIN[kind or NUMBER]))
    return make(draw)


_PLAIN: dict[str, tuple[Callable[[Draw], Pipeline], ...]] = {
    NUMBER: (SOURCES[0], _slices, _generator, _random_numbers),
    PAIR: (lambda draw: SOURCES[0](draw).then("map", lambda x: (x, np.float32(x) / 2), kind=PAIR),),
    ROW: (lambda draw: _rows(draw, _slices(draw)),),
    TEXT: (_words, lambda draw: SOURCES[0](draw).then("map", lambda x: "t" * int(x % 6), kind=TEXT)),
    RECORD: (_records, lambda draw: SOURCES[0](draw).then("map", _record, kind=RECORD)),
    SMALL: (_smalls, lambda draw: SOURCES[0](draw).then("map", _small, kind=SMALL)),
    NESTED: (lambda draw: SOURCES[0](draw).then("map", _jittered_range, kind=NESTED),),
}

"""rd.Dataset: the fluent facade of the input engine, one method per operation, one file per kind of method."""

from __future__ import annotations

from typing import final

from raydist.dataset.batching import Batching
from raydist.dataset.combining import Combining
from raydist.dataset.elementwise import Elementwise
from raydist.dataset.exporting import Exporting
from raydist.dataset.files import FileSources
from raydist.dataset.ordering import Ordering
from raydist.dataset.sources import Sources
from raydist.dataset.storing import Storing
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.optional import Optional

__all__ = ["Dataset", "DatasetIterator", "Optional"]


@final
class Dataset(Sources, FileSources, Combining, Elementwise, Batching, Ordering, Storing, Exporting):
    """A pipeline of elements: an immutable, picklable graph that runs when it is iterated (tf.data.Dataset).

    Elements are nests (tuple, dict, namedtuple, dataclass) of numbers, arrays, torch tensors, bytes and str, in which
    None may stand for a part that is absent. Iterating
    gives torch tensors; every `iter()` is a new epoch of this object, counted from 0. An element's error is raised at
    its place, and iteration goes on after it.

    Methods that give a dataset leave this one as it is and start nothing. Errors "at iteration" are raised by `next`,
    not by the method.

    Make one by a class method: `range`, `from_tensor_slices`, `from_parquet`, ...

    Args:
        op: The last operation of the graph, for operations of your own (`rd.DatasetOp`).

    >>> [x.tolist() for x in rd.Dataset.range(5).map(lambda x: x * x).batch(2)]
    [[0, 1], [4, 9], [16]]
    """

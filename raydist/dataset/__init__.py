"""`rd.Dataset`: the public interface of the input engine, with one method per operation and one file per kind."""

from __future__ import annotations

from typing import final

from raydist.dataset.batching import Batching
from raydist.dataset.combining import Combining
from raydist.dataset.elementwise import Elementwise
from raydist.dataset.files import FileSources
from raydist.dataset.ordering import Ordering
from raydist.dataset.sources import Sources
from raydist.dataset.storing import Exporting, Storing
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.optional import Optional

__all__ = ["Dataset", "DatasetIterator", "Optional"]


@final
class Dataset(Sources, FileSources, Combining, Elementwise, Batching, Ordering, Storing, Exporting):
    """A pipeline of elements: an immutable, picklable graph that runs when it is iterated (tf.data.Dataset).

    Elements are nests (tuple, dict, namedtuple, dataclass) of numbers, arrays, torch tensors, bytes and str, in which
    None may stand for an absent part. Iteration returns torch tensors; every `iter()` is a new epoch of this object,
    counted from 0. The error of an element is raised in the element's place, and iteration continues after it.

    Methods that return a dataset leave this one unchanged and start nothing. Errors "at iteration" are raised by
    `next`, not by the method.

    Create a dataset by a class method: `range`, `from_tensor_slices`, `from_parquet`, ...

    Args:
        op: The last operation of the graph, for custom operations (`rd.DatasetOp`).

    >>> [x.tolist() for x in rd.Dataset.range(5).map(lambda x: x * x).batch(2)]
    [[0, 1], [4, 9], [16]]
    """

"""`rd.load`, `rd.builder` and `rd.list_builders`: data sets by name."""

from __future__ import annotations

import inspect
from typing import Any

from raydist.core.errors import InvalidArgumentError
from raydist.datasets import image_sets, library_sets, table_sets
from raydist.datasets.builder import DatasetBuilder

_BUILT_IN = (image_sets, library_sets, table_sets)  # their classes are found as subclasses


def list_builders() -> list[str]:
    """Return the names that `rd.load` and `rd.builder` know, sorted: raydist's and those of your own classes.

    Source: tfds.list_builders.

    >>> {"mnist", "iris", "huggingface"} <= set(rd.list_builders())
    True
    """
    return sorted(_builders())


def builder(name: str, **options: Any) -> DatasetBuilder:
    """Return the data set with a name. Reads and writes nothing yet.

    Args:
        name: A name of :func:`list_builders`; a variant of it as "emnist/letters"; "huggingface:<directory or name>" or
            "torchvision:<class>".
        options: Arguments of the data set's class, such as `data_dir`.

    Raises:
        InvalidArgumentError: There is no such data set, or it has no such option.

    Source: tfds.builder.

    >>> rd.builder("iris").info.splits["train"]
    150
    """
    known = _builders()
    found, _, config = name.partition(":") if ":" in name else name.partition("/")
    if found not in known:
        raise InvalidArgumentError(
            f"A data set must be one of {', '.join(sorted(known))}, got {name!r}. Use one of these names, or define a "
            "rd.DatasetBuilder with this one."
        )
    given = {**({"config": config} if config else {}), **options}
    try:
        inspect.signature(known[found]).bind(**given)
    except TypeError as error:
        raise InvalidArgumentError(
            f"The options of {found!r} must be those of {inspect.signature(known[found])}, got {given!r:.200}: {error}."
        ) from error
    return known[found](**given)


def load(name: str, split: Any = None, *, as_supervised: bool = False, with_info: bool = False, **options: Any) -> Any:
    """Return a data set by its name.

    Examples are dicts of arrays. Where the source can be read by index, a slice reads nothing else, and
    `global_shuffle` works. Nothing is downloaded, unless by an option of the data set: an error says which files are
    missing, and where they come from.

    Args:
        name: See :func:`builder`.
        split: As in TensorFlow Datasets: "train", "train[:80%]", "train[10:20]", "train[-1000:]", "train[10%:]+test",
            "all". Percents are rounded to the closest number of examples; behind a slice "(pct1_dropremainder)" makes
            every percent the same whole number. A list, tuple or dict of these gives one of datasets. None gives a
            dict with all splits.
        as_supervised: Elements are (features, label) instead of dicts.
        with_info: Also return the :class:`DatasetInfo`.
        options: Options of the data set, such as `data_dir`, the folder of its files.

    Returns:
        A `rd.Dataset`, or datasets like `split`; with `with_info`, a pair of this and the `DatasetInfo`.

    Raises:
        InvalidArgumentError: No such data set, split or option; no label for `as_supervised`.
        NotFoundError: Files of the data set are missing.
        DataLossError: A file is damaged (has `path`); at iteration: in the place of an example.
        FailedPreconditionError: A package is missing; a directory cannot be written to.

    Source: tfds.load.

    >>> train, test = rd.load("iris", ["train[:80%]", "train[80%:]"], as_supervised=True)
    >>> features, label = next(iter(test))
    >>> len(train), features.shape, int(label)
    (120, torch.Size([4]), 2)
    """
    found = builder(name, **options)
    datasets = found.as_dataset(split, as_supervised)
    return (datasets, found.info) if with_info else datasets


def _builders() -> dict[str, type[DatasetBuilder]]:
    """Return the classes of data sets by name; the one defined last, if two have the same name."""
    found: list[Any] = [DatasetBuilder]
    for kind in found:
        found += kind.__subclasses__()
    return {kind.name: kind for kind in found if not inspect.isabstract(kind) and "name" in vars(kind)}

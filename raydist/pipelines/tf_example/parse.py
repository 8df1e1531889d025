"""Parsing of serialized tf.train.Example messages into numpy.

Source: TensorFlow, `tensorflow/core/example/{example,feature}.proto`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.pipelines.tf_example.batches import fill_alike
from raydist.pipelines.tf_example.outputs import Feature, FeatureOutput, feature_output

_SCHEMA = """
name: "raydist/example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: ".tensorflow.BytesList" oneof_index: 0 MESSAGE }
  field { name: "float_list" number: 2 type_name: ".tensorflow.FloatList" oneof_index: 0 MESSAGE }
  field { name: "int64_list" number: 3 type_name: ".tensorflow.Int64List" oneof_index: 0 MESSAGE }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type_name: ".tensorflow.Feature" MESSAGE }
  }
  field { name: "feature" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
          type_name: ".tensorflow.Features.FeatureEntry" }
}
message_type { name: "Example" field { name: "features" number: 1 type_name: ".tensorflow.Features" MESSAGE } }
""".replace("MESSAGE }", "type: TYPE_MESSAGE label: LABEL_OPTIONAL }")


@lru_cache(maxsize=1)
def example_class() -> Any:
    """Return the message class, from a separate descriptor pool that does not conflict with TensorFlow's."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()).SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def parse_example(serialized: Any, features: Mapping[str, Feature]) -> dict[str, Any]:
    """Parse one serialized tf.train.Example, or a batch of them (tf.io.parse_example).

    Parsing a batch (`ds.batch(n).map(...)`) costs less per record than parsing one by one, least where records are
    written alike: the same features in the same order with the same numbers of values (images of one size, vectors).

    Args:
        serialized: One record (bytes), or a batch: a list or an object array of shape (n,), as `batch` makes it.
        features: For each wanted feature what it is to become: a FixedLenFeature, VarLenFeature,
            FixedLenSequenceFeature, SparseFeature or RaggedFeature. Others in the records are passed over.

    Returns:
        A dict with one value per feature. FixedLenFeature: an array of shape `shape`, or (n, *shape) for a batch; a
        single value of shape () is a numpy scalar or bytes. VarLenFeature: an array of shape (k,), or for a batch an
        object array of shape (n,) that holds n such arrays: pad or join them in the same function. bytes live in
        object arrays. The other kinds say for themselves.

    Raises:
        InvalidArgumentError: A record is no Example; a feature is missing and has no default_value, holds another
            type, or another number of values. The message names feature and record.
        SpecError: `serialized` is neither bytes nor a list or object array of bytes.

    Source: tf.io.parse_example (TensorFlow 2.x API).

    >>> import raydist as rd
    >>> record = bytes.fromhex("0a0e0a0c0a03616765 12051a030a01 2a".replace(" ", ""))  # age: int64 [42]
    >>> features = {"age": rd.FixedLenFeature((), "int64", default_value=7)}
    >>> parse_example([record, b""], features)
    {'age': array([42,  7])}
    >>> parse_example(record, features)
    {'age': np.int64(42)}
    """
    if isinstance(serialized, bytes):
        return parse_single_example(serialized, features)
    return {name: output.batch() for name, output in _parse(_batch(serialized), features).items()}


def parse_single_example(serialized: bytes, features: Mapping[str, Feature]) -> dict[str, Any]:
    """Parse one serialized tf.train.Example (tf.io.parse_single_example).

    Args:
        serialized: One record.
        features: For each wanted feature what it is to become, as for :func:`parse_example`.

    Returns:
        A dict with one value per feature. FixedLenFeature: an array of shape `shape`; of shape () a numpy scalar or
        bytes. VarLenFeature: an array of shape (k,). FixedLenSequenceFeature: an array of shape (k, *shape).
        SparseFeature: a SparseTensorValue of shape `size`. RaggedFeature: an array of shape (k,), with partitions a
        RaggedTensorValue.

    Raises:
        InvalidArgumentError: As for :func:`parse_example`.
        SpecError: `serialized` is not bytes.

    Source: tf.io.parse_single_example (TensorFlow 2.x API).

    >>> import raydist as rd
    >>> record = bytes.fromhex("0a0e0a0c0a0361676512051a030a012a")  # age: int64 [42]
    >>> parse_single_example(record, {"age": rd.VarLenFeature("int64"), "name": rd.VarLenFeature(bytes)})
    {'age': array([42]), 'name': array([], dtype=object)}
    """
    if not isinstance(serialized, bytes):
        raise SpecError(
            f"parse_single_example must get one record as bytes, got {type(serialized).__name__}. "
            "Use parse_example for a batch."
        )
    return {name: output.single() for name, output in _parse([serialized], features).items()}


def _parse(records: Sequence[Any], features: Mapping[str, Feature]) -> dict[str, FeatureOutput]:
    _check_features(features)
    outputs = {name: feature_output(name, feature, len(records)) for name, feature in features.items()}
    columns = [column for output in outputs.values() for column in output.columns]
    for index in fill_alike(records, columns):
        found = _feature_map(records[index], index)
        for column in columns:
            column.add(found, index)
    return outputs


def _check_features(features: Mapping[str, Feature]) -> None:
    if not isinstance(features, Mapping) or not features:
        raise InvalidArgumentError(f"features must be a dict that names at least one feature, got {features!r}.")
    for name, feature in features.items():
        if not isinstance(feature, Feature):
            raise InvalidArgumentError(
                f"Feature {name!r} must be a FixedLenFeature, VarLenFeature, FixedLenSequenceFeature, SparseFeature or "
                f"RaggedFeature, got {feature!r}."
            )


def _batch(serialized: Any) -> Sequence[Any]:
    if isinstance(serialized, np.ndarray):
        if serialized.dtype != object or serialized.ndim != 1:
            raise SpecError(
                f"A batch of records must be an object array of shape (n,), got {serialized.dtype} of shape "
                f"{serialized.shape}. (numpy's bytes dtype would cut zero bytes off the end of records.)"
            )
        return list(serialized)
    if isinstance(serialized, Sequence) and not isinstance(serialized, str):
        return serialized
    raise SpecError(f"serialized must be bytes, or a list or array of bytes, got {type(serialized).__name__}.")


def _feature_map(record: Any, index: int) -> Any:
    if not isinstance(record, bytes):
        raise SpecError(f"Every record must be bytes, but record {index} is {type(record).__name__}.")
    try:
        return example_class().FromString(record).features.feature
    except DecodeError as error:
        raise InvalidArgumentError(
            f"Every record must be a serialized tf.train.Example, but record {index} ({len(record)} bytes, "
            f"{record[:16]!r}...) is not: {error}."
        ) from error

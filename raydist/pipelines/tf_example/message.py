"""The message `tf.train.Example`, built from its definition instead of a generated file.

    Example { Features features = 1; }   Features { map<string, Feature> feature = 1; }
    Feature { oneof kind { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }

Source: TensorFlow, `tensorflow/core/example/{example,feature}.proto`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["example_class"]

_PACKAGE = "tensorflow"
_Field = descriptor_pb2.FieldDescriptorProto


@lru_cache(maxsize=1)
def example_class() -> Any:
    """The message class; in a descriptor pool of its own, beside an installed TensorFlow's."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_file().SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="raydist/example.proto", package=_PACKAGE, syntax="proto3")
    for name, kind in (
        ("BytesList", _Field.TYPE_BYTES),
        ("FloatList", _Field.TYPE_FLOAT),
        ("Int64List", _Field.TYPE_INT64),
    ):
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=_Field.LABEL_REPEATED)
    _add_feature(file)
    _add_features(file)
    _add_message(file.message_type.add(name="Example"), "features", 1, "Features")
    return file


def _add_feature(file: Any) -> None:
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(
        (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")), start=1
    ):
        _add_message(feature, name, number, kind).oneof_index = 0


def _add_features(file: Any) -> None:
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
    _add_message(entry, "value", 2, "Feature")
    _add_message(features, "feature", 1, "Features.FeatureEntry").label = _Field.LABEL_REPEATED


def _add_message(parent: Any, name: str, number: int, kind: str) -> Any:
    field = parent.field.add(name=name, number=number, type=_Field.TYPE_MESSAGE, label=_Field.LABEL_OPTIONAL)
    field.type_name = f".{_PACKAGE}.{kind}"
    return field

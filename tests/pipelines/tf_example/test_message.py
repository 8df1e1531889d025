from __future__ import annotations

from raydist.pipelines.tf_example.parse import example_class

# Example { features { feature { key: "k" value { X_list { value: ... } } } } }, by hand: field numbers and lengths.
INT64 = bytes.fromhex("0a0d 0a0b 0a016b 1206 1a04 0a02ac02")  # [300], packed
FLOAT = bytes.fromhex("0a0f 0a0d 0a016b 1208 1206 0a04 0000c03f")  # [1.5], packed
BYTES = bytes.fromhex("0a0c 0a0a 0a016b 1205 0a03 0a01ff")  # [b"\xff"]
UNPACKED = bytes.fromhex("0a0c 0a0a 0a016b 1205 1a03 08ac02")  # [300] as older writers store it


def test_bytes_by_hand_are_read() -> None:
    parse = example_class().FromString
    assert list(parse(INT64).features.feature["k"].int64_list.value) == [300]
    assert list(parse(UNPACKED).features.feature["k"].int64_list.value) == [300]
    assert list(parse(FLOAT).features.feature["k"].float_list.value) == [1.5]
    assert list(parse(BYTES).features.feature["k"].bytes_list.value) == [b"\xff"]


def test_written_as_by_hand() -> None:
    example = example_class()()
    example.features.feature["k"].int64_list.value.append(300)
    assert example.SerializeToString() == INT64


def test_one_class_a_process() -> None:
    assert example_class() is example_class()
    assert example_class().DESCRIPTOR.full_name == "tensorflow.Example"

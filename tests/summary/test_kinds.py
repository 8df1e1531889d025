"""Scalars, histograms, graphs, hyperparameters, images, audio, texts, and embeddings for the projector."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from PIL import Image
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig
from tensorboardX.proto.graph_pb2 import GraphDef
from tensorboardX.writer import SummaryWriter as Peer

import raydist as rd
from raydist.summary.histograms import HistogramCounts, bucket_edges, counted
from raydist.summary.media import clips_of, encode_png, encode_wav, images_of
from raydist.summary.projector import embedding_of, write_embedding
from raydist.summary.runs import module_tree
from tests.refused import check_refused
from tests.summary.reading import curves, pixels


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[rd.summary.SummaryWriter]:
    with rd.summary.create_file_writer(tmp_path) as made, made.as_default(step=0):
        yield made


def test_scalars_and_histograms_take_numbers_of_any_kind(writer: rd.summary.SummaryWriter) -> None:
    for step, data in enumerate([1.5, np.float32(1.5), np.array([1.5]), torch.tensor(1.5), torch.tensor([[1.5]])]):
        assert rd.summary.scalar("x", data, step=step)
    writer.flush()
    assert curves(writer.logdir).scalars("x") == [(step, 1.5) for step in range(5)]
    for values in (torch.ones(2, 3, dtype=torch.bfloat16), [[1, 2], [3, 4]], torch.eye(2).to_sparse()):
        assert rd.summary.histogram("y", values)
    wrong: list[Any] = ["one", torch.ones(2), np.zeros(0), None, 1j]
    told = "scalar 'x' must be one number, got"
    check_refused(lambda data: rd.summary.scalar("x", data), [(each, told) for each in wrong])
    told = "reduce_op of a scalar must be MEAN or SUM, got M"
    wrong = ["max", rd.ReduceOp.MIN]
    check_refused(lambda op: rd.summary.scalar("x", 1.0, reduce_op=op), [(each, told) for each in wrong])
    told = "name of a summary must be a str, got"
    check_refused(lambda name: rd.summary.scalar(name, 1.0), [(each, told) for each in ("", None, 3)])
    told = "histogram 'x' must be of real numbers, got complex64"
    check_refused(lambda data: rd.summary.histogram("x", data), [(torch.ones(2, dtype=torch.complex64), told)])


def test_without_a_writer_nothing_is_looked_at() -> None:
    assert not rd.summary.scalar("x", torch.ones(2))
    assert not rd.summary.histogram("x", "no numbers")


def expected(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Counts by numpy, in all buckets."""
    return np.histogram(values.astype(np.float64), bins=np.concatenate([[-np.inf], bucket_edges()]))[0]


def dense(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found = counted(values)
    counts = np.zeros(len(bucket_edges()), np.int64)
    counts[found.first : found.first + len(found.counts)] = found.counts
    return counts


def test_every_float32_is_counted_where_a_search_finds_it() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    edges = bucket_edges()[np.abs(bucket_edges()) < 3e38].astype(np.float32)
    around = np.concatenate([edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(-np.inf))])
    values = np.concatenate([bits[np.isfinite(bits)], around, np.array([0.0, -0.0], np.float32)])
    assert (dense(values) == expected(values)).all()


def test_numbers_of_every_type_are_counted() -> None:
    for dtype in (np.float64, np.float32, np.int64, np.uint8, np.bool_):
        values = np.arange(-3, 4).astype(dtype)
        found = counted(values.reshape(7, 1))
        assert (dense(values) == expected(values.astype(np.float64))).all(), dtype
        assert (found.total, found.squares) == (float(values.sum()), float(np.square(values.astype(float)).sum()))
        assert (found.least, found.most) == (float(values.min()), float(values.max()))
    found = counted(np.array([np.nan, np.inf, -np.inf, 1.0]))
    assert (found.num_values, found.left_out, found.total) == (1, 3, 1.0)
    assert counted(np.array([np.nan])).num_values == 0
    assert counted(np.zeros(0)).left_out == 0


def test_edges_are_those_of_tensorboard() -> None:
    theirs = Peer(write_to_disk=False).default_bins
    assert bucket_edges()[1:-1].tolist() == theirs
    assert bucket_edges()[0] == -np.finfo(np.float64).max
    assert bucket_edges()[-1] == np.finfo(np.float64).max


def test_histograms_together_are_that_of_all_values() -> None:
    parts = [np.arange(50) / 7, np.zeros(0), np.array([-90.0, 0.5, 100.0, np.nan])]
    first, *others = map(counted, parts)
    joined, whole = first.merged(others), counted(np.concatenate(parts))
    assert isinstance(joined, HistogramCounts)
    assert joined.buckets() == whole.buckets()
    assert (joined.least, joined.most, joined.num_values) == (whole.least, whole.most, 53)
    assert joined.left_out == 1
    assert joined.total == pytest.approx(whole.total)
    assert joined.squares == pytest.approx(whole.squares)
    nothing = counted(np.zeros(0))
    joined = nothing.merged([nothing])
    assert isinstance(joined, HistogramCounts)
    assert joined.buckets() == [(1e-12, 0.0)]


def test_buckets_begin_before_the_first_that_is_filled_and_empty_ones_are_one() -> None:
    buckets = counted(np.array([1.0, 1.0, 5.0])).buckets()
    assert [count for _, count in buckets] == [0.0, 2.0, 0.0, 1.0]
    ends = [end for end, _ in buckets]
    assert ends[0] < 1.0 < ends[1] < ends[2] < 5.0 < ends[3]


class Branches(torch.nn.Module):
    """Torch can't trace it with what it is given."""

    def forward(self, x: Any) -> Any:
        raise KeyError("no such branch")


def graph_of(logdir: Path, module: torch.nn.Module, inputs: Any = None) -> list[str]:
    with rd.summary.create_file_writer(logdir) as writer, writer.as_default():
        assert rd.summary.graph(module, inputs)
    return [node.name for node in curves(logdir).accumulator.Graph().node]


def test_operations_that_torch_traces_or_the_tree_of_modules(tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(3)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), norm)
    assert norm.num_batches_tracked is not None
    names = graph_of(tmp_path / "traced", net, torch.ones(4, 2))
    assert any("Linear" in name for name in names)
    assert int(norm.num_batches_tracked) == 0
    with pytest.warns(UserWarning, match=r"tree of submodules of Branches, because .*no such branch"):
        assert graph_of(tmp_path / "tree", Branches(), torch.ones(1)) == ["Branches"]
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.ReLU()))
    found = GraphDef.FromString(module_tree(net))
    assert [(node.name, node.op) for node in found.node] == [("Sequential/0", "Linear"), ("Sequential/1/0", "ReLU")]
    assert b"weight (3, 2)" in found.node[0].attr["parameters"].s
    with pytest.raises(rd.InvalidArgumentError, match="graph needs a torch.nn.Module, got function"):
        rd.summary.graph(lambda x: x)  # type: ignore[arg-type]  # that is what is tried


def test_hyperparameters_of_all_kinds(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        given = {"lr": 0.1, "layers": 3, "bias": True, "name": "net", "np": np.float32(2), "torch": torch.tensor(1.0)}
        assert rd.summary.hparams(given, metrics=["epoch_loss"])
    found = curves(tmp_path).accumulator
    assert set(found.PluginTagToContent("hparams")) >= {"_hparams_/experiment", "_hparams_/session_start_info"}
    assert b"epoch_loss" in found.PluginTagToContent("hparams")["_hparams_/experiment"]
    told = r"hparams\['.*'\] must be a number, a bool or a str, got"
    wrong: list[tuple[Any, str]] = [
        ({"layers": [1, 2]}, told),
        ({"net": None}, told),
        ([1, 2], "hparams must be a dict, and metrics a list"),
    ]
    check_refused(rd.summary.hparams, wrong)


def test_texts_and_tables_of_them(writer: rd.summary.SummaryWriter) -> None:
    texts: list[Any] = [["a", "b"], [["a", "b"], ["c", "d"]], "a", ("a",)]
    assert all(rd.summary.text("x", each) for each in texts)
    writer.flush()
    shown = [each.tensor_proto for each in curves(writer.logdir).accumulator.Tensors("x")]
    assert [[dim.size for dim in tensor.tensor_shape.dim] for tensor in shown] == [[2], [2, 2], [], [1]]
    wrong: list[Any] = [3, [], ["a", 3], [["a"], ["b", "c"]], [[]], b"a"]
    told = "text 'x' must be a str, a list of str"
    check_refused(lambda data: rd.summary.text("x", data), [(each, told) for each in wrong])


def test_bad_counts_are_refused_where_they_are_shown(writer: rd.summary.SummaryWriter) -> None:
    counts: list[Any] = [(count, "max_outputs must be a number >= 1, got") for count in (0, -1, 1.5)]
    check_refused(lambda count: rd.summary.image("x", torch.zeros(1, 1, 2, 2), max_outputs=count), counts)
    check_refused(lambda count: rd.summary.audio("x", torch.zeros(1, 2, 1), 8000, max_outputs=count), counts)


def test_dimensions_may_be_in_any_order_and_floats_are_scaled() -> None:
    data = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5), dtype=np.uint8)
    orders = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "HWCN": (2, 3, 1, 0), "NCWH": (0, 1, 3, 2)}
    for dataformats, axes in orders.items():
        found = images_of("x", data.transpose(axes), 3, dataformats).images
        assert [picture.tolist() for picture in found] == data.transpose(0, 2, 3, 1).tolist(), dataformats
    data = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert images_of("x", data, 3, "HW").images[0][:, :, 0].tolist() == data.tolist()
    assert images_of("x", data[None], 3, "CHW").images[0].shape == (2, 3, 1)
    assert images_of("x", np.stack([data] * 5), 3, "NHW").images[2].shape == (2, 3, 1)
    floats = np.array([[0.0, 0.5, 1.0]], np.float32)
    assert images_of("x", floats, 1, "HW").images[0].ravel().tolist() == [0, 128, 255]
    for channels in (1, 2, 3, 4):
        picture = np.arange(6 * channels, dtype=np.uint8).reshape(2, 3, channels)
        assert np.reshape(pixels(encode_png(picture)), picture.shape).tolist() == picture.tolist()
    kept = images_of("x", data, 1, "HW")
    data[:] = 7  # the step goes on with it
    assert kept.images[0].max() == 5


def test_pictures_that_are_none() -> None:
    cases: list[tuple[Any, str]] = [
        ((np.zeros((2, 2), np.uint8), "NCHW"), r"must have the dimensions NCHW.*got shape \(2, 2\)"),
        ((np.zeros((1, 5, 2, 2), np.uint8), "NCHW"), "1 to 4 channels"),
        ((np.zeros((1, 1, 0, 2), np.uint8), "NCHW"), "must have the dimensions"),
        ((np.zeros((2, 2), np.int64), "HW"), "must be uint8, or float in .*got int64"),
        ((np.full((2, 2), 255.0), "HW"), "got float from 255 to 255. Scale it"),
        ((np.full((2, 2), np.nan), "HW"), "got float from nan to nan"),
        ((np.full((2, 2), -0.1), "HW"), "got float from -0.1"),
        ((np.zeros((2, 2), np.uint8), "WXY"), "dataformats must say .* got 'WXY'"),
    ]
    check_refused(lambda case: images_of("x", case[0], 3, case[1]), cases)


def test_a_wav_holds_the_samples() -> None:
    data = np.array([[[0.0, 1.0], [-1.0, 0.5]]])
    with wave.open(io.BytesIO(encode_wav(clips_of("x", data, 8000, 3).clips[0], 8000))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth(), file.getnframes()) == (8000, 2, 2, 2)
        assert np.frombuffer(file.readframes(2), "<i2").tolist() == [0, 32767, -32767, 16384]


def test_sounds_that_are_none() -> None:
    cases: list[tuple[Any, str]] = [
        ((np.zeros((4, 2)), 8000), r"must have the shape \(sounds, frames, channels\), got float64 of shape \(4, 2\)"),
        ((np.zeros((1, 4, 0)), 8000), "must have the shape"),
        ((np.full((1, 4, 1), 1.5), 8000), r"must be in \[-1, 1\], got 1.5 to 1.5"),
        ((np.full((1, 4, 1), np.nan), 8000), "got nan to nan"),
        ((np.zeros((1, 4, 1)), 0), "sample_rate must be frames a second, >= 1, got 0"),
        ((np.zeros((1, 4, 1)), 8000.5), "got 8000.5"),
    ]
    check_refused(lambda case: clips_of("x", case[0], case[1], 3), cases)


POINTS = np.arange(6.0).reshape(3, 2)


def config(logdir: Path) -> Any:
    return text_format.Parse((logdir / "projector_config.pbtxt").read_text(), ProjectorConfig())


def test_points_labels_and_pictures_are_beside_each_other(tmp_path: Path) -> None:
    pictures = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 2, 4), np.uint8)
    write_embedding(str(tmp_path), embedding_of("words", POINTS, ["a\tb", "c\nd", "e"], pictures, 7))
    (entry,) = config(tmp_path).embeddings
    assert entry.tensor_name == "words:00007"
    assert np.loadtxt(tmp_path / entry.tensor_path).tolist() == POINTS.tolist()
    assert (tmp_path / entry.metadata_path).read_text() == "a b\nc d\ne\n"
    assert list(entry.sprite.single_image_dim) == [4, 2]
    sprite = np.asarray(Image.open(tmp_path / entry.sprite.image_path))
    assert sprite[::2, ::4].tolist() == [[0, 1], [2, 0]]
    points = embedding_of("words", POINTS, {"word": ["a", "b", "c"], "count": [1, 2, 3]}, None, 0)
    assert points.labels == ("word\tcount", "a\t1", "b\t2", "c\t3")
    for step in (8, 8):
        write_embedding(str(tmp_path), embedding_of("words", POINTS, None, None, step))
    assert [entry.tensor_name for entry in config(tmp_path).embeddings] == ["words:00007", "words:00008"]


def test_no_name_leads_out_of_the_directory(tmp_path: Path) -> None:
    for number, name in enumerate(["../../etc/passwd", "/abs", 'quo"te\n}', "nul\0", "..", "ä/ö"]):
        logs = tmp_path / str(number) / "logs"
        write_embedding(str(logs), embedding_of(name, POINTS, None, None, 0))
        (entry,) = config(logs).embeddings
        assert entry.tensor_name == f"{name}:00000"
        assert (logs / entry.tensor_path).resolve().is_relative_to(logs / "projector")
        assert [path.name for path in logs.parent.iterdir()] == ["logs"]


def test_what_does_not_fit_together() -> None:
    wide, few = np.zeros((3, 1, 8000, 1), np.uint8), np.zeros((2, 1, 2, 2), np.uint8)
    cases: list[tuple[Any, str]] = [
        ((np.zeros(3), None, None), r"must be numbers of shape \(points, dimensions\), got float64 of shape \(3,\)"),
        ((np.zeros((0, 2)), None, None), "must be numbers of shape"),
        ((POINTS, ["a"], None), "must have a label for each of the 3 points, got 1"),
        ((POINTS, {"a": [1, 2, 3], "b": [1]}, None), "got 3, 1"),
        ((POINTS, None, few), "must have a picture for each of the 3 points, got 2"),
        ((POINTS, None, wide), "must fit into 8192 x 8192"),
    ]
    check_refused(lambda case: embedding_of("words", case[0], case[1], case[2], 0), cases)


def test_points_are_in_the_directory_of_the_writer_of_the_driver(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=2):
        assert rd.summary.embedding("words", torch.eye(2), metadata=["a", "b"], images=torch.zeros(2, 1, 2, 2))
        with rd.summary.record_if(False):
            assert not rd.summary.embedding("others", torch.eye(2))
    folder = tmp_path / "projector" / "words-00002"
    assert sorted(path.name for path in folder.iterdir()) == ["metadata.tsv", "sprite.png", "tensors.tsv"]
    with pytest.raises(rd.FailedPreconditionError, match="rd.summary.embedding is for the driver"):
        rd.OneDeviceStrategy("cpu").run(rd.summary.embedding, args=("words", torch.eye(2)))

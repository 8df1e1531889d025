"""Census income, MovieLens and Criteo, from text files as they are published, and from samples of real data."""

from __future__ import annotations

import csv
import gzip
import math
from pathlib import Path

import numpy as np
import pytest

import raydist as rd
from tests.real_data import real_file

ADULT = """39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, \
United-States, <=50K
52, Self-emp-not-inc, 209642, HS-grad, 9, Married-civ-spouse, Exec-managerial, Husband, White, Male, 0, 0, 45, \
United-States, >50K

"""


def test_census_income(tmp_path: Path) -> None:
    (tmp_path / "adult.data").write_text(ADULT)
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + ADULT.replace("50K\n", "50K.\n"))
    (train, test), info = rd.load("census_income", ["train", "test"], with_info=True, data_dir=tmp_path)
    first, second = train.as_numpy_iterator()
    assert (first["age"], first["workclass"], first["hours_per_week"], first["label"]) == (39, "State-gov", 40, 0)
    assert (second["native_country"], second["label"]) == ("United-States", 1)
    assert [row["label"] for row in test.as_numpy_iterator()] == [0, 1]
    assert (info.splits, len(info.features)) == ({"train": 2, "test": 2}, 15)
    features, label = next(
        rd.load("census_income", "train[50%:]", as_supervised=True, data_dir=tmp_path).as_numpy_iterator()
    )
    assert (len(features), features["age"], label) == (14, 52, 1)


def test_files_that_change_are_written_anew(tmp_path: Path) -> None:
    (tmp_path / "adult.data").write_text(ADULT)
    assert len(rd.load("census_income", "train", data_dir=tmp_path)) == 2
    (tmp_path / "adult.data").write_text(ADULT * 3)
    assert len(rd.load("census_income", "train", data_dir=tmp_path)) == 6
    (tmp_path / "adult.data").unlink()
    assert len(rd.load("census_income", "train", data_dir=tmp_path)) == 6, "what was written last"


def test_wrong_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "adult.data"
    for content, problem in [
        (ADULT + "1, 2, 3\n", "Line 4 of .* must have the fields age, workclass"),
        (ADULT.replace("39", "old"), "invalid literal for int"),
        (ADULT.replace(">50K", "rich"), r"Line 2 of .* \(an income must be one of"),
    ]:
        path.write_text(content)
        with pytest.raises(rd.DataLossError, match=problem) as caught:
            rd.load("census_income", "train", data_dir=tmp_path)
        assert caught.value.path == str(path)
    assert list(tmp_path.rglob("*.parquet")) == []


def test_the_real_census(tmp_path: Path) -> None:
    path = real_file("census-income.sample")
    dataset = rd.load("census_income_kdd", "train[10%:]", data_dir=tmp_path, files={"train": path})
    with open(path, newline="") as file:
        lines = [[field.strip() for field in line] for line in csv.reader(file)]
    rows = list(dataset.as_numpy_iterator())
    assert len(rows) == len(lines) - round(len(lines) / 10)
    for row, line in zip(rows, lines[round(len(lines) / 10) :], strict=True):
        values = list(row.values())
        assert len(values) == 42
        assert values[-1] == (line[-1] == "50000+.")
        for value, text in zip(values[:-1], line[1:-1], strict=True):
            assert value == (text if isinstance(value, str) else float(text))


def test_movielens_in_each_of_its_forms(tmp_path: Path) -> None:
    one = tmp_path / "ml-1m"
    one.mkdir()
    (one / "ratings.dat").write_text("1::1193::5::978300760\n1::661::3::978302109\n2::1193::4::978298413\n")
    (one / "movies.dat").write_bytes("661::Café::Drama\n1193::Nest (1975)::Drama|Comedy\n".encode("latin-1"))
    (one / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n")
    first, _, third = rd.load("movielens", "train", data_dir=tmp_path).as_numpy_iterator()
    assert first == {
        **{"user_id": 1, "movie_id": 1193, "rating": 5.0, "timestamp": 978300760},
        **{"title": "Nest (1975)", "genres": "Drama|Comedy"},
        **{"gender": "F", "age": 1, "occupation": "10", "zip": "48067"},
    }
    assert (third["rating"].dtype, third["zip"]) == (np.float32, "70072")
    movies = list(rd.load("movielens/movies", "train", data_dir=tmp_path).as_numpy_iterator())
    assert [row["title"] for row in movies] == ["Café", "Nest (1975)"]
    pairs = list(rd.load("movielens", "train[:1]", as_supervised=True, data_dir=tmp_path).as_numpy_iterator())
    assert pairs == [({"user_id": 1, "movie_id": 1193}, 5.0)]

    small = tmp_path / "small"
    small.mkdir()
    (small / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n")
    (small / "movies.csv").write_text('movieId,title,genres\n31,"American, The (1995)",Drama\n')
    (row,) = rd.load("movielens", "train", data_dir=small).as_numpy_iterator()
    assert (row["rating"], row["title"]) == (2.5, "American, The (1995)")
    (small / "movies.csv").write_text("movieId,title,genres\n32,Other,Drama\n")
    with pytest.raises(rd.DataLossError, match="must be in the tables beside it, but 31 is not"):
        rd.load("movielens", "train", data_dir=small)

    tabs = tmp_path / "ml-100k" / "u.data"
    tabs.parent.mkdir()
    tabs.write_text("196\t242\t3\t881250949\n")
    (row,) = rd.load("movielens", "train", data_dir=tabs.parent).as_numpy_iterator()
    assert row == {"user_id": 196, "movie_id": 242, "rating": 3.0, "timestamp": 881250949}


def test_the_real_ratings(tmp_path: Path) -> None:
    path = real_file("movielens_sample.txt")
    dataset = rd.load("movielens", "train[-50:]", data_dir=tmp_path, files={"train": path})
    with open(path, newline="", encoding="utf-8") as file:
        expected = list(csv.DictReader(file))[-50:]
    for row, line in zip(dataset.as_numpy_iterator(), expected, strict=True):
        assert {name: str(value) if isinstance(value, str) else int(value) for name, value in row.items()} == {
            name: text if name in ("title", "genres", "gender", "occupation", "zip") else int(text)
            for name, text in line.items()
        }


def criteo_line(number: int, label: bool = True) -> str:
    numbers = [str(number * 10 + k) if k != 4 else "" for k in range(13)]
    categories = [f"{number + k:08x}" if k != 7 else "" for k in range(26)]
    return "\t".join([*([str(number % 2)] if label else []), *numbers, *categories]) + "\n"


def test_criteo_lines(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("".join(map(criteo_line, range(100))))
    (tmp_path / "test.txt.gz").write_bytes(gzip.compress(criteo_line(3, label=False).encode()))
    datasets = rd.load("criteo", {"fit": "train[:90%]", "check": "train[90%:]", "blind": "test"}, data_dir=tmp_path)
    assert {name: len(dataset) for name, dataset in datasets.items()} == {"fit": 90, "check": 10, "blind": 1}
    row = next(datasets["check"].as_numpy_iterator())
    assert (row["label"], row["I1"], row["I13"], row["C1"], row["C26"]) == (0, 900, 912, f"{90:08x}", f"{115:08x}")
    assert math.isnan(row["I5"])
    assert (row["C8"], row["I1"].dtype) == ("", np.float32)
    assert "label" not in next(datasets["blind"].as_numpy_iterator())
    with pytest.raises(rd.InvalidArgumentError, match="needs examples with the keys \\['label'\\]"):
        rd.load("criteo", "test", as_supervised=True, data_dir=tmp_path)


def test_the_real_clicks(tmp_path: Path) -> None:
    files = {"train": real_file("criteo_sample.tr.tfrecords"), "test": real_file("criteo_sample.te.tfrecords")}
    (train, test), info = rd.load("criteo", ["train[25%:]", "test"], with_info=True, data_dir=tmp_path, files=files)
    assert (info.splits, len(train), len(test)) == ({"train": 160, "test": 40}, 120, 40)
    features = {"I1": rd.FixedLenFeature((), "float32"), "C26": rd.FixedLenFeature((), "int64")}
    records = [rd.parse_single_example(record, features) for record in rd.TFRecordDataset(str(files["train"]))]
    for row, record in zip(train.as_numpy_iterator(), records[40:], strict=True):
        assert (row["I1"], row["C26"]) == (record["I1"], record["C26"])
        assert row["label"] in (0, 1)

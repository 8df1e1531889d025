"""Tables in text files: census income, MovieLens and Criteo. They are written once, as Parquet."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.dataset import Dataset
from raydist.dataset.readers import TextLineDataset, TFRecordDataset
from raydist.datasets.builder import Examples
from raydist.datasets.file_builder import FileBuilder, SourceFile
from raydist.pipelines.tf_example.features import FixedLenFeature
from raydist.pipelines.tf_example.parse import parse_single_example

Convert = Callable[[str], Any]


def _columns(text: str) -> Mapping[str, Convert]:
    """Return the columns of a table, described by words: a name, and behind ":" the type of numbers."""
    types: Mapping[str, Convert] = {"int": int, "float": float, "": str}
    pairs = (word.partition(":") for word in text.split())
    return {name: types[kind] for name, _, kind in pairs}


_ADULT = _columns(
    """age:int workclass fnlwgt:int education education_num:int marital_status occupation relationship race sex
    capital_gain:int capital_loss:int hours_per_week:int native_country"""
)
_CENSUS_KDD = _columns(
    """age:int class_of_worker detailed_industry_recode:int detailed_occupation_recode:int education wage_per_hour:int
    enroll_in_edu_inst_last_wk marital_stat major_industry_code major_occupation_code race hispanic_origin sex
    member_of_a_labor_union reason_for_unemployment full_or_part_time_employment_stat capital_gains:int
    capital_losses:int dividends_from_stocks:int tax_filer_stat region_of_previous_residence
    state_of_previous_residence detailed_household_and_family_stat detailed_household_summary_in_household
    instance_weight:float migration_code_change_in_msa migration_code_change_in_reg migration_code_move_within_reg
    live_in_this_house_1_year_ago migration_prev_res_in_sunbelt num_persons_worked_for_employer:int
    family_members_under_18 country_of_birth_father country_of_birth_mother country_of_birth_self citizenship
    own_business_or_self_employed:int fill_inc_questionnaire_for_veterans_admin veterans_benefits:int
    weeks_worked_in_year:int year:int"""
)


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not blank. Old files are in Latin 1."""
    compression = "GZIP" if path.endswith(".gz") else None
    for number, line in enumerate(TextLineDataset(path, compression).as_numpy_iterator(), start=1):
        if line.strip():
            try:
                yield number, line.decode()
            except UnicodeDecodeError:
                yield number, line.decode("latin-1")


def _converted(path: str, number: int, fields: Sequence[str], columns: Mapping[str, Convert]) -> dict[str, Any]:
    """Return the fields of a line by name, converted. Raises DataLossError if they do not fit."""
    try:
        return {name: convert(text) for (name, convert), text in zip(columns.items(), fields, strict=True)}
    except ValueError as error:
        raise _loss(
            path, number, f"must have the fields {', '.join(columns):.200}, got {fields!r:.300} ({error})"
        ) from error


def _loss(path: str, number: int, problem: str) -> DataLossError:
    return DataLossError(f"Line {number} of {path!r} {problem}. Restore the file.", path=path)


class _CensusBuilder(FileBuilder):
    """Persons, one a line: fields separated by commas, the last one the class of the income."""

    supervised_keys = (None, "label")
    class_names = {"label": ("at most 50,000", "more than 50,000")}
    columns: ClassVar[Mapping[str, Convert]]

    def examples(self, split: str, paths: Sequence[str]) -> Examples:
        return (row for path in paths for row in self._rows(path))

    def _rows(self, path: str) -> Iterator[dict[str, Any]]:
        columns = {**self.columns, "label": _income}
        for number, line in _lines(path):
            fields = [field.strip() for field in line.split(",")]
            if len(fields) == len(columns) + 1:  # samples begin with the number of the row
                fields = fields[1:]
            if not line.startswith("|"):  # a comment
                yield _converted(path, number, fields, columns)


def _income(text: str) -> int:
    """Return 1 for more than 50,000."""
    kinds = {"<=50K": 0, ">50K": 1, "- 50000": 0, "-50000": 0, "50000+": 1}
    if text.rstrip(".") not in kinds:
        raise ValueError(f"an income must be one of {', '.join(kinds)}")
    return kinds[text.rstrip(".")]


@final
class CensusIncome(_CensusBuilder):
    """The census of 1994 ("adult")."""

    name = "census_income"
    homepage = "https://archive.ics.uci.edu/dataset/20/census+income"
    source = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
    columns = _ADULT
    folders = ("adult",)

    def source_files(self) -> Mapping[str, Sequence[SourceFile]]:
        train = "SHA-256 5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"
        test = "SHA-256 a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"
        return {
            "train": [SourceFile(("adult.data", "adult.data.gz"), train)],
            "test": [SourceFile(("adult.test", "adult.test.gz"), test)],
        }


@final
class CensusIncomeKdd(_CensusBuilder):
    """The censuses of 1994 and 1995."""

    name = "census_income_kdd"
    homepage = "https://archive.ics.uci.edu/dataset/117/census+income+kdd"
    source = "https://archive.ics.uci.edu/dataset/117/census+income+kdd"
    columns = _CENSUS_KDD

    def source_files(self) -> Mapping[str, Sequence[SourceFile]]:
        return {
            "train": [SourceFile(("census-income.data", "census-income.data.gz", "census-income.sample"))],
            "test": [SourceFile(("census-income.test", "census-income.test.gz"))],
        }


_MOVIELENS_COLUMNS = _columns(
    "user_id:int movie_id:int rating:float timestamp:int title genres gender age:int occupation zip"
)
_MOVIELENS_NAMES = {"userId": "user_id", "movieId": "movie_id"}
_RATINGS = ("user_id", "movie_id", "rating", "timestamp")
_TABLES = {"movies": ("movie_id", "title", "genres"), "users": ("user_id", "gender", "age", "occupation", "zip")}


@final
class MovieLens(FileBuilder):
    """Ratings of movies, with title and genres, and what is known of the user.

    Reads the files of every release: "::" between fields (1M, 10M), CSV with a header (20M and later, and CSV files of
    joined tables), and tabs (100K, whose movies are not joined). The config "movies" has the movies alone.
    """

    name = "movielens"
    homepage = "https://grouplens.org/datasets/movielens/"
    source = (
        "https://files.grouplens.org/datasets/movielens/ (ml-1m.zip: SHA-256 "
        "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20; ml-25m.zip: SHA-256 "
        "8b21cfb7eb1706b4ec0aac894368d90acf26ebdfb6aced3ebd4ad5bd1eb9c6aa)"
    )
    folders = ("ml-1m", "ml-10M100K", "ml-20m", "ml-25m", "ml-32m", "ml-latest", "ml-latest-small", "ml-100k")
    supervised_keys = (("user_id", "movie_id"), "rating")

    def source_files(self) -> Mapping[str, Sequence[SourceFile]]:
        if self.config not in (None, "ratings", "movies"):
            raise InvalidArgumentError(f"The config of 'movielens' must be ratings or movies, got {self.config!r}.")
        stem = self.config or "ratings"
        more = ("u.data",) if stem == "ratings" else ()
        return {"train": [SourceFile((f"{stem}.dat", f"{stem}.csv", *more))]}

    def examples(self, split: str, paths: Sequence[str]) -> Examples:
        return (row for path in paths for row in self._joined(path))

    def files_beside(self, path: str) -> list[str]:
        folder, suffix = os.path.dirname(path), os.path.splitext(path)[1]
        tables = (os.path.join(folder, stem + suffix) for stem in _TABLES if stem != _stem(path))
        return [table for table in tables if os.path.isfile(table)]

    def _joined(self, path: str) -> Iterator[dict[str, Any]]:
        if self.config == "movies":
            yield from _movielens_rows(path, _TABLES["movies"])
            return
        tables = {_stem(beside): beside for beside in self.files_beside(path)}
        movies, users = (_by_first(tables.get(stem), names) for stem, names in _TABLES.items())
        for row in _movielens_rows(path, _RATINGS):
            try:
                yield {**row, **(movies[row["movie_id"]] if movies else {}), **(users[row["user_id"]] if users else {})}
            except KeyError as error:
                raise DataLossError(
                    f"Every movie and user of {path!r} must be in the tables beside it, but {error} is not: {row!r}.",
                    path=path,
                ) from error


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _by_first(path: str | None, names: Sequence[str]) -> Mapping[int, Mapping[str, Any]]:
    """Return the rows of a table by their first field; nothing if there is no table."""
    return {} if path is None else {row[names[0]]: row for row in _movielens_rows(path, names)}


def _movielens_rows(path: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    lines = _lines(path)
    separator = {".dat": "::", ".data": "\t"}.get(os.path.splitext(path)[1])

    def split(line: str) -> list[str]:
        return next(csv.reader([line])) if separator is None else line.split(separator)

    if separator is None:
        _, header = next(lines, (0, ""))
        names = [_MOVIELENS_NAMES.get(name, name) for name in split(header)]
        unknown = [name for name in names if name not in _MOVIELENS_COLUMNS]
        if unknown:
            raise _loss(path, 1, f"must name columns of {', '.join(_MOVIELENS_COLUMNS)}, got {unknown!r:.200}")
    columns = {name: _MOVIELENS_COLUMNS[name] for name in names}
    for number, line in lines:
        row = _converted(path, number, split(line), columns)
        yield {name: np.float32(value) if name == "rating" else value for name, value in row.items()}


_NUMBERS = tuple(f"I{number}" for number in range(1, 14))
_CATEGORIES = tuple(f"C{number}" for number in range(1, 27))


@final
class Criteo(FileBuilder):
    """Clicks on advertisements: 13 numbers and 26 categories of each view, and whether it was clicked.

    In lines of text, a number that is missing is NaN, and a category is str, empty where it is missing. In TFRecords,
    whose categories are numbered, a category is int64.
    """

    name = "criteo"
    homepage = "https://ailab.criteo.com/ressources/criteo-1tb-click-logs-dataset-for-mlperf/"
    source = "https://ailab.criteo.com/ressources/"
    supervised_keys = (None, "label")

    def source_files(self) -> Mapping[str, Sequence[SourceFile]]:
        return {
            "train": [SourceFile(("train.txt", "train.txt.gz", "criteo_sample.tr.tfrecords"))],
            "test": [SourceFile(("test.txt", "test.txt.gz", "criteo_sample.te.tfrecords"))],
        }

    def examples(self, split: str, paths: Sequence[str]) -> Examples:
        if ".tfrecord" in os.path.basename(paths[0]):
            return TFRecordDataset(list(paths)).map(_parsed, num_parallel_calls=None)
        return self._from_lines(paths)

    def _from_lines(self, paths: Sequence[str]) -> Dataset:
        _, first = next(_lines(paths[0]), (0, ""))
        names = (*_NUMBERS, *_CATEGORIES)
        if first.count("\t") == len(names):
            names = ("label", *names)
        types: dict[str, Any] = {**dict.fromkeys(_NUMBERS, np.float32), **dict.fromkeys(_CATEGORIES, str)}
        if "label" in names:
            types["label"] = np.int64
        return Dataset.from_csv(
            list(paths),
            column_names=names,
            column_types=types,
            column_defaults={**dict.fromkeys(_NUMBERS, float("nan")), **dict.fromkeys(_CATEGORIES, "")},
            delimiter="\t",
            compression_type="GZIP" if paths[0].endswith(".gz") else None,
        )


_RECORD_FEATURES = {
    "label": FixedLenFeature((), np.float32),
    **{name: FixedLenFeature((), np.float32) for name in _NUMBERS},
    **{name: FixedLenFeature((), np.int64) for name in _CATEGORIES},
}


def _parsed(record: bytes) -> dict[str, Any]:
    found = parse_single_example(record, _RECORD_FEATURES)
    return {**found, "label": np.int64(found["label"])}

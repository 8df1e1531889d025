"""Columns that TensorFlow's results are recorded of: expressions that raydist and TensorFlow both understand.

`fc` is `rd.feature` or `tf.feature_column`, `table` makes an initializer that fills a table with `table_values`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Lists of one length are dense arrays, others sparse ones.
FEATURES: dict[str, Any] = {
    "age": [17.5, 18.0, -3.0, 65.0, 1e6],
    "sizes": [[0.1, 2.0], [0.3, -1.0], [2.5, 7.0], [1.0, 1.0], [0.0, 99.0]],
    "city": ["Rome", "Oslo", "", "São Paulo", "Rome"],
    "words": [["a", "b"], ["", "d"], ["b", "b"], ["", ""], ["a much longer word of more than thirty-two bytes", "c"]],
    "number": [7, -1, 0, 123456789, 3],
    "numbers": [[1, 5], [-1, 2], [9, 9], [0, -1], [4, 100]],
    "terms": [["very", "model"], [], ["when", "course", "human"], ["model"], ["model", "model", ""]],
    "frequency": [[0.5, 0.25], [], [1.0, 2.0, -0.5], [0.0], [1.5, 0.5, 3.0]],
    "video": [[3], [], [1, 4, 1], [12], [-2, 0]],
    "places": [[0.5, 1.5], [0.0, 2.0], [1.0, 1.0], [0.0, 0.0], [3.0, 0.25]],
}

_TERMS = "fc.categorical_column_with_vocabulary_list('terms', ['model', 'very', 'when'], num_oov_buckets=3)"
_WORDS = "fc.categorical_column_with_vocabulary_list('words', ['a', 'b', 'c'])"
_AGE = "fc.bucketized_column(fc.numeric_column('age'), [0.0, 18.0, 65.0])"
_SIZES = "fc.bucketized_column(fc.numeric_column('sizes', shape=(2,)), [0.3, 1.0, 5.0])"
_NUMBERS = "fc.categorical_column_with_hash_bucket('numbers', 11, dtype=int64)"
_WEIGHTED = f"fc.weighted_categorical_column({_TERMS}, 'frequency')"
_WEIGHTED_WORDS = f"fc.weighted_categorical_column({_WORDS}, 'places')"

CATEGORICAL = [
    _TERMS,
    _WORDS,
    _AGE,
    _SIZES,
    _NUMBERS,
    "fc.categorical_column_with_vocabulary_list('words', ['c', 'd'], default_value=1)",
    "fc.categorical_column_with_vocabulary_list('numbers', [9, 0, 5], num_oov_buckets=4)",
    "fc.categorical_column_with_vocabulary_list('city', ['São Paulo', 'Rome'], num_oov_buckets=2)",
    "fc.categorical_column_with_vocabulary_file('terms', file, num_oov_buckets=2)",
    "fc.categorical_column_with_vocabulary_file('terms', file, vocabulary_size=2)",
    "fc.categorical_column_with_hash_bucket('city', 13)",
    "fc.categorical_column_with_hash_bucket('words', 17)",
    "fc.categorical_column_with_hash_bucket('terms', 19)",
    "fc.categorical_column_with_hash_bucket('number', 23, dtype=int64)",
    "fc.categorical_column_with_identity('video', 13)",
    "fc.categorical_column_with_identity('numbers', 8, default_value=3)",
    _WEIGHTED,
    "fc.crossed_column(['city', 'words'], 101)",
    "fc.crossed_column(['terms', 'words'], 103)",
    "fc.crossed_column(['words', 'terms'], 103)",
    f"fc.crossed_column(['city', {_AGE}], 107)",
    f"fc.crossed_column([{_AGE}, 'city', {_SIZES}], 109)",
    f"fc.crossed_column(['city', fc.crossed_column([{_WORDS}, {_AGE}], 5)], 113)",
    f"fc.crossed_column([{_WORDS}, {_TERMS}], 127, hash_key=42)",
    "fc.crossed_column([fc.categorical_column_with_identity('numbers', 101), 'city'], 2147483647)",
]
DENSE = [
    "fc.numeric_column('age')",
    "fc.numeric_column('sizes', shape=2)",
    "fc.numeric_column('age', normalizer_fn=lambda x: (x - 3.0) / 4.0)",
    _AGE,
    _SIZES,
    *(f"fc.indicator_column({column})" for column in CATEGORICAL if "2147483647" not in column),
    *(f"fc.embedding_column({_TERMS}, 3, combiner={each!r}, initializer=table)" for each in ("mean", "sqrtn", "sum")),
    *(
        f"fc.embedding_column({_WEIGHTED}, 2, combiner={each!r}, initializer=table)"
        for each in ("mean", "sqrtn", "sum")
    ),
    f"fc.embedding_column({_WORDS}, 2, initializer=table, max_norm=0.5)",
    f"fc.embedding_column({_WEIGHTED}, 4, combiner='sum', initializer=table, max_norm=1.0)",
    f"fc.embedding_column({_AGE}, 2, initializer=table)",
]
LINEAR = [
    f"[{_TERMS}, {_AGE}, {_SIZES}, fc.numeric_column('sizes', shape=2), fc.indicator_column({_WORDS}), {_WEIGHTED}]",
    f"[fc.crossed_column(['city', {_AGE}], 107), {_NUMBERS}, fc.numeric_column('age', normalizer_fn=lambda x: x / 64)]",
]


def table_values(num_rows: int, dim: int) -> np.ndarray:
    """Numbers that float32 holds exactly, different in neighbouring rows."""
    places = np.arange(num_rows * dim).reshape(num_rows, dim)
    return ((places * 7) % 11 - 5).astype(np.float32) / 4


def hashed_bytes(length: int) -> bytes:
    """A string to hash, of all byte values."""
    return bytes((37 * place + length) % 256 for place in range(length))


LENGTHS = [*range(131), 191, 192, 193, 255, 256, 257, 1000, 4096]

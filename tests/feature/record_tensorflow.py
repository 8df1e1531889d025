"""Write `tensorflow_values.json`: TensorFlow's results for the columns of `tensorflow_cases.py`.

pip install tensorflow-cpu==2.21.0 tf_keras==2.21.0
TF_USE_LEGACY_KERAS=1 PYTHONPATH=. python tests/feature/record_tensorflow.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.feature.tensorflow_cases import CATEGORICAL, DENSE, FEATURES, LENGTHS, LINEAR, hashed_bytes, table_values


def features() -> dict[str, Any]:
    found = {}
    for name, rows in FEATURES.items():
        is_ragged = isinstance(rows[0], list) and len({len(row) for row in rows}) > 1
        dtype = tf.float32 if name == "frequency" else None
        found[name] = tf.ragged.constant(rows, dtype).to_sparse() if is_ragged else tf.constant(rows)
        if found[name].dtype == tf.int32:
            found[name] = tf.cast(found[name], tf.int64)
    return found


def names(vocabulary: str) -> dict[str, Any]:
    def table(shape: Any, dtype: Any = None, **_: Any) -> Any:
        return tf.constant(table_values(*shape))

    return {"fc": tf.feature_column, "table": table, "int64": tf.int64, "file": vocabulary}


def ids_of(column: Any) -> list[list[int]]:
    """The ids of a categorical column as a list for each row."""
    from tensorflow.python.feature_column import feature_column_v2 as v2

    found = column.get_sparse_tensors(v2.FeatureTransformationCache(features()), None)
    rows: list[list[int]] = [[] for _ in range(5)]
    for (row, *_), value in zip(found.id_tensor.indices.numpy(), found.id_tensor.values.numpy(), strict=True):
        rows[row].append(int(value))
    return rows


def linear(columns: str, vocabulary: str) -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        made = eval(columns, names(vocabulary))
        variables: dict[Any, Any] = {}
        result = tf.compat.v1.feature_column.linear_model(features(), made, units=2, cols_to_vars=variables)
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.tables_initializer()])
        for variable in (variable for each in variables.values() for variable in each):
            values = table_values(*variable.shape) if len(variable.shape) > 1 else np.array([0.5, -0.5])
            session.run(variable.assign(values))
        return session.run(result).tolist()


def main() -> None:
    vocabulary = str(Path(tempfile.mkdtemp()) / "terms.txt")
    Path(vocabulary).write_text("human\nmodel\nvery\n")
    strings = [hashed_bytes(length) for length in LENGTHS]
    values = {
        "tensorflow": tf.__version__,
        "hashes": tf.strings.to_hash_bucket_fast(strings, 2**63 - 1).numpy().tolist(),
        "ids": {each: ids_of(eval(each, names(vocabulary))) for each in CATEGORICAL},
        "dense": {
            each: tf.keras.layers.DenseFeatures([eval(each, names(vocabulary))])(features()).numpy().tolist()
            for each in DENSE
        },
        "linear": {each: linear(each, vocabulary) for each in LINEAR},
    }
    text = json.dumps(values, indent=None, separators=(",", ":"))
    Path(__file__).with_name("tensorflow_values.json").write_text(text + "\n")


if __name__ == "__main__":
    import tensorflow as tf

    main()

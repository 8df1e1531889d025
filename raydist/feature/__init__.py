"""Feature columns: from dicts of features to numbers and ids, by rules that are described, adapted to data, and saved.

Names, arguments and results are those of `tf.feature_column`. A `FeatureSpace` works on batches in a pipeline; the
modules `rd.DenseFeatures` and `rd.LinearModel` take what it gives::

    age = rd.feature.numeric_column("age", normalizer_fn=rd.feature.Normalization())
    ages = rd.feature.bucketized_column(rd.feature.numeric_column("age"), rd.feature.AdaptedBoundaries(8))
    job = rd.feature.categorical_column_with_vocabulary_list("job", rd.feature.AdaptedVocabulary(max_terms=1000))
    columns = [age, rd.feature.embedding_column(job, 8), rd.feature.crossed_column([ages, job], 10_000)]

    space = rd.feature.FeatureSpace(columns).adapt(people.batch(1024))
    batches = people.batch(256).map(space.transform)

Nothing here needs torch or Ray.
"""

from __future__ import annotations

from raydist.feature.categorical import CrossedColumn as crossed_column
from raydist.feature.categorical import HashedColumn as categorical_column_with_hash_bucket
from raydist.feature.categorical import IdentityColumn as categorical_column_with_identity
from raydist.feature.categorical import VocabularyColumn as categorical_column_with_vocabulary_list
from raydist.feature.categorical import WeightedColumn as weighted_categorical_column
from raydist.feature.categorical import (
    categorical_column_with_vocabulary_file as categorical_column_with_vocabulary_file,
)
from raydist.feature.columns import BucketizedColumn as bucketized_column
from raydist.feature.columns import EmbeddingColumn as embedding_column
from raydist.feature.columns import IndicatorColumn as indicator_column
from raydist.feature.columns import NumericColumn as numeric_column
from raydist.feature.columns import make_parse_example_spec as make_parse_example_spec
from raydist.feature.feature_space import FeatureSpace as FeatureSpace
from raydist.feature.settings import AdaptedBoundaries as AdaptedBoundaries
from raydist.feature.settings import AdaptedVocabulary as AdaptedVocabulary
from raydist.feature.settings import Normalization as Normalization

__all__ = [
    "AdaptedBoundaries",
    "AdaptedVocabulary",
    "FeatureSpace",
    "Normalization",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "indicator_column",
    "make_parse_example_spec",
    "numeric_column",
    "weighted_categorical_column",
]

"""Who earns much: a wide and deep estimator over feature columns of the census, trained and evaluated by turns.

    python examples/census_estimator.py                                    # in this process
    python examples/census_estimator.py --strategy mirrored --replicas 2   # on two replicas
    python examples/census_estimator.py --model-dir run                    # run it again: it goes on

A part of the census comes with the examples; `--data` names a CSV file with the same columns.
"""

from __future__ import annotations

import argparse
import functools
import logging
from pathlib import Path
from typing import Any

import torch

import raydist as rd
from chosen_strategy import add_strategy_flags, make_strategy
from click_data import BUILT_IN

fc = rd.feature
NUMBERS = ("age", "capital_gains", "capital_losses", "dividends", "weeks_worked")
WORDS = ("class_of_worker", "education", "marital_status", "occupation", "sex", "tax_filer", "household")
INCOMES = ("- 50000.", "50000+.")


def features_and_income(row: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The elements of an estimator's data."""
    return row, row["income"]


def make_columns(known: rd.Dataset) -> tuple[list[Any], list[Any]]:
    """Columns for the wide part, which remembers combinations, and for the deep one, which generalises."""
    words = [fc.categorical_column_with_vocabulary_list(name, fc.AdaptedVocabulary()) for name in WORDS]
    ages = fc.bucketized_column(fc.numeric_column("age"), fc.AdaptedBoundaries(8))
    wide = [ages, *words, fc.crossed_column([ages, "education"], 1000), fc.crossed_column(["sex", "household"], 1000)]
    deep = [
        *(fc.numeric_column(name, normalizer_fn=fc.Normalization()) for name in NUMBERS),
        *(fc.embedding_column(word, 4) for word in words),
    ]
    columns = list(fc.FeatureSpace([*wide, *deep]).adapt(known).columns)
    return columns[: len(wide)], columns[len(wide) :]


def main() -> None:
    parser = add_strategy_flags(argparse.ArgumentParser(description=__doc__))
    parser.set_defaults(strategy="one_device")
    parser.add_argument("--data", type=Path, default=BUILT_IN, help="a CSV file; default: a part of the census")
    parser.add_argument("--model-dir", type=Path, help="directory of checkpoints and curves; default: a temporary one")
    parser.add_argument("--steps", type=int, default=300, help="global step to train to")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--smoke", action="store_true", help="few steps, to see that it runs")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    rows = rd.Dataset.from_csv(str(args.data))
    held_out = rows.shard(5, 0)
    known = rows.enumerate().filter(lambda number, row: number % 5 != 0).map(lambda number, row: row)
    wide, deep = make_columns(known.batch(256))
    with make_strategy(args.strategy, args.replicas) as strategy:
        estimator = rd.DNNLinearCombinedClassifier(
            args.model_dir,
            linear_feature_columns=wide,
            dnn_feature_columns=deep,
            dnn_optimizer=functools.partial(torch.optim.Adagrad, lr=0.05),
            dnn_hidden_units=[32, 16],
            label_vocabulary=INCOMES,
            config=rd.RunConfig(train_distribute=strategy, tf_random_seed=0, save_checkpoints_steps=100),
        )
        train_spec = rd.TrainSpec(
            lambda: known.shuffle(10_000, seed=0).batch(args.batch_size).map(features_and_income).repeat(),
            max_steps=10 if args.smoke else args.steps,
        )
        eval_spec = rd.EvalSpec(lambda: held_out.batch(256).map(features_and_income), throttle_secs=0)
        results = rd.train_and_evaluate(estimator, train_spec, eval_spec)
        for name, value in sorted(results.items()):
            print(f"{name}: {value:.4f}")
        first = next(estimator.predict(eval_spec.input_fn, predict_keys=["classes", "probabilities"]))
        print(f"the first person: {first['classes'][0]}, probability {first['probabilities'].max():.3f}")


if __name__ == "__main__":
    main()

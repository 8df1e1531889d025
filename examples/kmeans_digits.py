"""Cluster handwritten digits by k-means, without their labels, and draw the centers as a picture.

    python examples/kmeans_digits.py                        # in this process
    python examples/kmeans_digits.py --replicas 2           # on two replicas
    python examples/kmeans_digits.py --picture centers.png  # needs pip install 'raydist[images]'

Each row of the picture has the centers of the clusters whose rows are mostly one digit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import raydist as rd
from digits_common import NUM_CLASSES, Images, load_images, split


def as_vectors(pixels: np.ndarray) -> np.ndarray:
    """A batch of images as rows of numbers in 0 .. 1."""
    vectors: np.ndarray = pixels.reshape(len(pixels), -1) / 255
    return vectors


def main_digits(clusters: np.ndarray, labels: np.ndarray, num_clusters: int) -> np.ndarray:
    """The digit that is most frequent in each cluster."""
    counts = np.zeros((num_clusters, NUM_CLASSES), dtype=np.int64)
    np.add.at(counts, (clusters, labels), 1)
    most_frequent: np.ndarray = counts.argmax(axis=1)
    return most_frequent


def draw(centers: np.ndarray, digits: np.ndarray, shape: tuple[int, ...], scale: int = 6) -> np.ndarray:
    """All centers on one picture, uint8: a row for each digit, black where it has no more."""
    height, width = shape
    columns = max(np.bincount(digits, minlength=NUM_CLASSES))
    picture = np.zeros((NUM_CLASSES * height, columns * width))
    used = [0] * NUM_CLASSES
    for center, digit in zip(centers, digits, strict=True):
        top, left = digit * height, used[digit] * width
        picture[top : top + height, left : left + width] = center.reshape(shape)
        used[digit] += 1
    return (255 * picture.clip(0, 1)).astype(np.uint8).repeat(scale, axis=0).repeat(scale, axis=1)


def cluster(train: Images, num_clusters: int, replicas: int | None, batch_size: int) -> rd.ml.KMeans:
    """Find the clusters of the training images."""
    data = rd.Dataset.from_tensor_slices(train.pixels).batch(batch_size).map(as_vectors)
    model = rd.ml.KMeans(num_clusters, random_state=0)
    if replicas is None:
        return model.fit(data)
    with rd.MirroredStrategy(replicas) as strategy, strategy.scope():
        return model.fit(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an .npz file of images and labels; default: scikit-learn's digits")
    parser.add_argument("--clusters", type=int, default=40)
    parser.add_argument("--replicas", type=int, help="replicas on this machine; default: this process")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--picture", type=Path, help="a file for the picture of the centers, .png for example")
    parser.add_argument("--smoke", action="store_true", help="few images, to see that it runs")
    args = parser.parse_args()

    train, test = split(load_images(args.data), smoke=args.smoke)
    model = cluster(train, args.clusters, args.replicas, args.batch_size)
    digits = main_digits(model.predict(as_vectors(train.pixels)), train.labels, args.clusters)
    found = digits[model.predict(as_vectors(test.pixels))]
    print(f"{model.n_iter_} iterations, inertia {model.inertia_:.1f}")
    print(f"test accuracy: {(found == test.labels).mean():.3f}")
    if args.picture is not None:
        from PIL import Image

        Image.fromarray(draw(model.cluster_centers_, digits, train.pixels.shape[1:])).save(args.picture)
        print(f"picture: {args.picture}")


if __name__ == "__main__":
    main()

"""Train on handwritten digits, export the model, serve it with Ray Serve, and replace it by a better one meanwhile.

python examples/export_and_serve.py                  # needs pip install 'raydist[serve]'
python examples/export_and_serve.py --keep           # serves until Ctrl-C; then, in another terminal:
curl http://127.0.0.1:8000/v1/models/digits/metadata
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import serve

import raydist as rd
from digits_common import LEARNING_RATE, Images, build_network, load_images, make_parser, split, to_inputs


def make_model(images: Images) -> rd.Model:
    torch.manual_seed(0)
    model = rd.Model(build_network(*images.pixels.shape[1:]))
    model.compile(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), torch.nn.CrossEntropyLoss())
    return model


def fit_and_export(model: rd.Model, images: Images, folder: Path, args: argparse.Namespace, *, epochs: int) -> None:
    """Train, and write the next version."""
    x, y = to_inputs(images.pixels, images.labels)
    model.fit(x, y, batch_size=args.batch_size, epochs=epochs, verbose=False)
    print(f"exported: {model.export(folder, x[:1])}")


def ask(url: str, body: Any = None) -> Any:
    """The answer of the server, which is that of TensorFlow Serving."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=60) as answer:  # noqa: S310 - http
        return json.load(answer)


def served_accuracy(url: str, images: Images) -> float:
    """Of predictions for test images, several rows in each request."""
    x, labels = to_inputs(images.pixels, images.labels)
    answers = [ask(f"{url}:predict", {"instances": part.tolist()}) for part in np.array_split(x, 10)]
    logits = np.array([row for answer in answers for row in answer["predictions"]])
    return float((logits.argmax(axis=1) == labels).mean())


def version_of(url: str) -> int:
    return int(ask(url)["model_version_status"][0]["version"])


def main() -> None:
    parser = make_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", type=Path, help="the directory of versions; default: a new one")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--keep", action="store_true", help="serve until Ctrl-C")
    args = parser.parse_args()
    train, test = split(load_images(args.data), smoke=args.smoke)
    folder = args.models or Path(tempfile.mkdtemp())

    model = make_model(train)
    fit_and_export(model, train, folder, args, epochs=1)

    serve.start(http_options={"port": args.port})
    serve.run(rd.serve.app(folder, "digits"), name="digits")
    url = f"http://127.0.0.1:{args.port}/v1/models/digits"
    first = version_of(url)
    print(f"version {first}: accuracy {served_accuracy(url, test):.3f}")

    # The server finds the new version by itself, and no request fails meanwhile.
    fit_and_export(model, train, folder, args, epochs=args.epochs)
    while version_of(url) == first:
        time.sleep(0.1)
    print(f"version {version_of(url)}: accuracy {served_accuracy(url, test):.3f}")

    try:
        while args.keep:
            time.sleep(1)
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()

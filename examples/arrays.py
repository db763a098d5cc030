"""Cluster an array of images, compare with k-means on the pixels, then save and load the model.

    python examples/arrays.py [EPOCHS] [IMAGES]

The array is scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. Without EPOCHS training takes a few minutes on two
CPU cores. The true digits are used for scoring only.
"""

import sys
import tempfile
from typing import Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

from secu import SeCu
from secu.cluster.metrics import accuracy


def progress(record: dict[str, Any]) -> None:
    """Print every tenth epoch; a record holds more than this."""
    if record["epoch"] % 10 == 0:
        print(f"epoch {record['epoch']}: loss {record['loss']:.3f}, {record['changed']:.0%} changed their cluster")


def main(epochs: str = "", images: str = "1797") -> None:
    """Cluster the digits both ways, and print the share in the right cluster."""
    digits = load_digits()
    pixels = (digits.images[: int(images)] / 16 * 255).astype(np.uint8)  # (N, 8, 8)
    truth = digits.target[: int(images)]

    model = SeCu(n_clusters=10, random_state=0, epochs=int(epochs) if epochs else None, callback=progress).fit(pixels)
    kmeans = KMeans(10, n_init=10, random_state=0).fit_predict(pixels.reshape(len(pixels), -1))
    print(f"k-means on pixels: {accuracy(truth, kmeans):.1%} right; SeCu: {model.score(pixels, truth):.1%}")
    for warning in model.warnings_:
        print(f"warning: {warning}")

    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/run")  # config.yaml, model.safetensors and a few tables: nothing in it is a pickle
        again = SeCu.load(f"{folder}/run")
    print(f"the first five, by the saved model: {again.predict(pixels[:5])}, by the fit: {model.labels_[:5]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

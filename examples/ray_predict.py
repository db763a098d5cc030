"""Assign any number of photos to the clusters of a run with Ray, on one machine or on a cluster.

    python examples/ray_predict.py RUN PHOTOS OUT [WORKERS]

Needs ``pip install 'ray[data]'``. Every worker loads the model once and then gets batches of paths; the results are
written to OUT as Parquet files. A photo that cannot be read ends the job; ``secu predict`` skips it instead.
"""

import sys
from pathlib import Path
from typing import Any

import ray

from secu import SeCu


class Assign:
    """A worker with a model of its own."""

    def __init__(self, run: str) -> None:
        self.model = SeCu.load(run, device="cpu")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the cluster of each photo."""
        return {"path": batch["path"], "cluster": self.model.predict(list(batch["path"]))}


def main(run: str, photos: str, out: str, workers: str = "2") -> None:
    """Assign all photos in a folder."""
    suffixes = (".jpg", ".jpeg", ".png")
    paths = sorted(str(path) for path in Path(photos).rglob("*") if path.suffix.lower() in suffixes)
    rows = ray.data.from_items([{"path": path} for path in paths])
    options: Any = {"fn_constructor_args": (run,), "concurrency": int(workers), "batch_size": 64}
    rows.map_batches(Assign, **options).write_parquet(out)
    print(f"{len(paths)} photos: see {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])

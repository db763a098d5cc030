"""Cluster a folder of pictures and write a report.

    python examples/folder.py PHOTOS [CLUSTERS] [EPOCHS] [RUN]

PHOTOS may be a folder, a glob such as 'photos/*.jpg', a .zip, or anything else that ``secu fit`` accepts; sizes and
formats may be mixed. EPOCHS is chosen automatically by default. RUN must be a new folder; by default it is runs/photos.
"""

import sys

import numpy as np

from secu import SeCu


def main(source: str, clusters: str = "10", epochs: str = "", out: str = "runs/photos") -> None:
    """Cluster the pictures, and print one line per cluster."""
    model = SeCu(int(clusters), epochs=int(epochs) if epochs else None, out=out, verbose=1).fit(source)

    for cluster in range(model.n_clusters):
        members = np.flatnonzero(model.labels_ == cluster)
        print(f"cluster {cluster}: {len(members)} pictures, such as {', '.join(model.ids_[members[:3]])}")

    print(f"open {out}/report.html; for new pictures: SeCu.load({out!r}).predict(['new.jpg'])")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Cluster a folder of pictures and leave a report to look at.

    python examples/folder.py PHOTOS [CLUSTERS] [EPOCHS] [RUN]

PHOTOS may be a folder, a glob such as 'photos/*.jpg', a .zip, or whatever else ``secu fit`` takes; sizes and formats
may be mixed. Without EPOCHS, training is as long as the number of pictures asks for. RUN must be a new folder; without
one it is runs/photos.
"""

import sys

import numpy as np

from secu import SeCu


def main(source: str, clusters: str = "10", epochs: str = "", out: str = "runs/photos") -> None:
    """Cluster, and print a line a cluster."""
    model = SeCu(int(clusters), epochs=int(epochs) if epochs else None, out=out, verbose=1).fit(source)

    for cluster in range(model.n_clusters):
        members = np.flatnonzero(model.labels_ == cluster)
        print(f"cluster {cluster}: {len(members)} pictures, such as {', '.join(model.ids_[members[:3]])}")

    print(f"look at {out}/report.html; for new pictures: SeCu.load({out!r}).predict(['new.jpg'])")


if __name__ == "__main__":
    main(*sys.argv[1:])

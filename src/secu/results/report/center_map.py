"""The map of clusters: the centers of the own clusters and of the leaves of the tree in two dimensions."""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from secu.results.found import Results
from secu.results.report.layout import lay_out, principal_components, to_unit_square
from secu.results.report.values import Floats, floats

MOST_CENTERS = 4_000  # for t-SNE; more would take too long, and are laid out by principal components


def center_map(results: Results) -> dict[str, Any]:
    """Return positions of the own clusters and, if they are others, of the leaves, from 0 to 1."""
    found = results.leaves
    parts = [results.centers]
    if found is not None and found.column(results.predictions.cluster) is not None:
        parts.append(found.centers)
    points = place(floats(normalize(torch.cat(parts), dim=-1)))
    x, y = points.round(4).T.tolist()
    clusters = len(results.centers)
    return {"x": x[:clusters], "y": y[:clusters], "leafX": x[clusters:], "leafY": y[clusters:]}


def place(centers_CD: Floats) -> Floats:
    """Return the position of each center, those that are alike close together."""
    if len(centers_CD) <= MOST_CENTERS:
        return lay_out(centers_CD).points
    return np.asarray(to_unit_square(principal_components(centers_CD)[:, :2]))

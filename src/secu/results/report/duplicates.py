"""Groups of near-duplicates: images that are the same picture."""

from typing import Any

import numpy as np

from secu.results.found import Results

MOST_GROUPS = 60  # that are shown
MOST_PICTURES = 6  # of a group that are shown


def duplicate_groups(results: Results) -> dict[str, Any]:
    """Return the largest groups, the image to keep first; how many images each has; and how many groups there are."""
    if not results.duplicates or results.kept is None:
        return {"groups": [], "sizes": [], "total": 0}
    kept_U, sizes_U = np.unique(results.kept, return_counts=True)
    several_U = sizes_U > 1
    kept_U = kept_U[several_U]
    sizes_U = sizes_U[several_U]
    shown = np.argsort(-sizes_U, kind="stable")[:MOST_GROUPS]
    groups = []
    for kept in kept_U[shown].tolist():
        members = np.flatnonzero(results.kept == kept)
        groups.append([kept, *members[members != kept][: MOST_PICTURES - 1].tolist()])
    return {
        "groups": groups,
        "sizes": sizes_U[shown].tolist(),
        "total": len(kept_U),
    }

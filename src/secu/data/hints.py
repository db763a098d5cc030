"""The user's hints about some images: names, and pairs that belong together or apart, turned into groups.

Images that have the same name, or are linked directly or through others, form a group: they belong in one cluster.
Groups with different names, and pairs of groups that a link keeps apart, belong in different clusters.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError, shortened
from secu.base.names import printable

NO_GROUP = -1
Pair = tuple[int, int]


class Hints(NamedTuple):
    """The groups of N images."""

    group: NDArray[np.int64]  # of each image (N,), or NO_GROUP
    names: tuple[str, ...]  # of the first groups, in different clusters; the other groups have none
    apart: tuple[Pair, ...]  # groups in different clusters, at least one of which has no name

    def select(self, rows: Sequence[int]) -> "Hints":
        """Return the hints of the images in the given rows."""
        return self._replace(group=self.group[np.asarray(rows, np.int64)])

    def checksum(self, ids: Sequence[str]) -> str:
        """Return a checksum of the hints and of the ids of their images."""
        digest = hashlib.sha256(repr((self.names, self.apart)).encode())
        for row in np.flatnonzero(self.group != NO_GROUP).tolist():
            digest.update(f"{ids[row]}\0{self.group[row]}\0".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]


def join_hints(ids: Sequence[str], names: Mapping[int, str], must: Iterable[Pair], cannot: Iterable[Pair]) -> Hints:
    """Return the groups that names and links form.

    Args:
        ids: The id of each image, for messages.
        names: The name of some images, by index.
        must: Pairs of images in the same cluster.
        cannot: Pairs of images in different clusters.
    """
    found = list(dict.fromkeys(names.values()))
    number = {name: len(ids) + n for n, name in enumerate(found)}  # a name is one more thing that images are linked to
    must = [*must, *((image, number[name]) for image, name in names.items())]
    cannot = list(cannot)
    part = _components(len(ids) + len(found), must)
    _require_different_names(ids, found, names, part)
    for one, other in cannot:
        if part[one] == part[other]:
            both = f"{_shown(ids[one])} and {_shown(ids[other])}"
            raise UserError(f"hints: {both} cannot be in the same cluster, but other hints put them together")
    hinted = sorted({*names, *(image for pair in (*must, *cannot) for image in pair if image < len(ids))})
    parts = list(dict.fromkeys([*part[len(ids) :].tolist(), *part[hinted].tolist()]))
    group_of = {value: n for n, value in enumerate(parts)}
    group = np.full(len(ids), NO_GROUP)
    group[hinted] = [group_of[value] for value in part[hinted].tolist()]
    pairs = np.sort(group[np.array(cannot, np.int64).reshape(-1, 2)], 1).tolist()
    apart = {(one, other) for one, other in pairs if other >= len(found)}
    return Hints(group, tuple(found), tuple(sorted(apart)))


def _components(count: int, links: Sequence[Pair]) -> NDArray[np.int64]:
    """Return the number of the connected component of each of ``count`` things."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    one, other = np.array(links, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(one), np.int8), (one, other)), shape=(count, count))
    labels: NDArray[np.int64] = connected_components(graph, directed=False)[1].astype(np.int64)
    return labels


def _require_different_names(
    ids: Sequence[str], found: Sequence[str], names: Mapping[int, str], part: NDArray[np.int64]
) -> None:
    """Raise if links put images with different names together."""
    first: dict[int, str] = {}
    for name, value in zip(found, part[len(ids) :].tolist(), strict=True):
        other = first.setdefault(value, name)
        if other != name:
            example = next(image for image, given in names.items() if given == name and part[image] == value)
            both = f"{_shown(other)} and {_shown(name)}"
            raise UserError(f"hints: {both} are different names, but links put {_shown(ids[example])} in both")


def _shown(name: str) -> str:
    return repr(printable(shortened(name)))

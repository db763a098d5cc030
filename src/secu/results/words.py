"""Suggested names: the words in file names, folders, columns and captions that set a cluster apart.

Words are ranked by class-based TF-IDF: a cluster counts as one document, so a word scores high if many images of the
cluster have it and few others do. Counters and words that all clusters share ("IMG", "photo") are never suggested.
Shapes: N images, K clusters, W words.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from secu.data import Images
from secu.data.decoding.captions import read_caption
from secu.data.sources.base import FileSource

SUGGESTED = 3  # words per cluster
LEAST_IMAGES = 3  # images of a cluster that have the word
LEAST_SHARE = 0.2  # of its images
LEAST_LIFT = 2.0  # how many times as frequent the word is inside the cluster as outside
WORD = r"[^\W\d_]{3,40}"  # letters of any script
MOST_WORDS = 20_000  # the most frequent ones are compared
MOST_IMAGES = 200_000  # a sample of more
MOST_TEXT = 2_000  # characters per image that are read
MOST_FILES = 20_000  # images whose files are opened for their captions; of more, none

Ints = NDArray[np.int64]


def suggest_names(
    ids: Sequence[str], columns: Mapping[str, Sequence[Any]], cluster_N: Ints, clusters: int
) -> list[list[str]]:
    """Return the words in ids and other columns that set each cluster apart, best first; may be empty."""
    rows = np.arange(len(cluster_N))
    if len(rows) > MOST_IMAGES:
        rows = np.sort(np.random.default_rng(0).choice(rows, MOST_IMAGES, replace=False))
    words, has_NW = _words(_texts(ids, columns, rows))
    sizes_K = np.bincount(cluster_N[rows], minlength=clusters)
    member_KN = sparse.csr_matrix(
        (np.ones(len(rows), np.int64), (cluster_N[rows], np.arange(len(rows)))), shape=(clusters, len(rows))
    )
    inside_KW = member_KN @ has_NW
    total_W = np.asarray(has_NW.sum(0)).ravel()
    found = []
    for cluster, size in enumerate(sizes_K.tolist()):
        row = inside_KW[[cluster]]
        found.append([words[w] for w in _best(row.indices, row.data, total_W, size, sizes_K)])
    return found


def captions_of(images: Images) -> list[str]:
    """Return the caption that each image file contains, empty where there is none; no list if they are not read.

    Only files on disk are opened: to read those in an archive again takes too long.
    """
    source = images.source
    if not isinstance(source, FileSource) or len(images) > MOST_FILES:
        return []
    return [read_caption(source.paths[number]) for number in images.numbers]


def _best(word_V: Ints, inside_V: Ints, total_W: Ints, size: int, sizes_K: Ints) -> list[int]:
    """Return the words to suggest for a cluster, given the V words in it and how many of its images have each."""
    total_V = total_W[word_V]
    share_V = inside_V / max(size, 1)
    outside_V = (total_V - inside_V) / max(int(sizes_K.sum()) - size, 1)
    idf_V = np.log1p(sizes_K.mean() / np.maximum(total_V, 1))
    fits_V = (inside_V >= LEAST_IMAGES) & (share_V >= LEAST_SHARE) & (share_V >= LEAST_LIFT * outside_V)
    order = np.lexsort((word_V, -share_V * idf_V))  # ties in alphabetical order
    return [int(word_V[place]) for place in order if fits_V[place]][:SUGGESTED]


def _texts(ids: Sequence[str], columns: Mapping[str, Sequence[Any]], rows: Ints) -> Iterator[str]:
    """Yield the text of each image: its path without the extension, and the text of its columns."""
    for row in rows.tolist():
        path = PurePosixPath(ids[row].replace("\\", "/"))
        parts = [*path.parts[:-1], path.stem, *(column[row] for column in columns.values())]
        yield " ".join(part[:MOST_TEXT] for part in parts if part and isinstance(part, str))[:MOST_TEXT]


def _words(texts: Iterator[str]) -> tuple[list[str], sparse.csr_matrix]:
    """Return all words in alphabetical order, and which texts have them (N, W)."""
    from sklearn.feature_extraction.text import CountVectorizer

    every = list(texts)
    vectorizer = CountVectorizer(binary=True, token_pattern=WORD, max_features=MOST_WORDS, dtype=np.int64)
    try:
        has_NW = vectorizer.fit_transform(every)
    except ValueError:  # there are no words
        return [], sparse.csr_matrix((len(every), 0), dtype=np.int64)
    return vectorizer.get_feature_names_out().tolist(), has_NW

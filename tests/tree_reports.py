"""Reports with a tree of clusters, for tests with and without a browser."""

from dataclasses import replace

import torch
from torch.nn.functional import normalize

from secu.cluster.tree import grow_tree
from secu.results.leaves import Leaves
from test_report import make_data


def with_leaves(data, leaves=12, seed=1, spread=0.5):
    """Return the data of a report with a tree: the leaves lie around the clusters, and do not nest in them."""
    results = data.results
    clusters, dim = results.centers.shape
    draw = torch.Generator().manual_seed(seed)
    around = results.centers[torch.arange(leaves) % clusters]
    centers = normalize(around + spread * torch.randn(leaves, dim, generator=draw), dim=1)
    best = (results.embeddings @ centers.T).max(1)
    known, leaf = best.indices.unique(return_inverse=True)
    tree = grow_tree(results.embeddings, best.indices, 0)
    assert tree.leaves.tolist() == known.tolist()
    return replace(data, results=replace(results, leaves=Leaves(tree, centers[known], leaf, best.values)))


def tree_data(count=240, clusters=5, leaves=14, **options):
    return with_leaves(make_data(count, clusters, dim=6, **options), leaves)


def with_empty_leaves(data, empty=4):
    """Return the same data with a tree of centers, some of which are far from all images."""
    leaves = data.results.leaves
    far = -data.results.centers.mean(0, keepdim=True) + 0.1 * torch.eye(data.results.centers.shape[1])[:empty]
    centers = torch.cat([leaves.centers, normalize(far, dim=1)])
    best = (data.results.embeddings @ centers.T).max(1)
    tree = grow_tree(centers, torch.arange(len(centers)), 0)
    return replace(data, results=replace(data.results, leaves=Leaves(tree, centers, best.indices, best.values)))


def own_leaves(data):
    """Return the same data with a tree whose leaves are the clusters themselves."""
    found = data.results.predictions
    tree = grow_tree(data.results.embeddings, found.cluster, 0)
    places = {number: place for place, number in enumerate(tree.leaves.tolist())}
    leaf = torch.tensor([places[number] for number in found.cluster.tolist()])
    leaves = Leaves(tree, data.results.centers[tree.leaves], leaf, found.cosine)
    return replace(data, results=replace(data.results, leaves=leaves))

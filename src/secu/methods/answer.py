"""Which clusters a run reports, as ``config.answer`` says.

- ``head``: those of the best head with the requested number of clusters.
- ``shifted``: the same with an offset for each cluster (cluster/offsets.py).
- ``tree``: a cut of the tree of merged clusters.
- ``auto``: one of these three, ``number``: the head or the tree of a number that is chosen first (methods/number.py).

They are judged without labels, by the neighbors of the images. Heads of one size are compared by the mutual information
of the labels of images and of their neighbors. A head that holds its clusters at equal sizes splits large groups and
joins small ones; where groups really differ in size, merged clusters agree with the neighbors more often. So they do
where equal groups resemble each other, though. On feature vectors k-means is the witness: it does not hold clusters at
equal sizes, and agrees with the neighbors almost as often as a head only if that is wrong to do so.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from secu.cluster.clustering import Clustering
from secu.cluster.metrics import mutual_information
from secu.cluster.offsets import find_offsets
from secu.cluster.tree import Tree, grow_tree
from secu.config import Config
from secu.methods.base import Conclusion
from secu.views.neighbors import Neighbors

# The tree answers if the evidence for groups of different sizes exceeds these limits, which are just above what runs
# with groups of equal size had (docs/lab/features.md).
LIMIT = 1.15
LIMIT_WITH_WITNESS = 0.955
# Above this one, which few runs with equal groups exceed, the clusters of the head have offsets. They move sizes less
# than the tree does, and cost less if groups are equal after all.
LIMIT_OF_OFFSETS = 0.87
WITNESS_IMAGES = 10_000  # maximum number of images that k-means is fitted to
WITNESS_STARTS = 10
FINEST = 3  # trees are grown on heads of up to this many times the requested clusters


class Answer(NamedTuple):
    """The chosen clusters."""

    head: int  # the best of the heads with the requested number of clusters
    tree: Tree | None  # the last of the trees over finer heads; None if no head is finer
    ratios: tuple[float, ...]  # how many times as often the head disagrees with the neighbors as each tree's cut does
    witness: float | None  # how many times as often it disagrees with them as k-means does; None without vectors

    @property
    def evidence(self) -> tuple[float, float]:
        """The evidence for groups of different sizes, and the limit above which it counts.

        Without a witness, all trees must agree, since chance may favor one of them.
        """
        if not self.ratios:
            return 0.0, LIMIT
        if self.witness is None:
            return min(self.ratios), LIMIT
        return self.witness * sum(self.ratios) / len(self.ratios), LIMIT_WITH_WITNESS


def choose_answer(
    clustering: Clustering,
    config: Config,
    embeddings_ND: Tensor,
    neighbors: Neighbors,
    vectors_ND: Tensor | None = None,
) -> Conclusion:
    """Choose the head, its offsets or the tree that a run reports, and set it in the clustering.

    ``vectors_ND`` are the feature vectors that the run was trained on; None for pixels.
    """
    answer = find_answer(clustering, config, embeddings_ND, neighbors, vectors_ND)
    evidence, limit = answer.evidence
    wanted = config.answer
    if wanted == "number":  # there is one head of each size, not the best of several: it disagrees more often anyway
        limit = LIMIT
    moderate = wanted == "auto" and answer.witness is not None and evidence > LIMIT_OF_OFFSETS
    if wanted in ("auto", "number"):
        wanted = "tree" if evidence > limit else "shifted" if moderate else "head"
    if wanted == "tree" and answer.tree is None:  # no head is fine enough, or its clusters are empty
        wanted = "head"
    clustering.main = answer.head
    clustering.tree = answer.tree
    clustering.answer = wanted
    clustering.offsets = None
    if wanted == "shifted":
        cosines_NK = embeddings_ND.cpu() @ clustering.head().cpu().T
        neighbors_Nk = neighbors.of(torch.arange(len(cosines_NK)))
        clustering.offsets = find_offsets(cosines_NK, neighbors_Nk, config.loss.temperature)
    summary = {"head": answer.head, "answer": wanted, "evidence": round(evidence, 4), "limit": limit}
    return Conclusion(summary={"answer": summary}, settings={"head": answer.head, "answer": wanted})


def find_answer(
    clustering: Clustering,
    config: Config,
    embeddings_ND: Tensor,
    neighbors: Neighbors,
    vectors_ND: Tensor | None = None,
) -> Answer:
    """Compare all heads of a run, and the trees over those that are finer than requested."""
    clusters = config.clusters
    embeddings_ND = embeddings_ND.cpu()
    labels = [(embeddings_ND @ clustering.head(n).cpu().T).argmax(-1) for n in range(len(config.heads))]
    twins = [n for n, size in enumerate(config.heads) if size == clusters]
    whole = [n for n in twins if len(labels[n].unique()) == clusters]
    head = max(whole or twins, key=lambda n: information(labels[n], neighbors, clusters))
    finer = sorted((size, n) for n, size in enumerate(config.heads) if clusters < size <= FINEST * clusters)
    trees = [grow_tree(embeddings_ND, labels[n], n) for _, n in finer if len(labels[n].unique()) > clusters]
    if not trees:
        return Answer(head, None, (), None)
    cuts = [relabeled(labels[int(tree.head)], tree, clusters) for tree in trees]
    against = disagreement(labels[head], neighbors)
    ratios = tuple(against / max(disagreement(cut_N, neighbors), 1e-9) for cut_N in cuts)
    witness = None
    if vectors_ND is not None:
        free_N = unconstrained(vectors_ND, clusters, config.seed)
        witness = against / max(disagreement(free_N, neighbors), 1e-9)
    return Answer(head, trees[-1], ratios, witness)


def unconstrained(vectors_ND: Tensor, clusters: int, seed: int) -> Tensor:
    """Return clusters by k-means, the best of several starts, fitted to a sample of the vectors."""
    from sklearn.cluster import KMeans

    rows = np.random.default_rng(seed).permutation(len(vectors_ND))[:WITNESS_IMAGES]
    sample = vectors_ND[np.sort(rows)].float().numpy()
    kmeans = KMeans(clusters, n_init=WITNESS_STARTS, random_state=seed).fit(sample)
    parts = [kmeans.predict(part.float().numpy()) for part in vectors_ND.split(WITNESS_IMAGES)]
    return torch.from_numpy(np.concatenate(parts)).long()


def relabeled(labels_N: Tensor, tree: Tree, groups: int) -> Tensor:
    """Return the group of each image, given the cluster of each in the head that the tree was grown on."""
    group_of = torch.full((int(tree.leaves.max()) + 1,), -1)
    group_of[tree.leaves] = tree.cut(groups)
    return group_of[labels_N]


def information(labels_N: Tensor, neighbors: Neighbors, clusters: int) -> float:
    """Return the mutual information of the labels of images and of their neighbors, as a share of log K."""
    pairs_Nk = labels_N[:, None] * clusters + _others(labels_N, neighbors)
    return mutual_information(torch.bincount(pairs_Nk.flatten(), minlength=clusters**2).view(clusters, clusters))


def disagreement(labels_N: Tensor, neighbors: Neighbors) -> float:
    """Return how often the labels of images and of their neighbors differ, 1 for labels by chance (1 − Cohen's κ)."""
    others_Nk = _others(labels_N, neighbors)
    share_K = labels_N.bincount().double() / len(labels_N)
    other_K = torch.bincount(others_Nk.flatten(), minlength=len(share_K)).double() / others_Nk.numel()
    by_chance = 1 - float((share_K * other_K).sum())
    return float((others_Nk != labels_N[:, None]).double().mean()) / max(by_chance, 1e-9)


def _others(labels_N: Tensor, neighbors: Neighbors) -> Tensor:
    """Return the labels of all neighbors (N, k)."""
    return labels_N[neighbors.of(torch.arange(len(labels_N)))]

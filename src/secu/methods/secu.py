"""SeCu: stable cluster discrimination, the paper's method.

Two random views of every image are encoded, labels are assigned for all heads under a constraint, and the encoder and
the centers are trained on these labels (Algorithm 1). The second view may be of one of the image's nearest neighbors,
as the paper's last section suggests. Inputs are pixels, or feature vectors of a frozen backbone.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from secu.base import collectives
from secu.base.errors import UserError
from secu.cluster.clustering import Clustering
from secu.cluster.guide import Guide
from secu.cluster.tree import grow_tree
from secu.config import Config
from secu.data import Images, Shape
from secu.methods.answer import choose_answer
from secu.methods.base import Conclusion, Method
from secu.methods.number import Choice, compare_sizes
from secu.nets.encoder import Encoder
from secu.nets.front import needs_front, weights_digest
from secu.views.augment import Augmentation
from secu.views.features import FeatureViews
from secu.views.neighbors import Neighbors, find_neighbors
from secu.views.originals import OriginalCrops

PART = 2**16  # feature vectors that are standardized at a time
ANSWER_NEIGHBORS = 20  # neighbors in the run's own embeddings by which the answer is chosen
FOLLOWED = 0.9  # share of hinted images in the cluster of their group, below which the user is warned


class StableClustering(Method):
    """One-stage clustering: representation, centers and labels are learned together."""

    images: Images
    own_neighbors: Tensor
    vectors: Tensor | None = None

    def __init__(self, config: Config, images: int, shape: Shape) -> None:
        super().__init__(config, images, shape)
        self.on_features = len(shape) == 1
        self.neighbors: Neighbors | None = None
        if self.on_features:
            self.views = FeatureViews(shape[0], config.features)
            self.encoder = Encoder(config.encoder, 0, vectors=self.views.outputs)
        elif needs_front(config):
            raise UserError("encoder.trainable: nothing needs the features of the images as inputs, got pixels")
        else:
            channels, height, width = shape
            data = config.data
            if config.augment.crop_from == "original":
                self.crops = OriginalCrops(config.augment, config.augment.size or width)
            cropped = self.crops is not None
            self.views = Augmentation(config.augment, data.mean, data.std, channels, (height, width), cropped=cropped)
            self.encoder = Encoder(config.encoder, channels)
        self.clustering = Clustering(config, images, self.encoder.dim)
        if config.neighbors.count and not self.on_features:  # part of a checkpoint: it depends on earlier weights
            table = torch.zeros(images, min(config.neighbors.count, images - 1), dtype=torch.int32)
            self.register_buffer("own_neighbors", table)

    def take_hints(self, images: Images) -> None:
        """Let the images' hints guide the clustering, if they are those of the config."""
        hints = images.hints
        settings = self.config.hints
        if (None if hints is None else hints.checksum(images.ids)) != settings.checksum:
            raise UserError(f"hints.checksum: {settings.checksum} needs the hints that the run was started with")
        if hints is None:
            return
        group_N = torch.from_numpy(hints.group).to(self.device)
        clusters = self.config.clusters
        names = len(hints.names)
        self.clustering.guide = Guide(group_N, names, hints.apart, self.config.heads, clusters, settings.weight)

    def prepare(self, images: Images, first: Method | None, *, resumed: bool) -> None:
        """Standardize feature vectors and find their neighbors."""
        super().prepare(images, first, resumed=resumed)
        self.images = images
        if isinstance(self.views, FeatureViews):
            assert images.tensor is not None
            if not resumed and first is None:
                self.views.learn(images.tensor)
            if self.front_digest is not None and not resumed:
                self.front_digest.copy_(weights_digest(self.config.encoder.backbone))
            parts = images.tensor.split(PART)
            self.vectors = torch.cat([self.views.plain(part.to(self.device)) for part in parts])
            count = self.config.neighbors.count or ANSWER_NEIGHBORS
            self.neighbors = find_neighbors(self.vectors, count, originals=images.tensor)
            if not self.neighbors.table.shape[1]:
                raise UserError(f"source: all {len(images):,} feature vectors are the same")

    def inputs(self) -> Tensor | None:
        """Return the standardized and reduced feature vectors, if there are any."""
        return self.vectors

    def start_epoch(self, epoch: int, done: float) -> None:
        """Prepare for an epoch: place the hints; every few epochs, search neighbors in the run's own embeddings."""
        super().start_epoch(epoch, done)
        if (guide := self.clustering.guide) is not None:
            self._place_hints(guide)
            collectives.copy_from_main({"cluster": guide.cluster})
        settings = self.config.neighbors
        if self.on_features or not settings.count or done < settings.start:
            return
        rows = torch.arange(len(self.images))
        first = not self.own_neighbors.any()
        if first or epoch % settings.every == 0:
            nearest = find_neighbors(self.predictor().embed_together(self.images), settings.count).of(rows)
            if not nearest.shape[1]:  # all embeddings are the same
                nearest = rows[:, None]
            columns = torch.arange(self.own_neighbors.shape[1]) % nearest.shape[1]  # with copies, there are fewer
            self.own_neighbors.copy_(nearest[:, columns])
        self.neighbors = Neighbors(self.own_neighbors.cpu(), rows)

    def partners(self, order_N: Tensor, generator: torch.Generator) -> Tensor | None:
        """Return a random neighbor of each image, if neighbors are in use."""
        if self.neighbors is None or not self.config.neighbors.count:
            return None
        return self.neighbors.draw(order_N, generator)

    def losses(self, batch: Tensor, index_B: Tensor) -> dict[str, Tensor]:
        """Assign labels to a batch, and return the losses of the representation and of the centers."""
        draws = self.views.draw(len(index_B), self.generator)
        views = self.call(self.views.render, batch, draws)
        with self.autocast():
            embeddings_SBD = self.call(self.encoder, views.flatten(0, 1))
        losses: dict[str, Tensor] = self.call(self.clustering.step, embeddings_SBD, index_B)
        return losses

    def conclude(self, images: Images, scored: Images | None) -> Conclusion:
        """Choose the clusters that the run reports, if that is left to it or to the hints."""
        config = self.config
        if self.clustering.guide is not None:
            return self._conclude_hints(self.clustering.guide)
        twins = [number for number, size in enumerate(config.heads) if size == config.clusters]
        if config.answer == "head" and (len(twins) == 1 or config.head > twins[0]):  # or the user has chosen
            return Conclusion()
        embeddings_ND = self.predictor().embed(images)
        summary: dict[str, Any] = {}
        if config.answer == "number":
            head, choice = self._choose_number(embeddings_ND)
            summary["number"] = choice.summary()
            config = config.model_copy(update={"head": head})
        neighbors = self.neighbors if self.on_features else None
        neighbors = neighbors or find_neighbors(embeddings_ND, ANSWER_NEIGHBORS)
        vectors_ND = images.tensor if self.on_features else None
        conclusion = choose_answer(self.clustering, config, embeddings_ND, neighbors, vectors_ND)
        return replace(conclusion, summary=summary | conclusion.summary)

    def _place_hints(self, guide: Guide) -> Tensor:
        """Place the groups of hinted images in clusters, and return the embeddings of these images (M, D)."""
        embeddings_MD = self.predictor().embed(self.images, guide.rows)
        guide.place(embeddings_MD, [self.clustering.head(number) for number in range(len(self.config.heads))])
        return embeddings_MD

    def _conclude_hints(self, guide: Guide) -> Conclusion:
        """Choose the head that follows the hints best, and return its cluster of each name."""
        assert self.images.hints is not None
        embeddings_MD = self._place_hints(guide)
        followed = {n: guide.followed(n, embeddings_MD @ self.clustering.head(n).T) for n in guide.guided}
        head = max(guide.guided, key=lambda n: (followed[n], n == self.config.head))
        self.clustering.main = head
        clusters = guide.cluster[:, head].tolist()
        names = {str(cluster): name for cluster, name in zip(clusters, self.images.hints.names, strict=False)}
        count = len(guide.rows)
        summary = {"images": count, "groups": len(clusters) - 1, "followed": followed[head], "names": names}
        warning = (
            f"{count - followed[head]:,} of {count:,} hinted images are not in the cluster of their hint, since they "
            "look too different: check the hints, or raise hints.weight"
        )
        warnings = (warning,) if followed[head] < FOLLOWED * count else ()
        return Conclusion(summary={"hints": summary}, settings={"head": head}, warnings=warnings)

    def _choose_number(self, embeddings_ND: Tensor) -> tuple[int, Choice]:
        """Return the head with the recommended number of clusters, and the comparison of all sizes."""
        heads = self.config.heads
        labels = [(embeddings_ND @ self.clustering.head(n).T).argmax(-1).cpu() for n in range(len(heads))]
        points_ND = embeddings_ND if self.vectors is None else self.vectors
        finest = heads.index(max(heads))
        if len(labels[finest].unique()) > 1:
            self.clustering.finest = grow_tree(embeddings_ND.cpu(), labels[finest], finest)
        choice = compare_sizes(heads, labels, self.clustering.finest, points_ND, self.config.seed)
        return heads.index(choice.recommended), choice

"""A place on the map for every image: the report lays out only a sample.

Shapes: N images, S images of the sample, B of a block, D dimensions, L landmarks.
"""

import numpy as np
import torch
from torch import Tensor

from secu.results.report.layout import lay_out, sample
from secu.results.report.values import Floats, floats

LANDMARKS = 3  # images of the sample that determine the position of another image
BLOCK = 4096  # images placed at a time
CLOSEST = 1e-6  # distance below which an image has the position of its landmark


def place_all(embeddings_ND: Tensor) -> Floats:
    """Return the position of each image on the report's map, from 0 to 1 (N, 2).

    An image that is not in the report's sample is placed between the images of the sample that are most similar to it,
    weighted by the inverse of their cosine distances.
    """
    index_S = sample(len(embeddings_ND))
    sample_SD = embeddings_ND[torch.from_numpy(index_S)]
    points_S2 = lay_out(floats(sample_SD)).points
    if len(index_S) == len(embeddings_ND):
        return points_S2
    parts = [_between(block_BD, sample_SD, points_S2) for block_BD in embeddings_ND.split(BLOCK)]
    points_N2 = np.concatenate(parts)
    points_N2[index_S] = points_S2
    return points_N2


def _between(block_BD: Tensor, sample_SD: Tensor, points_S2: Floats) -> Floats:
    cosine_BL, nearest_BL = (block_BD @ sample_SD.T).topk(LANDMARKS)
    weight_BL = 1 / (1 - cosine_BL.double()).clamp(min=CLOSEST)
    weight_BL /= weight_BL.sum(-1, keepdim=True)
    points: Floats = np.einsum("bl,blx->bx", weight_BL.numpy(), points_S2[nearest_BL.numpy()])
    return points

"""exemplars.png: the most typical images of every cluster on one sheet."""

from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from secu.methods.predictor import Predictions
from secu.results.pictures import Pictures, Tile

TILE = 64  # side of an image in pixels
GAP = 4  # pixels between images
MARGIN = 92  # pixels for the text on the left
COLUMNS = 12
MOST_ROWS = 50  # maximum number of clusters on the sheet


def nearest_to_center(predictions: Predictions, cluster: int, count: int | None = None) -> Tensor:
    """Return the indices of a cluster's most typical images, best first."""
    members = torch.nonzero(predictions.cluster == cluster).squeeze(1)
    best = predictions.cosine[members].argsort(descending=True, stable=True)[:count]
    return members[best]


def choose_exemplars(predictions: Predictions, clusters: int) -> list[list[int]]:
    """Return the indices of the images on the sheet, one list per cluster."""
    rows = range(min(clusters, MOST_ROWS))
    return [nearest_to_center(predictions, cluster, COLUMNS).tolist() for cluster in rows]


def draw_exemplars(predictions: Predictions, exemplars: Sequence[Sequence[int]], pictures: Pictures) -> Image.Image:
    """Draw one row per cluster: its number, its size and its exemplars."""
    pitch = TILE + GAP
    sheet = Image.new("RGB", (MARGIN + COLUMNS * pitch + GAP, len(exemplars) * pitch + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(13)
    for cluster, row in enumerate(exemplars):
        top = GAP + cluster * pitch
        size = int((predictions.cluster == cluster).sum())
        pen.text((8, top + TILE // 2 - 16), f"cluster {cluster}\n{size:,}", fill="#333333", font=font)
        for column, index in enumerate(row):
            sheet.paste(square(pictures[index]), (MARGIN + column * pitch, top))
    return sheet


def square(tile: Tile) -> Image.Image:
    """Return a tile as a square of TILE pixels; small images keep their pixels visible."""
    smooth = max(tile.shape[:2]) >= TILE
    method = Image.Resampling.LANCZOS if smooth else Image.Resampling.NEAREST
    return Image.fromarray(tile).convert("RGB").resize((TILE, TILE), method)

"""A trained model → what a person looks at: the table of assignments and a picture of each cluster."""

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from secu.checkpoint import Trained
from secu.data import ImageSource
from secu.evaluate import Predictions, embed, predict
from secu.run import Run, write_atomically

TILE, GAP, MARGIN = 64, 4, 92  # pixels of the exemplar picture
COLUMNS, MOST_ROWS = 12, 50


def write_results(run: Run, model: Trained, images: ImageSource) -> Predictions:
    """Assign every training image to its nearest center and write assignments.csv and exemplars.png."""
    embeddings = embed(model.encoder, model.augmentation, images)
    predictions = predict(embeddings, model.clustering.head(), model.config.loss.temperature)
    columns = (predictions.cluster.tolist(), predictions.confidence.tolist(), predictions.cosine.tolist())
    rows = ((index, c, f"{p:.4f}", f"{x:.4f}") for index, (c, p, x) in enumerate(zip(*columns, strict=True)))
    run.write_csv("assignments.csv", ("index", "cluster", "confidence", "cosine"), rows)
    picture = draw_exemplars(images, predictions, model.config.heads[0])
    write_atomically(run.path / "exemplars.png", lambda path: picture.save(path, "PNG"))
    return predictions


def nearest_to_center(predictions: Predictions, cluster: int, count: int) -> Tensor:
    """Return the index of a cluster's most typical images, best first."""
    members = torch.nonzero(predictions.cluster == cluster).squeeze(1)
    best = predictions.cosine[members].argsort(descending=True, stable=True)[:count]
    return members[best]


def draw_exemplars(images: ImageSource, predictions: Predictions, clusters: int) -> Image.Image:
    """Draw a row for each cluster: its number and size, and the images closest to its center."""
    rows = min(clusters, MOST_ROWS)
    pitch = TILE + GAP
    sheet = Image.new("RGB", (MARGIN + COLUMNS * pitch + GAP, rows * pitch + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for cluster in range(rows):
        top = GAP + cluster * pitch
        size = int((predictions.cluster == cluster).sum())
        pen.text((8, top + TILE // 2 - 16), f"cluster {cluster}\n{size:,}", fill="#333333", font=font)
        index = nearest_to_center(predictions, cluster, COLUMNS)
        for column, pixels in enumerate(images.fetch(index) if len(index) else ()):
            sheet.paste(tile(pixels), (MARGIN + column * pitch, top))
    return sheet


def tile(pixels_CHW: Tensor) -> Image.Image:
    """Return one image as a square of TILE pixels; small images keep their pixels visible."""
    array = pixels_CHW.permute(1, 2, 0).expand(-1, -1, 3).contiguous().numpy()
    smooth = max(array.shape[:2]) >= TILE
    return Image.fromarray(array).resize((TILE, TILE), Image.Resampling.LANCZOS if smooth else Image.Resampling.NEAREST)

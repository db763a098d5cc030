"""Sources of images → ``Images``: uint8 inputs with a stable index, ids, columns and targets.

``open_source`` lists the images of a source, ``load_images`` decodes them, and ``load`` does both for a run's settings.
All sources use the same decoder (decoding/). Importing this package does not import torch.
"""

from secu.data.cache import Progress
from secu.data.decoding.image_files import BadImage
from secu.data.decoding.probe import Probe
from secu.data.images import Images
from secu.data.known import Known, changes, remember
from secu.data.loading import default_cache, load, load_images, require_all
from secu.data.memory import open_images
from secu.data.opening import input_shape, open_data, open_source, shape_of, splits_of
from secu.data.sources.arrays import ArraySource
from secu.data.sources.base import FileSource, Shape, Skipped, Source
from secu.data.sources.downloads import data_root, download
from secu.data.sources.vectors import VectorSource
from secu.data.stream import decoded, decoded_in_batches, needs_decoding

__all__ = [
    "ArraySource",
    "BadImage",
    "FileSource",
    "Images",
    "Known",
    "Probe",
    "Progress",
    "Shape",
    "Skipped",
    "Source",
    "VectorSource",
    "changes",
    "data_root",
    "decoded",
    "decoded_in_batches",
    "default_cache",
    "download",
    "input_shape",
    "load",
    "load_images",
    "needs_decoding",
    "open_data",
    "open_images",
    "open_source",
    "remember",
    "require_all",
    "shape_of",
    "splits_of",
]

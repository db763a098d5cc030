"""Data-set name on disk → uint8 images with a stable index.

``load`` finds and reads a data set, ``secu.data.download`` puts it there. A data set is an ``ImageSource``: how
many images, their shape, their targets if any, and ``fetch`` by index.
"""

from secu.data.catalog import SPLITS, load
from secu.data.download import data_root
from secu.data.images import FolderImages, Images, ImageSource

__all__ = ["SPLITS", "FolderImages", "ImageSource", "Images", "data_root", "load"]

"""Captions in image files: read from EXIF, harmless if damaged, and used to suggest names."""

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile

from secu.data import load_images, open_source
from secu.data.decoding.captions import MOST, read_caption
from secu.results import words


def save(path, **tags):
    """Write an image with EXIF tags."""
    image = Image.new("RGB", (8, 8))
    exif = image.getexif()
    for name, value in tags.items():
        exif[ExifTags.Base[name]] = value
    image.save(path, exif=exif)
    return str(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_description_and_keywords_are_read(tmp_path, suffix):
    keywords = "Strand;Ägypten\0".encode("utf-16-le")
    path = save(tmp_path / f"a.{suffix}", ImageDescription="sea at night", XPKeywords=keywords)
    assert read_caption(path) == "sea at night Strand;Ägypten"


def test_what_is_no_caption_is_empty(tmp_path):
    (tmp_path / "b.jpg").write_bytes(b"not an image")
    assert read_caption(save(tmp_path / "a.jpg", Model="Camera 5", Orientation=6)) == ""
    assert read_caption(str(tmp_path / "b.jpg")) == ""
    assert read_caption(str(tmp_path / "missing.jpg")) == ""
    assert len(read_caption(save(tmp_path / "c.jpg", ImageDescription="x" * 9_000))) == MOST


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_no_picture_is_decoded_for_its_caption(tmp_path, monkeypatch, suffix):
    plain = tmp_path / f"a.{suffix}"
    Image.new("RGB", (8, 8)).save(plain)
    described = save(tmp_path / f"b.{suffix}", ImageDescription="sea")
    decoded = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: decoded.append(image.filename))
    assert (read_caption(str(plain)), read_caption(described), decoded) == ("", "sea", [])


def test_a_damaged_block_is_as_good_as_none(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (8, 8)).save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert read_caption(str(path)) == ""


def test_names_are_suggested_from_captions(tmp_path, monkeypatch):
    for n in range(10):
        save(tmp_path / f"{n}.jpg", ImageDescription="harbor, photo" if n < 5 else "mountain, photo")
    images = load_images(open_source(tmp_path), (3, 8, 8), cache=tmp_path / "cache")
    captions = words.captions_of(images)
    assert len(captions) == 10
    found = words.suggest_names(images.ids, {"caption": captions}, np.repeat([0, 1], 5), 2)
    assert found == [["harbor"], ["mountain"]]
    monkeypatch.setattr(words, "MOST_FILES", 9)
    assert words.captions_of(images) == []

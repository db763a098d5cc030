"""How inputs reach the training step: resident on the device, or streamed from disk."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from secu.base.errors import UserError
from secu.data import Images, load, require_all
from secu.settings import load_config
from secu.train.feed import HostFeed, ResidentFeed, build_feed
from secu.train.listener import Listener
from small_runs import CPU, Interrupting, assert_same, digits, trained

SMALL_IMAGENET = (
    "encoder.backbone=small",
    "encoder.dim=16",
    "encoder.prediction_dim=16",
    "heads=[3,6]",
    "optim.epochs=1",
    "optim.batch_size=8",
    "data.image_size=20",
    "augment.size=16",
    "evaluate_every=1",
)


@pytest.fixture
def folders(tmp_path):
    """Write class folders of small color images, as ImageNet has them."""
    numbers = np.random.default_rng(1)
    for split, count in (("train", 12), ("val", 4)):
        for name in ("n01", "n02", "n03"):
            folder = tmp_path / "imagenet" / split / name
            folder.mkdir(parents=True)
            for image in range(count):
                pixels = numbers.integers(0, 256, (24, 20 + image, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")
    return tmp_path


def imagenet(root, split="train", recipe="imagenet"):
    """Return the settings and a split of the images."""
    config = load_config(recipe, SMALL_IMAGENET)
    return config, load(config.data, split, root)


@pytest.mark.parametrize("recipe", ["imagenet", "imagenet-entropy"])
def test_imagenet_trains_from_folders(tmp_path, folders, recipe):
    config, images = imagenet(folders, recipe=recipe)
    _, test = imagenet(folders, "test")
    assert images.tensor is None
    session = trained(tmp_path / "run", config, images, test=test)
    assert isinstance(session.step.feed, HostFeed)
    assert all(math.isfinite(record["loss"]) for record in session.run.metrics())
    assert "acc" in session.run.metrics()[-1]
    assert session.run.load_state()["tensors"]["clustering.labels"].min() >= 0


def test_streamed_images_train_the_same_model_as_resident_ones(tmp_path, folders):
    config, streamed = imagenet(folders)
    config = config.model_copy(update={"augment": config.augment.model_copy(update={"crop_from": "square"})})
    resident = Images(streamed.fetch(torch.arange(len(streamed))), streamed.targets)
    sessions = [
        trained(tmp_path / name, config, images, test=images)
        for name, images in {"streamed": streamed, "resident": resident}.items()
    ]
    assert [type(session.step.feed) for session in sessions] == [HostFeed, ResidentFeed]
    assert_same(sessions[0].run, sessions[1].run)


class Breaking(Listener):
    """Breaks files after the first epoch."""

    def __init__(self, *files) -> None:
        self.files = files
        self.notes: list[str] = []

    def epoch_ended(self, record, losses) -> None:
        for file in self.files:
            file.write_bytes(b"no image")

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_image_that_breaks_between_two_epochs_does_not_end_the_run(tmp_path, folders):
    config, images = imagenet(folders)
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"epochs": 3})})
    listener = Breaking(folders / "imagenet" / "train" / "n02" / "3.png")
    session = trained(tmp_path / "run", config, images, test=images, listener=listener)
    assert listener.notes == [
        "warning: skipped, cannot be read: n02/3.png: not an image of a kind that can be read "
        "(JPEG, PNG, WebP, BMP, TIFF, GIF)"
    ]
    session.conclude(images)
    outcome = json.loads((session.run.path / "outcome.json").read_text())
    assert outcome["unreadable"] == {"images": 1, "share": 1 / 36}
    assert outcome["warnings"] == ["1 of 36 images (2.78%) could not be read and are left out: see skipped.csv"]


def test_strict_runs_end_with_the_first_unreadable_image(tmp_path, folders):
    config, images = imagenet(folders)
    broken = folders / "imagenet" / "train" / "n02" / "3.png"
    with pytest.raises(UserError, match=r"n02/3.png cannot be read: not an image"):
        trained(tmp_path / "run", config, require_all(images), listener=Breaking(broken))


def test_too_many_unreadable_images_end_a_run(tmp_path, folders):
    config, images = imagenet(folders)
    files = [folders / "imagenet" / "train" / "n02" / f"{i}.png" for i in range(2)]
    with pytest.raises(UserError, match=r"2 of 36 images in .* cannot be read, more than 5%; .*--allow-bad"):
        trained(tmp_path / "run", config, images, listener=Breaking(*files))


def test_the_next_readable_image_takes_the_place_of_a_broken_one(folders):
    config, _ = imagenet(folders)
    for number in (3, 4):
        (folders / "imagenet" / "train" / "n03" / f"{number}.png").write_bytes(b"no image")
    (folders / "imagenet" / "train" / "n03" / "9.png").unlink()
    images = load(config.data, "train", folders, allow_bad=True)
    (folders / "imagenet" / "train" / "n03" / "8.png").unlink()  # the last: the first takes its place
    index = torch.arange(len(images))
    pixels = images.fetch(index)
    place = {name: i for i, name in enumerate(images.ids)}
    assert pixels[place["n03/3.png"]].equal(pixels[place["n03/5.png"]])
    assert pixels[place["n03/4.png"]].equal(pixels[place["n03/5.png"]])
    assert list(images.ids)[-1] == "n03/8.png"
    assert pixels[-1].equal(pixels[0])
    assert images.fetch(index.flip(0)).equal(pixels.flip(0))  # whatever the batch
    left = images.without_broken()
    assert [name for name, _ in left.skipped] == ["n03/3.png", "n03/4.png", "n03/8.png"]
    assert set(left.ids) == set(images.ids) - {name for name, _ in left.skipped}
    assert left.fetch(torch.arange(len(left))).equal(pixels[list(images.readable_rows())])


def test_an_image_that_is_unreadable_for_a_while_counts_only_then(folders):
    _, images = imagenet(folders)
    file = folders / "imagenet" / "train" / "n01" / "0.png"
    content = file.read_bytes()
    file.write_bytes(b"")
    images.fetch(torch.tensor([0]))
    assert [reason for _, reason in images.broken.new()] == ["empty file"]
    assert images.broken.new() == []
    assert 0 not in images.readable_rows()
    file.write_bytes(content)
    images.fetch(torch.tensor([0]))
    assert images.readable_rows() == range(36)


def test_a_source_that_cannot_be_read_at_all(folders):
    config, _ = imagenet(folders)
    images = load(config.data, "train", folders, allow_bad=True)
    shutil.rmtree(folders / "imagenet" / "train")
    with pytest.raises(
        UserError, match=rf"36 images in a row cannot be read, the first: {images.ids[5]}: No such file"
    ):
        images.fetch(torch.tensor([5]))


def test_interrupted_stream_can_be_resumed(tmp_path, folders):
    config, images = imagenet(folders)
    uninterrupted = trained(tmp_path / "whole", config, images).run
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", config, images, listener=Interrupting(step=2))
    assert_same(trained(tmp_path / "run", config, images, resume=True).run, uninterrupted)


@pytest.mark.parametrize("inputs", [digits(50).tensor, torch.rand(50, 7)], ids=["pixels", "features"])
def test_both_feeds_return_the_inputs_of_the_step(inputs):
    images = Images(inputs)
    batches = torch.randperm(50, generator=torch.Generator().manual_seed(0)).split(16)
    feeds = (build_feed(images, 16, CPU), HostFeed(images, 16, CPU))
    assert isinstance(feeds[0], ResidentFeed)
    for feed in feeds:
        for _ in range(2):  # epochs
            feed.start(batches)
            for index in batches:
                feed.next()
                assert torch.equal(feed.inputs(index), inputs[index])

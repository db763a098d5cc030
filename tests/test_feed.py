"""How inputs reach the training step: resident on the device, or streamed from disk."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from secu.data import Images, load
from secu.errors import UserError
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


def test_image_that_breaks_between_two_epochs_is_reported(tmp_path, folders):
    config, images = imagenet(folders)
    broken = folders / "imagenet" / "train" / "n02" / "3.png"

    class Breaking(Listener):
        def epoch_ended(self, record, losses) -> None:
            broken.write_bytes(b"no image")

    with pytest.raises(UserError, match=r"n02/3.png cannot be read: not an image"):
        trained(tmp_path / "run", config, images, listener=Breaking())


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

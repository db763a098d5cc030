"""How long a planned run will take: rough estimates from measured speeds."""

from typing import NamedTuple

from secu.apps.feature_plan import Facts
from secu.config import Config
from secu.data.stream import cores
from secu.methods.answer import WITNESS_IMAGES
from secu.nets.pretrained import describe
from secu.views.neighbors import uses_faiss

# Images per second, forward and backward, for two views of 32 x 32 pixels; scaled by the number of pixels. Rough
# estimates: measured on two CPU cores and one H200; mps is a guess.
SPEED = {
    ("cpu", "small"): 300,
    ("cpu", "resnet18"): 14,
    ("cpu", "lite0"): 170,
    ("mps", "resnet18"): 800,
    ("cuda", "resnet18"): 28_000,
    ("cuda", "lite0"): 80_000,
}
SHORTEST_STEP = {"cuda": 0.0038}  # seconds; small batches do not fill a GPU
STARTING = {"cpu": 5, "mps": 20, "cuda": 80}  # seconds for imports, compilation, and the report
STARTING_ON_FEATURES = {"cuda": 45}  # less is compiled
READ_PIXELS = 60e6  # pixels decoded per second and core
READ_FILES = 4_000  # files opened per second and core


class Speed(NamedTuple):
    """Seconds that parts of the work take on a device."""

    embedding: float  # an image of 224 pixels; on a CPU with one core
    step: float  # a step, whatever its size
    feature: float  # a feature of an image in a step
    cluster: float  # a cluster of a head and an image in a step
    product: float  # a product in the search for neighbors


WITNESS_SECONDS = 2.2e-8  # of k-means, for a feature of an image and a cluster, at the end of a run
FAISS = 47  # times as fast as the exact search, for a million vectors
# Measured for lite0 on two CPU cores; those of GPUs are guesses.
SPEEDS = {
    "cpu": Speed(embedding=0.0108, step=0.0028, feature=7.2e-8, cluster=1.93e-8, product=2e-11),
    "mps": Speed(embedding=0.002, step=0.004, feature=1e-8, cluster=2e-9, product=2e-12),
    "cuda": Speed(embedding=0.0003, step=0.001, feature=1e-10, cluster=5e-11, product=1e-14),
}


def estimate(config: Config, facts: Facts) -> float:
    """Return a rough estimate of the training time in seconds."""
    if facts.on_features:
        return estimate_on_features(config, facts)
    backbone = config.encoder.backbone
    speed = SPEED.get((facts.device, backbone), SPEED.get((facts.device, "resnet18"), 14))
    side = config.augment.size or config.data.image_size or facts.side
    pixels = (side / 32) ** 2 / {"cifar": 1, "stl": 4, "imagenet": 16}[config.encoder.stem]
    batch = config.optim.batch_size
    step = max(batch * max(pixels, 0.08) / speed, SHORTEST_STEP.get(facts.device, 0.0))
    training = facts.images / batch * step
    if config.data.on_demand:  # while one batch is trained on, the next is decoded; a CPU does both
        decoding = reading(facts)
        training = training + decoding if facts.device == "cpu" else max(training, decoding)
    return config.optim.total_epochs * training


def reading(facts: Facts) -> float:
    """Return a rough estimate of the seconds for reading and decoding all images once."""
    return facts.images * (facts.side**2 / READ_PIXELS + 1 / READ_FILES) / cores()


def overhead(config: Config, facts: Facts) -> float:
    """Return a rough estimate of the seconds for starting, reading images, and writing the report."""
    embedding = embedding_seconds(config, facts) if facts.frozen else 0.0
    starting = STARTING.get(facts.device, STARTING["cpu"])
    if facts.on_features:
        starting = STARTING_ON_FEATURES.get(facts.device, starting)
    return starting + reading(facts) + embedding


def estimate_on_features(config: Config, facts: Facts) -> float:
    """Return a rough estimate of the training time in seconds, with the search for neighbors."""
    speed = SPEEDS.get(facts.device, SPEEDS["cpu"])
    batch = config.optim.batch_size
    steps = config.optim.total_epochs * -(-facts.images // batch)
    known = describe(facts.frozen) if facts.frozen else None
    length = known.features if known else facts.features
    width = min(config.features.components, length)
    image = width * speed.feature + len(config.heads) * max(config.heads) * speed.cluster
    witness = min(facts.images, WITNESS_IMAGES) * config.clusters * length * WITNESS_SECONDS
    product = speed.product / FAISS if uses_faiss(facts.images, facts.device) else speed.product
    return steps * (speed.step + batch * image) + facts.images**2 * width * product + witness


def embedding_seconds(config: Config, facts: Facts) -> float:
    """Return a rough estimate of the seconds for embedding all images with a frozen backbone."""
    size = config.data.image_size or facts.side
    seconds = facts.images * (size / 224) ** 2 * SPEEDS.get(facts.device, SPEEDS["cpu"]).embedding
    return seconds / cores() if facts.device == "cpu" else seconds

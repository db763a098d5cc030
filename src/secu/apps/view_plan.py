"""The rules for views of images, for runs from scratch: their neighbors and the augmentation."""

from typing import Any

from secu.apps.feature_plan import MANY_IMAGES, Change, Facts, asked, neighbor_count
from secu.nets.pretrained import describe

NEIGHBORS = 10  # at most, in the run's own embeddings


def neighbors(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    """Return the number of neighbors in the run's own embeddings; 0 if there are none."""
    many = facts.device == "cuda" and facts.images >= MANY_IMAGES
    on_demand = asked(settings, "data", "on_demand", facts.on_demand)  # then neighbors would have to be decoded, too
    twice = on_demand or asked(settings, "augment", "crop_from") == "original"
    from_scratch = describe(settings["encoder"]["backbone"]) is None  # with a pretrained network it was not measured
    usual = min(NEIGHBORS, neighbor_count(facts.images, clusters)) if many and from_scratch and not twice else 0
    count = asked(settings, "neighbors", "count", usual)
    why = "from the middle of the run on, the second view is of one of the image's neighbors in the run's embeddings"
    if not count:
        why = "both views are of the image itself; neighbors help where a GPU learns from many images"
    return {"neighbors": {"count": count}}, f"neighbors.count={count}: {why}"


def augmentation(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    """Return how views differ from their image, for photos or for gray images."""
    if settings["data"]["channels"] == 3:
        side = settings["data"]["image_size"]
        crop = 0.3 if side <= 40 else 0.2
        part = min(1, side / 32)
        blur = [round(radius * part, 4) for radius in (0.1, 2.0)]
        less = "" if part == 1 else ", in proportion to images smaller than 32"
        why = f"augment: crops from {crop:.0%}, color, flip, as in the paper, and blur up to {blur[1]:g} pixels{less}"
        return {"augment": {"crop_min": crop, "blur_radius": blur}}, why
    affine = {"scale": 0.3, "aspect": 0.3, "rotation": 0.375, "shear": 0.3, "shift": 0.3}
    off: dict[str, Any] = {"gray_prob": 0, "blur_prob": [0, 0], "solarize_prob": [0, 0], "flip_prob": 0}
    change = {"crop_min": 1, "affine": affine, "jitter_prob": 1, "brightness": 0.3, "contrast": 0, **off}
    return {"augment": change}, "augment: shift, rotation, shear and scale; gray images may be writing, so no flip"

"""Self-labeling: a finished run → a second run of the same images, whose model taught itself (teaching.py).

The label-free score of an epoch is the mutual information between the labels of images and of their random views: those
that the first run trained on, and strong ones, half each. The first alone would call every change a loss, the second
would welcome any label that survives strong changes. At the end the model's mean confidence is set to the agreement of
the kind that agrees more, as a view may also be hard to tell by itself. What changed is in selflabel.json, in numbers.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secu.augment import Augmentation
from secu.checkpoint import Trained, load_trained
from secu.data import ImageSource, load
from secu.data.own import OwnImages
from secu.data.own.known import Known
from secu.errors import UserError
from secu.evaluate import Consistency, calibration, choose, consistency, embed, find_temperature, score_clusters
from secu.files import void, write_json
from secu.fit import images_of
from secu.results import write_results
from secu.run import Run
from secu.second_stage import begun_config, second_config
from secu.teaching import Teaching
from secu.train import check, choose_device, train
from secu.training import Listener

LOOKED_AT, GLANCED_AT = 10_000, 2_000  # images whose views are compared, before and after, and after every epoch
OTHER_LABELS = 0.01  # of all, from which on a run is not the one that it was
WORSE = 0.1  # of the label-free score, from which on the user is warned


@dataclass(frozen=True)
class State:
    """What can be said of a model with these images, most of it without true labels."""

    information: float  # the label-free score: what the label of a random view tells of its image's, 0 to 1
    agreement: float  # share of random views that have the label of their image, for the kind where it is larger
    confidence: float  # mean over all images
    confident: float  # share of images surer than selflabel.confidence
    sizes: tuple[int, ...]
    largest: int
    smallest: int
    calibration_error: float | None  # on images whose true class is known
    acc: float | None = None  # of them, too


@dataclass(frozen=True)
class Outcome:
    """What self-labeling changed."""

    before: State
    after: State
    moved: float  # share of images that have another label than before
    warnings: tuple[str, ...]


def self_label(
    source: Run,
    out: Path,
    overrides: dict[str, Any] | None = None,
    *,
    images: ImageSource | None = None,
    data: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    time_limit: float = math.inf,
    listener: Listener | None = None,
    tell: Callable[[str], None] = void,
    report: bool = True,
) -> tuple[Run, Trained, Outcome | None]:
    """Train the model of a finished run on its own confident labels; no outcome if the time limit came first.

    ``images`` are those of the run, if they are at hand; else they are found again, and ``tell`` hears of own images
    that are no longer there. Without ``report`` the tables are written, but not the pictures.
    """
    if out.resolve() == source.path.resolve():
        raise UserError(f"out: {out} is the run to start from; name another folder")
    Run.check_free(out, force=force, resume=resume)
    require_finished(source)
    listener = listener or Listener()
    images = images or images_of(source, data=data, tell=tell)
    test, known = scored_images(source, images, data), known_images(source, images)
    lesson = first_lesson(source, images, choose_device(device))
    begun = Run.to_resume(out) if resume else None
    if begun is None:
        config = second_config(source.config(), source.path, len(images), overrides or {})
    else:
        config = begun_config(begun, source, known, overrides or {})
        lesson.check_begun(begun)
    check(config, images, device)
    run = Run.start(out, config, resume=resume, force=force)
    if known:
        write_json(run.path / "images.json", known)
    options: dict[str, Any] = {"test": test, "device": device, "resume": resume, "time_limit": time_limit}
    try:
        model = train(
            config, images, run, **options, listener=listener, prepare=lesson.prepare, after_epoch=lesson.after_epoch
        )
    except UserError:
        run.discard_unsaved()
        raise
    if not model.finished:
        return run, model, None
    outcome = finish(run, model, lesson, None if test is images else test)
    results = write_results(run, model, images, pictures=report, tell=listener.busy)
    return run, model, replace(outcome, warnings=results.warnings)  # of the clusters, too


@dataclass(frozen=True)
class Lesson:
    """What the second model learns from: the first one, the labels it gives, and how far they are to be believed."""

    first: Trained
    views: Augmentation  # that SeCu itself trained with
    images: ImageSource
    cosines_NK: Tensor

    def prepare(self, model: Trained) -> None:
        """Give the new model the labels to start from, before the first epoch."""
        found = choose(self.cosines_NK, model.config.loss.temperature)
        teaching(model).begin(found.cluster, found.confidence)

    def check_begun(self, run: Run) -> None:
        """Refuse to go on with a run that learned from other labels: the run before it was replaced.

        The same model on another device may have another label for an image in thousands.
        """
        if run.has_checkpoint():
            noted_N = run.load_state()["tensors"]["clustering.first_labels"]
            labels_N = choose(self.cosines_NK, self.first.config.loss.temperature).cluster
            if len(labels_N) != len(noted_N):
                raise UserError(f"resume: {run.path} began with {len(noted_N):,} images, got {len(labels_N):,}")
            if (other := float((labels_N != noted_N).float().mean())) > OTHER_LABELS:
                told = f"{other:.0%} of the labels that it gives are others"
                raise UserError(f"resume: the run that {run.path} was started from changed: {told}; begin a new run")

    def after_epoch(self, model: Trained) -> dict[str, float]:
        """Look how well the model's labels stand up to random changes."""
        return self.look(model, model.augmentation, GLANCED_AT)._asdict()

    def look(self, model: Trained, strong: Augmentation, most: int) -> Consistency:
        """Compare the labels of some of the images, spread evenly, with those of random views of both kinds."""
        index_N = torch.arange(0, len(self.images), -(-len(self.images) // most))
        parts = (model.clustering.head(), self.images, index_N)
        usual = consistency(model.encoder, self.views, *parts)
        unusual = consistency(model.encoder, strong, *parts, views=(1,))
        agreement = max(usual.agreement, unusual.agreement)
        return Consistency(agreement, (usual.information + unusual.information) / 2)


def first_lesson(source: Run, images: ImageSource, device: torch.device) -> Lesson:
    """Look at the images with the model of the run to start from."""
    first = load_trained(source, images.shape, device)
    (channels, height, width), config = images.shape, first.config
    # Not the model's own augmentation, which is another if that run taught itself.
    views = Augmentation(config.augment, config.data.mean, config.data.std, channels, (height, width)).to(device)
    cosines_NK = embed(first.encoder, first.augmentation, images) @ first.clustering.head().T
    return Lesson(first, views, images, cosines_NK)


def teaching(model: Trained) -> Teaching:
    """Return what stands in the clustering's place."""
    assert isinstance(model.clustering, Teaching)
    return model.clustering


def require_finished(run: Run) -> None:
    """Refuse a run whose training has not come to its end."""
    if not run.finished:
        raise UserError(f"run: {run.path} is not finished; go on with it first (--resume)")


def scored_images(source: Run, images: ImageSource, root: Path | None) -> ImageSource | None:
    """Return what the run was scored on, if anything."""
    data = source.config().data
    if data.name == "own":
        return images if data.labels else None
    return load(data.name, data.test, root, data.image_size)


def known_images(source: Run, images: ImageSource) -> Known:
    """Return what the second run notes of its images: those of the first run that are still there, if that one did."""
    known = source.images()
    return {name: known[name] for name in images.ids} if isinstance(images, OwnImages) and known else {}


def finish(run: Run, model: Trained, lesson: Lesson, scored: ImageSource | None) -> Outcome:
    """Calibrate the new model's confidence, and write down what changed."""
    assert model.config.selflabel is not None
    limit, strong = model.config.selflabel.confidence, model.augmentation
    seen_before, seen = (lesson.look(one, strong, LOOKED_AT) for one in (lesson.first, model))
    before, labels_N = state(lesson.first, seen_before, lesson.images, lesson.cosines_NK, scored, limit)
    cosines_NK = embed(model.encoder, strong, lesson.images) @ model.clustering.head().T
    temperature = round(find_temperature(cosines_NK, seen.agreement), 4)
    model.config = run.amend({"loss": {"confidence_temperature": temperature}})
    after, new_labels_N = state(model, seen, lesson.images, cosines_NK, scored, limit)
    moved = float((new_labels_N != labels_N).float().mean())
    outcome = Outcome(before, after, moved, tuple(worries(before, after)))
    write_json(run.path / "selflabel.json", asdict(outcome))
    return outcome


def state(
    model: Trained,
    seen: Consistency,
    images: ImageSource,
    cosines_NK: Tensor,
    scored: ImageSource | None,
    limit: float,
) -> tuple[State, Tensor]:
    """Say what there is to say of a model's labels of the images, which are returned, too, by the images' cosines.

    Calibration and ACC are those of the images to score on, where these are others.
    """
    centers_KD, temperature = model.clustering.head(), model.config.loss.prediction_temperature
    found = told = choose(cosines_NK, temperature)
    sizes = torch.bincount(found.cluster, minlength=len(centers_KD)).tolist()
    if scored is not None:
        told = choose(embed(model.encoder, model.augmentation, scored) @ centers_KD.T, temperature)
    scores = score_clusters(scored or images, told.cluster)
    return State(
        information=seen.information,
        agreement=seen.agreement,
        confidence=float(found.confidence.mean()),
        confident=float((found.confidence > limit).float().mean()),
        sizes=tuple(sizes),
        largest=max(sizes),
        smallest=min(sizes),
        calibration_error=calibration(scored or images, told),
        acc=scores.acc if scores else None,
    ), found.cluster


def worries(before: State, after: State) -> list[str]:
    """Return what makes the second model doubtful, judged without true labels."""
    found = []
    if after.information < before.information - WORSE:
        found.append(
            "the clusters stand up less to random changes of the images (label-free score "
            f"{before.information:.3f} before, {after.information:.3f} now): keep the run before, or lower optim.lr"
        )
    for cluster, (then, now) in enumerate(zip(before.sizes, after.sizes, strict=True)):
        if now < then / 2:
            found.append(
                f"cluster {cluster} fell from {then:,} to {now:,} images: "
                "raise selflabel.smallest, or keep the run before"
            )
    return found

"""What a run is: frozen models of all its settings.

Every default of the project lives in this file and nowhere else; a recipe states only what differs.
The paper's symbol stands in brackets behind each setting that has one.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Channels = tuple[float, ...]


class Model(BaseModel):
    """Base of all settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(Model):
    """Which images, and how their pixels become numbers around zero."""

    name: str = "cifar10"  # of a data set, or own: the user's images
    source: str | None = None  # where own images lie
    labels: str | None = None  # what names their true labels: folder, or a column; for scoring alone
    train: str = "train"
    test: str = "test"
    image_size: int | None = Field(None, ge=1)  # decode to this square; None: as stored
    channels: Literal[1, 3] | None = None  # decode to grey or to colour; None: as stored
    values: str | None = Field(None, pattern=r"^(float|int) 0\.\.\d+$")  # of an array, or 16-bit files: float 0..1
    mean: Channels = (0.5,)
    std: Channels = (0.25,)

    @model_validator(mode="after")
    def _can_divide(self) -> Self:
        if min(self.std, default=0) <= 0:
            raise ValueError(f"data.std: {list(self.std)} must be one or three numbers over 0")
        return self

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width that images are decoded to; None where the data set decides."""
        # Runs of before data.channels had three numbers for colour and one for grey.
        return None if self.image_size is None else (self.channels or len(self.mean), self.image_size, self.image_size)


class AffineConfig(Model):
    """Random affine jitter for digits and the like; each value is the half-width of a uniform draw."""

    scale: float = Field(0.2, ge=0)  # log of the common scale of both axes
    aspect: float = Field(0.2, ge=0)  # log of the ratio of the axes
    rotation: float = Field(0.25, ge=0)  # radians
    shear: float = Field(0.2, ge=0)
    shift: float = Field(0.2, ge=0)  # of half the image's width


class AugmentConfig(Model):
    """Random views of an image. A pair holds one probability for each of the two views."""

    size: int | None = Field(None, ge=1)  # side of a view; None: that of the image
    plain: Literal["centre", "whole"] = "centre"  # what evaluation sees: the centre, as large as a view, or the image
    crop_min: float = Field(0.3, gt=0, le=1)  # smallest crop as a share of the area; 1: no crop
    crop_aspect: float = Field(4 / 3, ge=1)  # aspect ratio between 1/this and this
    affine: AffineConfig | None = None
    jitter_prob: float = Field(0.8, ge=0, le=1)
    brightness: float = Field(0.4, ge=0, le=1)
    contrast: float = Field(0.4, ge=0, le=1)
    saturation: float = Field(0.2, ge=0, le=1)
    hue: float = Field(0.1, ge=0, le=0.5)
    grey_prob: float = Field(0.2, ge=0, le=1)
    blur_prob: tuple[float, float] = (1.0, 0.1)
    blur_radius: tuple[float, float] = (0.1, 2.0)
    solarize_prob: tuple[float, float] = (0.0, 0.2)
    flip_prob: float = Field(0.5, ge=0, le=1)

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        for name in ("blur_prob", "solarize_prob"):
            if not all(0 <= p <= 1 for p in getattr(self, name)):
                raise ValueError(f"augment.{name}: {getattr(self, name)} must be two numbers from 0 to 1")
        low, high = self.blur_radius
        if not 0 < low <= high:
            raise ValueError(f"augment.blur_radius: {self.blur_radius} must be two rising numbers over 0")
        return self


class EncoderConfig(Model):
    """The network from pixels to unit embeddings."""

    backbone: Literal["resnet18", "resnet34", "resnet50", "small"] = "resnet18"
    stem: Literal["cifar", "stl", "imagenet"] = "cifar"  # first layers of a ResNet
    projection_layers: int = Field(2, ge=0, le=3)
    prediction_layers: Literal[0, 2] = 0
    hidden_dim: int | None = Field(None, ge=1)  # None: that of the backbone's features
    prediction_dim: int = Field(512, ge=1)  # hidden units of the prediction MLP
    dim: int = Field(128, ge=2)  # of the embeddings, where there is a projection

    @model_validator(mode="after")
    def _prediction_needs_projection(self) -> Self:
        if self.prediction_layers and not self.projection_layers:
            raise ValueError("encoder.prediction_layers: 2 needs encoder.projection_layers of 1 to 3, got 0")
        return self


class LossConfig(Model):
    """What is minimised: see losses.py."""

    name: Literal["secu", "ce"] = "secu"  # for the centers; the encoder's is the same for both
    temperature: float = Field(0.05, ge=1e-3)  # [λ_x] representation
    center_temperature: float = Field(0.05, ge=1e-3)  # [λ_w] centers
    confidence_temperature: float | None = Field(None, ge=1e-3)  # of predictions; None: λ_x
    hard_label_weight: float = Field(0.2, ge=0, le=1)  # [τ] last epoch's label against the other view

    @property
    def prediction_temperature(self) -> float:
        """What turns cosines into confidence."""
        return self.confidence_temperature or self.temperature


class ConstraintConfig(Model):
    """How labels are kept from collapsing into one cluster: see constraints.py."""

    kind: Literal["none", "size", "entropy"] = "size"
    score: Literal["cosine", "log_prob"] = "cosine"
    lower: float = Field(0.9, ge=0, le=1)  # [γ] smallest cluster, as a share of N/K
    upper: float | None = Field(None, ge=1)  # [γ'] largest cluster, as a multiple of N/K
    dual_lr: float = Field(0.1, gt=0)  # [η_ρ]
    dual_schedule: Literal["constant", "falling"] = "constant"  # falling: to 0 along a half cosine, from epoch to epoch
    alpha: float | None = Field(None, ge=0)  # [α] weight of the entropy; None: 6N/50

    @model_validator(mode="after")
    def _only_what_the_kind_reads(self) -> Self:
        reads = {"none": set[str](), "size": {"lower", "upper", "dual_lr", "dual_schedule"}, "entropy": {"alpha"}}
        for name in set[str]().union(*reads.values()) - reads[self.kind]:
            if getattr(self, name) != type(self).model_fields[name].default:
                owner = "entropy" if name == "alpha" else "size"
                raise ValueError(
                    f"constraint.{name}: {getattr(self, name)} is only read by constraint.kind={owner}, "
                    f"got constraint.kind={self.kind}"
                )
        return self


class CentersConfig(Model):
    """How centers move: see centers.py."""

    kind: Literal["sgd", "closed_form", "kmeans"] = "sgd"
    lr: float = Field(1.2, ge=0)
    schedule: Literal["constant", "rising"] = "constant"


class OptimConfig(Model):
    """How the encoder is trained."""

    name: Literal["sgd", "lars"] = "sgd"
    lr: float = Field(0.2, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(1e-4, ge=0)
    batch_size: int = Field(128, ge=2)
    epochs: int = Field(400, ge=0)  # after the initial ones
    initial_epochs: int = Field(1, ge=0)  # centers and labels only
    warmup_epochs: int = Field(10, ge=0)
    mixed_precision: bool = True  # bfloat16 in the encoder, on CUDA alone

    @property
    def total_epochs(self) -> int:
        """All epochs of a run, the initial ones counted in."""
        return self.initial_epochs + self.epochs


class SelfLabelConfig(Model):
    """Self-labeling, the second stage: confident weak views teach strong views; see teaching.py and strong.py."""

    warmup_epochs: int = Field(10, ge=0)  # all images learn the label that the run before gave them
    confidence: float = Field(0.9, gt=0, lt=1)  # over which an image's own label is taught
    decay: float = Field(0.0, ge=0, lt=1)  # of a teacher that is the moving average of what learns; 0: they are one
    unsure: Literal["nothing", "chances"] = "nothing"  # what the others are taught; chances: how likely each cluster is
    kept: float = Field(0.0, ge=0, le=1)  # of every cluster: its surest images keep the label they had at the start
    smallest: float = Field(0.95, ge=0, lt=1)  # of its size at the start: a cluster that falls under it is held up
    dual_lr: float = Field(0.1, gt=0)  # how fast it is held up, and the share of sure images follows that of one label
    keep_best: bool = True  # end with the last epoch whose label-free score is near the best, not with the last of all
    crop_padding: float = Field(0.125, ge=0, le=0.5)  # of the side: how far a strong view is shifted
    operations: int = Field(4, ge=0)  # of strong_pixels.py, in each strong view
    cutout: float = Field(0.5, ge=0, le=1)  # of the side: the largest square that is cut out of a strong view


class PaperConfig(Model):
    """What the paper reports for this experiment, in percent: printed beside a measurement, never instead of one."""

    acc: float
    nmi: float
    ari: float


class Config(Model):
    """A whole run. ``heads`` are cluster numbers [K]; the first head is the one reported."""

    description: str = ""
    paper: PaperConfig | None = None
    paper_selflabel: PaperConfig | None = None  # after self-labeling of this run
    init_from: str | None = None  # a run folder whose encoder and heads to start from
    seed: int = Field(0, ge=0, lt=2**32)  # what numpy and scikit-learn take
    heads: tuple[int, ...] = tuple(range(10, 101, 10))
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    encoder: EncoderConfig = EncoderConfig()
    loss: LossConfig = LossConfig()
    constraint: ConstraintConfig = ConstraintConfig()
    centers: CentersConfig = CentersConfig()
    optim: OptimConfig = OptimConfig()
    selflabel: SelfLabelConfig | None = None  # None: SeCu itself
    evaluate_every: int = Field(20, ge=0)  # epochs between scores on the test split; 0: only at the end
    engine: Literal["auto", "eager", "compiled", "graph"] = "auto"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.heads or min(self.heads) < 2:
            raise ValueError(f"heads: {list(self.heads)} must be one or more cluster numbers of at least 2")
        if self.loss.name == "ce" and self.centers.kind != "sgd":
            raise ValueError(
                f"loss.name: ce moves centers by gradient, so centers.kind must be sgd, got {self.centers.kind}"
            )
        if self.centers.schedule == "rising" and self.centers.kind != "sgd":
            raise ValueError(f"centers.schedule: rising needs centers.kind=sgd, got {self.centers.kind}")
        if self.selflabel and (len(self.heads) > 1 or self.centers.kind != "sgd"):
            raise ValueError("selflabel: needs a single head and centers.kind=sgd; use the command secu selflabel")
        if not self.optim.total_epochs:
            raise ValueError("optim.epochs: 0 needs optim.initial_epochs of at least 1, got 0")
        return self

    def settings(self) -> dict[str, Any]:
        """Return what makes a run what it is; the paper's numbers and the description do not."""
        return self.model_dump(mode="json", exclude={"description", "paper", "paper_selflabel"})

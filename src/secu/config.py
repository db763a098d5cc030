"""All settings of a run, as frozen pydantic models.

A recipe states only what differs from these defaults. For your own images, apps/plan.py chooses some settings by rule;
apps/selflabel.py does so for the second stage. Symbols in brackets are the paper's.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from secu.registry import BACKBONES, CENTERS, CONSTRAINTS, METHODS

MOST = 10**9  # of anything that is counted; larger numbers overflow
WIDEST = 2**16  # units of a layer, or pixels of a side
MOST_CLUSTERS = 10**6

Channels = tuple[float, ...]
Backbone = Annotated[str, AfterValidator(BACKBONES.check)]
CentersKind = Annotated[str, AfterValidator(CENTERS.check)]
ConstraintKind = Annotated[str, AfterValidator(CONSTRAINTS.check)]
MethodName = Annotated[str, AfterValidator(METHODS.check)]


class Model(BaseModel):
    """Base class of all settings: immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(Model):
    """The images, and the normalization of their pixels."""

    source: str | None = None  # dataset:NAME, a path or a pattern; None: images in memory
    labels: str | None = None  # true labels, for scoring only: folder, or the name of a column
    train: str = "train"  # split to train on, if the source has splits
    test: str = "test"  # split to score on, if the source has splits
    image_size: int | None = Field(None, ge=1, le=WIDEST)  # side that images are decoded to; None: as stored
    channels: Literal[1, 3] | None = None  # decode to gray or to color; None: as stored
    values: str | None = Field(None, pattern=r"^(float|int) 0\.\.\d{1,9}$")  # range of an array or of 16-bit files
    max_pixels: int = Field(100_000_000, ge=1, le=MOST)  # larger images are skipped; a JPEG may have 8 times as many
    features: int | None = Field(None, ge=1, le=WIDEST)  # length of feature vectors as inputs; None: pixels
    on_demand: bool | None = None  # decode images in every epoch instead of once into a cache; None: ImageNet only
    strict: bool = False  # end the run if an image cannot be read, instead of leaving it out
    mean: Channels = (0.5,)  # mean per channel, for pixel values between 0 and 1
    std: Channels = (0.25,)  # standard deviation per channel

    @model_validator(mode="after")
    def _can_divide(self) -> Self:
        if min(self.std, default=0) <= 0:
            raise ValueError(f"data.std: {list(self.std)} must be one or three positive numbers")
        return self


class AffineConfig(Model):
    """Random affine jitter, for example for digits; each value is the half-width of a uniform distribution."""

    scale: float = Field(0.2, ge=0)  # log of the common scale of both axes
    aspect: float = Field(0.2, ge=0)  # log of the ratio of the axes
    rotation: float = Field(0.25, ge=0)  # angle in radians
    shear: float = Field(0.2, ge=0)  # horizontal shift per unit of height
    shift: float = Field(0.2, ge=0)  # translation, as a fraction of half the image's width


class AugmentConfig(Model):
    """Random views of an image. A pair holds one probability for each of the two views."""

    size: int | None = Field(None, ge=1, le=WIDEST)  # side of a view; None: that of the image
    plain: Literal["center", "whole"] = "center"  # input for evaluation: a center crop, or the whole image
    crop_min: float = Field(0.3, gt=0, le=1)  # smallest crop as a share of the area; 1: no crop
    crop_aspect: float = Field(4 / 3, ge=1)  # aspect ratio between 1/this and this
    crop_from: Literal["square", "original"] = "square"  # what is cropped: the decoded square, or the whole picture
    affine: AffineConfig | None = None  # None: no affine jitter
    jitter_prob: float = Field(0.8, ge=0, le=1)  # probability of color jitter
    brightness: float = Field(0.4, ge=0, le=1)  # strength of brightness jitter
    contrast: float = Field(0.4, ge=0, le=1)  # strength of contrast jitter
    saturation: float = Field(0.2, ge=0, le=1)  # strength of saturation jitter; color images only
    hue: float = Field(0.1, ge=0, le=0.5)  # strength of hue jitter, as a fraction of the color circle
    gray_prob: float = Field(0.2, ge=0, le=1)  # probability of conversion to gray
    blur_prob: tuple[float, float] = (1.0, 0.1)  # probability of a Gaussian blur, for each view
    blur_radius: tuple[float, float] = (0.1, 2.0)  # smallest and largest standard deviation, in pixels
    solarize_prob: tuple[float, float] = (0.0, 0.2)  # probability of inverting bright pixels, for each view
    flip_prob: float = Field(0.5, ge=0, le=1)  # probability of a horizontal flip

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        for name in ("blur_prob", "solarize_prob"):
            if not all(0 <= p <= 1 for p in getattr(self, name)):
                raise ValueError(f"augment.{name}: {getattr(self, name)} must be two numbers from 0 to 1")
        low, high = self.blur_radius
        if not 0 < low <= high:
            raise ValueError(f"augment.blur_radius: {self.blur_radius} must be two increasing positive numbers")
        return self


class FeaturesConfig(Model):
    """Views of feature vectors, for runs that are trained on them (views/features.py)."""

    components: int = Field(256, ge=2, le=WIDEST)  # principal components that are kept of longer vectors
    dropout: float = Field(0.1, ge=0, lt=1)  # share of the components that is set to zero in a view


class NeighborsConfig(Model):
    """Nearest neighbors as views: the second view of an image is one of its neighbors (views/neighbors.py)."""

    count: int = Field(0, ge=0, le=MOST)  # number of neighbors to draw from; 0: both views are of the image itself
    start: float = Field(0.5, ge=0, lt=1)  # fraction of the run after which neighbors in its own embeddings are used
    every: int = Field(10, ge=1, le=MOST)  # epochs between two searches in the run's own embeddings


class EncoderConfig(Model):
    """The network from pixels to unit embeddings."""

    backbone: Backbone = "resnet18"  # network from pixels to features; lite0 and hf:NAME are pretrained, none: vectors
    trainable: Literal["all", "last", "nothing"] = "all"  # what is trained of the backbone: last: its last stage
    stem: Literal["cifar", "stl", "imagenet"] = "cifar"  # first layers of a ResNet
    projection_layers: int = Field(2, ge=0, le=3)  # layers of the MLP from features to embeddings; 0: none
    prediction_layers: Literal[0, 2] = 0  # layers of the MLP on top of the projection; 0: none
    hidden_dim: int | None = Field(None, ge=1, le=WIDEST)  # hidden units of the projection; None: as features
    prediction_dim: int = Field(512, ge=1, le=WIDEST)  # hidden units of the prediction MLP
    dim: int = Field(128, ge=2, le=WIDEST)  # dimension of the embeddings, if there is a projection

    @model_validator(mode="after")
    def _prediction_needs_projection(self) -> Self:
        if self.prediction_layers and not self.projection_layers:
            raise ValueError("encoder.prediction_layers: 2 needs encoder.projection_layers of 1 to 3, got 0")
        return self


class HintsConfig(Model):
    """The user's hints about some images, which secu fit reads with --hints: see cluster/guide.py."""

    checksum: str | None = None  # identifies the hints that a run was started with; None: there are none
    weight: float = Field(50, ge=0)  # total weight of the images of one name, in images


class LossConfig(Model):
    """The losses: see cluster/losses.py."""

    name: Literal["secu", "ce"] = "secu"  # loss of the centers; that of the encoder is the same for both
    temperature: float = Field(0.05, ge=1e-3)  # [λ_x] temperature of the representation loss
    center_temperature: float = Field(0.05, ge=1e-3)  # [λ_w] temperature of the center loss
    confidence_temperature: float | None = Field(None, ge=1e-3)  # temperature of predictions; None: λ_x
    hard_label_weight: float = Field(0.2, ge=0, le=1)  # [τ] weight of last epoch's label vs. the other view's

    @property
    def prediction_temperature(self) -> float:
        """The temperature that turns cosines into confidence."""
        return self.confidence_temperature or self.temperature


class ConstraintConfig(Model):
    """The constraint that keeps labels from collapsing into one cluster: see cluster/constraints.py."""

    kind: ConstraintKind = "size"  # none, bounds on cluster sizes, or the entropy of all labels
    score: Literal["cosine", "log_prob"] = "cosine"  # the score that a cluster's bonus is added to
    lower: float = Field(0.9, ge=0, le=1)  # [γ] smallest cluster, as a share of N/K
    upper: float | None = Field(None, ge=1)  # [γ'] largest cluster, as a multiple of N/K
    dual_lr: float = Field(0.1, gt=0)  # [η_ρ] step size of the dual variables
    dual_schedule: Literal["constant", "falling"] = "constant"  # falling: to 0 along a half cosine, once per epoch
    alpha: float | None = Field(None, ge=0)  # [α] weight of the entropy; None: 6N/50
    alpha_over: Literal["all", "seen"] = "all"  # α is divided by N, or in the first epoch by the images seen so far + 1

    @model_validator(mode="after")
    def _only_what_the_kind_reads(self) -> Self:
        owners = dict.fromkeys(("lower", "upper", "dual_lr", "dual_schedule"), "size")
        owners |= dict.fromkeys(("alpha", "alpha_over"), "entropy")
        for name, owner in owners.items():
            # A user-defined constraint may read any of them.
            others = {"none", "size", "entropy"} - {owner}
            if self.kind in others and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"constraint.{name}: {getattr(self, name)} is only read by constraint.kind={owner}, "
                    f"got constraint.kind={self.kind}"
                )
        return self


class CentersConfig(Model):
    """How centers are updated: see cluster/centers.py."""

    kind: CentersKind = "sgd"  # by gradient, in closed form, or as in k-means (CoKe)
    lr: float = Field(1.2, ge=0)  # learning rate of the centers; used by kind sgd only
    schedule: Literal["constant", "rising", "settling"] = "constant"  # rising: from 0; settling: to 0 in the last tenth
    optimizer: Literal["sgd", "lars"] = "sgd"  # lars: scale their steps, too, with one norm per head


class OptimConfig(Model):
    """How the encoder is trained."""

    name: Literal["sgd", "lars"] = "sgd"  # optimizer of the encoder
    lr: float = Field(0.2, ge=0)  # learning rate at the end of the warm-up
    schedule: Literal["cosine", "constant"] = "cosine"  # cosine: the learning rate then decays to 0 along a half cosine
    backbone_lr: float | None = Field(None, ge=0)  # that of the backbone, for example a pretrained one; None: the same
    momentum: float = Field(0.9, ge=0, lt=1)  # momentum of the encoder and the centers
    weight_decay: float = Field(1e-4, ge=0)  # weight decay of the encoder and the centers
    batch_size: int = Field(128, ge=2, le=MOST)  # images per step
    epochs: int = Field(400, ge=0, le=MOST)  # number of epochs, after the initial ones
    initial_epochs: int = Field(1, ge=0, le=MOST)  # epochs that train only centers and labels, before the others
    warmup_epochs: int = Field(10, ge=0, le=MOST)  # epochs over which the learning rate rises from 0
    precision: Literal["bf16", "fp16", "tf32", "fp32"] = "bf16"  # arithmetic of the encoder; CUDA only
    average_from: float | None = Field(None, ge=0, lt=1)  # fraction of the run after which epochs are averaged

    @property
    def total_epochs(self) -> int:
        """Total number of epochs, including the initial ones."""
        return self.initial_epochs + self.epochs


class SelfLabelConfig(Model):
    """Self-labeling, the second stage: see methods/selflabel.py and views/strong.py."""

    warmup_epochs: int = Field(10, ge=0, le=MOST)  # epochs that train on the labels of the previous run
    confidence: float = Field(0.9, gt=0, lt=1)  # threshold above which an image is trained on its own label
    decay: float = Field(0.0, ge=0, lt=1)  # decay of a moving-average teacher; 0: no teacher
    uncertain: Literal["nothing", "probabilities"] = "nothing"  # targets of images below the threshold
    kept: float = Field(0.0, ge=0, le=1)  # share of each cluster, the most confident, that keeps its first label
    smallest: float = Field(0.95, ge=0, lt=1)  # a cluster below this share of its first size is boosted
    dual_lr: float = Field(0.1, gt=0)  # step size of the boost and of the sharpness of probabilities
    sharpen: bool = True  # sharpen or flatten probabilities until as many images are confident as agree
    statistics: Literal["shared", "separate"] = "shared"  # batch statistics of weak and strong views, without a teacher
    keep_best: bool = True  # keep the last epoch near the best score; if it seems worse, the previous run's model
    weak_flip: bool = True  # whether weak views are flipped at random, like strong ones
    strong_style: Literal["secu", "scan"] = "secu"  # scan: cutouts of even sides in the mean color; posterize to 7 bits
    crop_padding: float = Field(0.125, ge=0, le=0.5)  # maximum shift of a strong view, as a fraction of the side
    operations: int = Field(4, ge=0, le=100)  # number of RandAugment operations in each strong view
    cutout: float = Field(0.5, ge=0, le=1)  # largest square cut out of a strong view, as a fraction of the side

    @model_validator(mode="after")
    def _separate_in_one_encoder(self) -> Self:
        if self.statistics == "separate" and self.decay:
            raise ValueError(f"selflabel.statistics: separate needs selflabel.decay=0, got {self.decay}")
        return self


class PaperConfig(Model):
    """The paper's results for this experiment, in percent; used for comparison only."""

    acc: float
    nmi: float
    ari: float


class Config(Model):
    """All settings of a run."""

    description: str = ""  # one line of description; has no effect
    paper: PaperConfig | None = None  # the paper's results, for comparison
    paper_selflabel: PaperConfig | None = None  # the paper's results after self-labeling
    method: MethodName = "secu"  # the training method
    init_from: str | None = None  # run folder to initialize encoder and heads from
    seed: int = Field(0, ge=0, lt=2**32)  # seed of all random numbers
    heads: tuple[int, ...] = tuple(range(10, 101, 10))  # [K] number of clusters of each head; all share one encoder
    head: int = Field(0, ge=0, le=MOST)  # index of the main head, from 0
    answer: Literal["head", "shifted", "tree", "auto", "number"] = "head"  # what is reported; see methods/answer.py
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    features: FeaturesConfig = FeaturesConfig()
    neighbors: NeighborsConfig = NeighborsConfig()
    hints: HintsConfig = HintsConfig()
    encoder: EncoderConfig = EncoderConfig()
    loss: LossConfig = LossConfig()
    constraint: ConstraintConfig = ConstraintConfig()
    centers: CentersConfig = CentersConfig()
    optim: OptimConfig = OptimConfig()
    selflabel: SelfLabelConfig | None = None  # settings of the method selflabel
    evaluate_every: int = Field(20, ge=0, le=MOST)  # epochs between scores on the test split; 0: only at the end
    engine: Literal["auto", "eager", "compiled", "graph"] = "auto"  # auto: graph on CUDA, otherwise eager

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.heads or min(self.heads) < 2 or max(self.heads) > MOST_CLUSTERS:
            valid = f"one or more cluster numbers from 2 to {MOST_CLUSTERS:,}"
            raise ValueError(f"heads: {list(self.heads)} must be {valid}")
        if self.loss.name == "ce" and self.centers.kind != "sgd":
            raise ValueError(
                f"loss.name: ce moves centers by gradient, so centers.kind must be sgd, got {self.centers.kind}"
            )
        if self.centers.schedule != "constant" and self.centers.kind != "sgd":
            given = f"{self.centers.schedule} needs centers.kind=sgd, got {self.centers.kind}"
            raise ValueError(f"centers.schedule: {given}")
        if self.optim.average_from is not None and self.selflabel and self.selflabel.keep_best:
            raise ValueError(f"optim.average_from: {self.optim.average_from} needs selflabel.keep_best=false, got true")
        if self.centers.optimizer == "lars" and self.optim.name != "lars":
            raise ValueError(f"centers.optimizer: lars needs optim.name=lars, got {self.optim.name}")
        if self.augment.crop_from == "original" and self.neighbors.count:
            raise ValueError(f"neighbors.count: {self.neighbors.count} needs augment.crop_from=square, got original")
        if self.head >= len(self.heads):
            raise ValueError(f"head: {self.head} must be the position of one of {len(self.heads)} heads, from 0")
        if self.answer == "tree" and max(self.heads) <= self.clusters:
            raise ValueError(f"answer: tree needs a head of more than {self.clusters} clusters, got {list(self.heads)}")
        if self.answer == "number" and len(set(self.heads)) < 2:
            raise ValueError(f"answer: number needs heads of at least two sizes, got {list(self.heads)}")
        if self.hints.checksum is not None and (self.method != "secu" or self.answer != "head"):
            raise ValueError(
                f"hints: need method=secu and answer=head, got method={self.method} and answer={self.answer}"
            )
        # A user-defined method may read the section or do without.
        if self.method in ("secu", "selflabel") and (self.method == "selflabel") != (self.selflabel is not None):
            raise ValueError(
                f"selflabel: only used with method=selflabel, got method={self.method}; run secu selflabel"
            )
        if self.selflabel and (len(self.heads) > 1 or self.centers.kind != "sgd"):
            raise ValueError("selflabel: needs a single head and centers.kind=sgd; run secu selflabel")
        if not self.optim.total_epochs:
            raise ValueError("optim.epochs: 0 needs optim.initial_epochs of at least 1, got 0")
        return self

    @property
    def clusters(self) -> int:
        """Number of clusters of the main head."""
        return self.heads[self.head]

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect training: all except the description and the paper's numbers."""
        return self.model_dump(mode="json", exclude={"description", "paper", "paper_selflabel"})

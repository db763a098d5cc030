"""Self-labeling step by step: who is taught what, against plain Python numbers, and what boosts a small cluster."""

import copy
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secu.base.errors import UserError
from secu.config import Config
from secu.methods.confident import ConfidentLabels, most_confident
from test_clustering import BATCH, DIM, IMAGES, dot, draw_embeddings, normalize, softmax

CLUSTERS = 4


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Reference:
    """The docstrings of confident.py, image by image and number by number."""

    def __init__(self, config: Config, centers_KD: Tensor, first_labels: list[int], confidence: list[float]) -> None:
        assert config.selflabel is not None
        self.settings = config.selflabel
        self.temperature = config.loss.temperature
        self.centers = [normalize(w) for w in centers_KD.tolist()]
        self.first = first_labels
        self.memory = list(first_labels)
        self.kept = set()
        for k in range(CLUSTERS):
            members = sorted((i for i, label in enumerate(first_labels) if label == k), key=lambda i: -confidence[i])
            self.kept |= set(members[: math.ceil(self.settings.kept * len(members))])
        self.bonus = [0.0] * CLUSTERS
        self.sharpness = 1.0
        self.epoch = 0
        self.decided = Counter()  # how often each rule made a difference

    def start_epoch(self) -> None:
        self.taught = 0
        self.confident = 0
        self.epoch += 1

    def step(self, x_SBD: list[list[list[float]]], index: list[int]) -> tuple[float, list[list[float]]]:
        """Return the loss, and its gradient to the embedding of every strong view."""
        limit = self.settings.confidence
        weak = []
        confident = []
        probabilities = []
        for b in range(len(index)):
            cosines = [dot(x_SBD[0][b], w) for w in self.centers]
            boosted = [cosine + bonus for cosine, bonus in zip(cosines, self.bonus, strict=True)]
            weak.append(boosted.index(max(boosted)))
            self.decided["bonus"] += weak[b] != cosines.index(max(cosines))
            probabilities.append(softmax([value / self.temperature for value in boosted]))
            sharpened = softmax([value / self.temperature * self.sharpness for value in boosted])
            confident.append(sharpened[weak[b]] > limit)
            self.decided["sharpness"] += confident[b] != (probabilities[b][weak[b]] > limit)
        self.decided["uncertain"] += len(confident) - sum(confident)
        taught, labels = self.teach(weak, confident, index)
        targets = []
        for b, (y, yes) in enumerate(zip(labels, taught, strict=True)):
            first = self.first[index[b]]
            others = [0.8 * p + 0.2 * (k == first) for k, p in enumerate(probabilities[b])]
            if self.settings.uncertain == "nothing":
                others = [0.0] * CLUSTERS
            targets.append([float(k == y) for k in range(CLUSTERS)] if yes else others)
        self.taught += sum(taught)
        self.confident += sum(confident)
        strong = [[dot(x, w) for w in self.centers] for x in x_SBD[1]]
        self.remember(weak, confident, [cosines.index(max(cosines)) for cosines in strong], index)
        return self.learn(x_SBD[1], targets)

    def teach(self, weak: list[int], confident: list[bool], index: list[int]) -> tuple[list[bool], list[int]]:
        """Return which images are taught a label, and that label."""
        if self.epoch <= self.settings.warmup_epochs:
            return [True] * len(index), [self.first[i] for i in index]
        boosted = [self.bonus[label] > self.temperature for label in weak]
        self.decided["boost"] += sum(b and not a for a, b in zip(confident, boosted, strict=True))
        kept = [i in self.kept for i in index]
        taught = [a or b or c for a, b, c in zip(confident, boosted, kept, strict=True)]
        labels = [self.first[i] if c else label for i, c, label in zip(index, kept, weak, strict=True)]
        self.decided["kept"] += sum(a != b for a, b in zip(labels, weak, strict=True))
        return taught, labels

    def remember(self, weak: list[int], confident: list[bool], strong: list[int], index: list[int]) -> None:
        rate = self.settings.dual_lr
        for i, label in zip(index, weak, strict=True):
            self.memory[i] = label
        for k in range(CLUSTERS):
            wanted = self.settings.smallest * self.first.count(k) / IMAGES
            bonus = self.bonus[k] + rate * (wanted - weak.count(k) / len(weak))
            self.bonus[k] = min(max(0.0, bonus), 10 * self.temperature)
        agree = sum(a == b for a, b in zip(weak, strong, strict=True))
        if not self.settings.sharpen:
            return
        surplus = (agree - sum(confident)) / len(confident)
        self.sharpness = min(20.0, self.sharpness * math.exp(rate * surplus))

    def learn(self, x_BD: list[list[float]], targets: list[list[float]]) -> tuple[float, list[list[float]]]:
        """Return the mean over the clusters that are taught of the mean cross-entropy of their images."""
        loss = 0.0
        slope = [[0.0] * DIM for _ in targets]
        counts = [sum(target[k] for target in targets) for k in range(CLUSTERS)]
        clusters = max(1.0, sum(min(count, 1.0) for count in counts))
        for b, (x, target) in enumerate(zip(x_BD, targets, strict=True)):
            weights = [value / max(count, 1.0) / clusters for value, count in zip(target, counts, strict=True)]
            p = softmax([dot(x, w) / self.temperature for w in self.centers])
            for k, w in enumerate(self.centers):
                loss -= weights[k] * math.log(p[k])
                for d in range(DIM):
                    slope[b][d] += (p[k] * sum(weights) - weights[k]) * w[d] / self.temperature
        return loss, slope


def make(images: int = IMAGES, dim: int = DIM, heads: int = CLUSTERS, temperature: float = 0.1, **settings):
    """Return the settings and an untrained clustering."""
    base = {"method": "selflabel", "heads": [heads], "loss": {"temperature": temperature}}
    config = Config.model_validate(base | {"selflabel": settings})
    torch.manual_seed(3)
    return config, ConfidentLabels(config, config.selflabel, images, dim)


@pytest.mark.parametrize("outputs", [2, 4])
@pytest.mark.parametrize(("warmup", "confidence"), [(2, 0.8), (0, 0.6), (5, 0.9)])
@pytest.mark.parametrize(
    ("uncertain", "kept", "sharpen"), [("probabilities", 0.3, True), ("nothing", 0.0, True), ("nothing", 0.0, False)]
)
def test_steps_follow_the_docstrings(float64, outputs, warmup, confidence, uncertain, kept, sharpen):
    """Five epochs of five batches: loss, gradient, bonus, sharpness, memory and counts, after every single step."""
    rules = {"dual_lr": 0.5, "uncertain": uncertain, "kept": kept, "sharpen": sharpen}
    config, labeling = make(warmup_epochs=warmup, confidence=confidence, **rules)
    first = [i % CLUSTERS for i in range(IMAGES)]
    drawn = torch.rand(IMAGES, generator=torch.Generator().manual_seed(0))
    labeling.begin(torch.tensor(first), drawn)
    reference = Reference(config, labeling.centers.weight[0].detach(), first, drawn.tolist())
    for epoch in range(5):
        labeling.start_epoch()
        reference.start_epoch()
        for index in torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch)).split(BATCH):
            x = draw_embeddings(outputs, index, epoch).requires_grad_()
            losses = labeling.step(x, index)
            expected, slope = reference.step(x.tolist(), index.tolist())
            losses["loss"].backward()
            assert losses["loss"].item() == pytest.approx(expected, abs=1e-10)
            assert list(losses) == ["loss"]  # there is no loss of the centers alone
            torch.testing.assert_close(x.grad[1], torch.tensor(slope), rtol=1e-8, atol=1e-10)
            assert (x.grad[[s for s in range(outputs) if s != 1]] == 0).all()
            assert labeling.labels[:, 0].tolist() == reference.memory
            assert int(labeling.taught) == reference.taught
            assert labeling.bonus.tolist() == pytest.approx(reference.bonus, abs=1e-12)
            assert labeling.log_sharpness.exp().item() == pytest.approx(reference.sharpness, abs=1e-12)
        record = labeling.record()
        assert record["taught"] == pytest.approx(reference.taught / IMAGES)
        assert record["confident"] == pytest.approx(reference.confident / IMAGES)
        moved = sum(now != start for now, start in zip(reference.memory, first, strict=True))
        assert record["moved"] == pytest.approx(moved / IMAGES)
        assert record["boosted"] == sum(value > config.loss.temperature for value in reference.bonus)
        assert record["sharpness"] == pytest.approx(reference.sharpness)
    # Otherwise one of the rules could be missing.
    assert min(reference.decided[name] for name in ("bonus", "uncertain")) > 0
    assert (reference.decided["sharpness"] > 0) == sharpen
    assert reference.decided["boost"] > 0 or warmup == 5
    assert (reference.decided["kept"] > 0) == (kept > 0 and warmup < 5)


def test_all_images_learn_the_first_labels_while_warming_up_and_their_own_afterwards():
    """Every image lies on a center other than that of its first label."""
    _, labeling = make(warmup_epochs=2, kept=0)
    index = torch.arange(IMAGES)
    first = index % CLUSTERS
    labeling.begin(first, torch.ones(len(first)))
    x_BD = labeling.head()[(first + 1) % CLUSTERS]
    losses = []
    for _ in range(3):
        labeling.start_epoch()
        labeling.bonus.zero_()
        loss = labeling.step(torch.stack([x_BD, x_BD]), index)["loss"]
        logits = x_BD @ labeling.head().T / 0.1
        losses.append(loss.item())
        taught = first if len(losses) < 3 else (first + 1) % CLUSTERS
        weight = 1 / torch.bincount(taught, minlength=CLUSTERS)
        assert loss.item() == pytest.approx(F.cross_entropy(logits, taught, weight).item(), rel=1e-5)
        assert labeling.labels[:, 0].tolist() == ((first + 1) % CLUSTERS).tolist()
    assert losses[0] == losses[1] > losses[2] + 1
    assert labeling.record()["taught"] == 1
    assert labeling.record()["moved"] == 1


def test_labels_at_the_start_are_remembered_and_counted():
    _, labeling = make()
    first = torch.tensor([0] * 11 + [2] * 8 + [1] * 3)
    labeling.begin(first, torch.ones(len(first)))
    assert labeling.labels[:, 0].tolist() == first.tolist()
    assert labeling.sizes().tolist() == [11, 3, 8, 0]
    assert labeling.first_share.tolist() == pytest.approx([11 / 22, 3 / 22, 8 / 22, 0])


def test_without_labels_to_start_from_there_is_nothing_to_teach():
    """What a run of this method without ``begin`` would do."""
    _, labeling = make()
    with pytest.raises(UserError, match="selflabel: there are no labels to start from; run secu selflabel"):
        labeling.start_epoch()


def test_checkpoint_holds_what_a_step_needs():
    config, one = make(warmup_epochs=1, confidence=0.5, dual_lr=0.5)
    one.begin(torch.arange(IMAGES) % CLUSTERS, torch.linspace(0, 1, IMAGES))
    for epoch in range(2):
        one.start_epoch()
        for index in torch.arange(IMAGES).split(BATCH):
            one.step(draw_embeddings(2, index, epoch), index)
    other = ConfidentLabels(config, config.selflabel, IMAGES, DIM)
    other.load_state_dict(one.state_dict())
    losses = []
    for labeling in (one, other):
        labeling.start_epoch()
        index = torch.arange(8)
        losses.append(labeling.step(draw_embeddings(2, index, 2), index)["loss"].item())
    assert losses[0] == losses[1] > 0
    assert one.record() == other.record()
    assert one.log_sharpness != 0
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("uncertain", ["probabilities", "nothing"])
def test_compiled_step_equals_the_plain_one(uncertain):
    """Warm-up and two epochs after it, from the same state with the same embeddings."""
    _, plain = make(warmup_epochs=1, confidence=0.5, dual_lr=0.5, uncertain=uncertain)
    plain.begin(torch.arange(IMAGES) % CLUSTERS, torch.linspace(0, 1, IMAGES))
    compiled = copy.deepcopy(plain)
    step = torch.compile(compiled.step, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    shares = []
    for epoch in range(3):
        for labeling in (plain, compiled):
            labeling.start_epoch()
        for index in torch.arange(20).split(BATCH):
            x, y = (draw_embeddings(4, index, epoch).requires_grad_() for _ in range(2))
            mine = plain.step(x, index)["loss"]
            theirs = step(y, index)["loss"]
            for loss in (mine, theirs):
                loss.backward()
            torch.testing.assert_close(mine, theirs)
            torch.testing.assert_close(x.grad, y.grad)
        for name, value in plain.named_buffers():
            assert torch.equal(value, dict(compiled.named_buffers())[name]), name
        shares.append(plain.record()["taught"])
    assert shares[0] == pytest.approx(20 / IMAGES)
    assert shares[0] > shares[1] > 0


def test_centers_learn_from_the_same_loss():
    """Their gradient, with fixed targets: that of a softmax over cosines, of which only the strong view's count."""
    config, labeling = make(warmup_epochs=1)
    index = torch.arange(IMAGES)
    first = index % CLUSTERS
    labeling.begin(first, torch.ones(IMAGES))
    labeling.start_epoch()
    x_SBD = draw_embeddings(2, index, 0)
    labeling.step(x_SBD, index)["loss"].backward()
    weight = labeling.centers.weight.detach()[0].clone().requires_grad_()
    share = 1 / torch.bincount(first, minlength=CLUSTERS)
    F.cross_entropy(x_SBD[1] @ F.normalize(weight, dim=-1).T / config.loss.temperature, first, share).backward()
    torch.testing.assert_close(labeling.centers.weight.grad[0], weight.grad)
    assert weight.grad.abs().max() > 1e-3


# The share of confident images


@pytest.mark.parametrize("temperature", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("agreement", [0.1, 0.5, 0.9])
def test_as_many_images_become_confident_as_have_one_label_in_both_views(temperature, agreement):
    """At 0.01 nearly all are confident to begin with, at 0.5 none."""
    _, labeling = make(200, 2, 2, temperature, warmup_epochs=0, smallest=0, uncertain="nothing", kept=0)
    with torch.no_grad():
        labeling.centers.weight.copy_(torch.eye(2))
    labeling.begin(torch.arange(200) % 2, torch.ones(200))
    angle = torch.linspace(0, 0.2 * math.pi, 200)[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    weak_BD = torch.stack([angle.cos(), angle.sin()], 1)  # the smaller the angle, the more confident
    strong_BD = torch.where(torch.arange(200)[:, None] < 200 * agreement, weak_BD, weak_BD.flip(1))
    shares = []
    for _ in range(400):
        labeling.start_epoch()
        labeling.step(torch.stack([weak_BD, strong_BD]), torch.arange(200))
        shares.append(labeling.record()["confident"])
    assert shares[-1] == pytest.approx(agreement, abs=0.02) != pytest.approx(shares[0], abs=0.02)
    assert labeling.record()["taught"] == shares[-1]
    assert (labeling.record()["sharpness"] > 1) == (shares[0] < agreement)


def test_sharpness_has_a_limit():
    """Embeddings between two centers all have one label, but nothing can make it a confident one."""
    _, labeling = make(8, 2, 2, warmup_epochs=0, smallest=0, dual_lr=1)
    with torch.no_grad():
        labeling.centers.weight.copy_(torch.eye(2))
    labeling.begin(torch.zeros(8, dtype=torch.int64), torch.ones(8))
    between_SBD = F.normalize(torch.tensor([1.0, 0.99999]), dim=0).expand(2, 8, 2)
    for _ in range(10):
        labeling.start_epoch()
        loss = labeling.step(between_SBD, torch.arange(8))["loss"]
    assert labeling.record()["sharpness"] == pytest.approx(20)
    assert labeling.record()["confident"] == 0
    assert loss == 0


# Who keeps the first label


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1, width=32)), min_size=1, max_size=30),
    st.sampled_from([0, 0.25, 0.5, 0.75, 1]),
)
def test_most_confident_images_of_every_cluster_are_found(images, share):
    labels, confidence = (torch.tensor(column) for column in zip(*images, strict=True))
    found = most_confident(labels, confidence, share)
    for k in set(labels.tolist()):
        inside = confidence[(labels == k) & found]
        outside = confidence[(labels == k) & ~found]
        assert len(inside) == math.ceil(share * int((labels == k).sum()))
        assert not len(inside) or not len(outside) or inside.min() >= outside.max()


# The boost of small clusters


@pytest.mark.parametrize(("smallest", "least", "most"), [(0.0, 0, 0), (0.5, 45, 70), (0.8, 72, 90)])
def test_cluster_whose_images_drift_to_another_keeps_a_share_of_its_size(smallest, least, most):
    """Three clusters of 100; the images of the last move to the first, each at its own pace, in fixed embeddings."""
    _, labeling = make(300, 3, 3, smallest=smallest)
    with torch.no_grad():
        labeling.centers.weight.copy_(torch.eye(3))
    first = torch.arange(300) % 3
    labeling.begin(first, torch.ones(len(first)))
    pace = 0.6 + 0.4 * torch.rand(300, generator=torch.Generator().manual_seed(0))
    start = torch.eye(3)[first]
    for epoch in range(40):
        way = (pace * min(epoch / 20, 1) * (first == 2))[:, None]
        x_ND = F.normalize((1 - way) * start + way * torch.eye(3)[0], dim=-1)
        labeling.start_epoch()
        for index in torch.randperm(300, generator=torch.Generator().manual_seed(epoch)).split(50):
            labeling.step(torch.stack([x_ND[index]] * 2), index)
    sizes = labeling.sizes().tolist()
    assert least <= sizes[2] <= most
    assert sizes[1] == 100
    assert labeling.bonus[:2].max() < 0.01  # hardly any for clusters that need none
    assert labeling.bonus[2] > 0.2 if smallest else labeling.record()["boosted"] == 0

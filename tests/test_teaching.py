"""Self-labeling step by step: who is taught what, against plain Python numbers, and what holds a cluster up."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secu.checkpoint import build
from secu.config import Config
from secu.data import Images
from secu.engine import Engine
from secu.errors import UserError
from secu.evaluate import embed
from secu.settings import load_config
from secu.steps import TeachStep, step_of
from secu.teaching import Teaching, surest
from test_clustering import BATCH, DIM, IMAGES, dot, draw_embeddings, normalise, softmax

CLUSTERS = 4
CPU = torch.device("cpu")


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Reference:
    """The docstrings of teaching.py, image by image and number by number."""

    def __init__(self, config: Config, centers_KD: Tensor, first_labels: list[int], sureness: list[float]) -> None:
        assert config.selflabel is not None
        self.settings, self.temperature = config.selflabel, config.loss.temperature
        self.centers = [normalise(w) for w in centers_KD.tolist()]
        self.first, self.memory = first_labels, list(first_labels)
        self.kept = set()
        for k in range(CLUSTERS):
            members = sorted((i for i, label in enumerate(first_labels) if label == k), key=lambda i: -sureness[i])
            self.kept |= set(members[: math.ceil(self.settings.kept * len(members))])
        self.bonus, self.sharpness, self.epoch = [0.0] * CLUSTERS, 1.0, 0
        self.unsure = self.kept_decided = self.bonus_decided = self.sharpness_decided = self.held_up = 0

    def start_epoch(self) -> None:
        self.taught = self.sure = 0
        self.epoch += 1

    def step(self, x_SBD: list[list[list[float]]], index: list[int]) -> tuple[float, list[list[float]]]:
        """Return the loss, and its gradient to the embedding of every strong view."""
        weak, sure, chances, limit = [], [], [], self.settings.confidence
        for b in range(len(index)):
            cosines = [dot(x_SBD[0][b], w) for w in self.centers]
            held = [cosine + bonus for cosine, bonus in zip(cosines, self.bonus, strict=True)]
            weak.append(held.index(max(held)))
            self.bonus_decided += weak[b] != cosines.index(max(cosines))
            chances.append(softmax([value / self.temperature for value in held]))
            sure.append(softmax([value / self.temperature * self.sharpness for value in held])[weak[b]] > limit)
            self.sharpness_decided += sure[b] != (chances[b][weak[b]] > limit)
        self.unsure += len(sure) - sum(sure)
        if self.epoch <= self.settings.warmup_epochs:
            taught, labels = [True] * len(index), [self.first[i] for i in index]
        else:
            held_up = [self.bonus[label] > self.temperature for label in weak]
            self.held_up += sum(b and not a for a, b in zip(sure, held_up, strict=True))
            kept = [i in self.kept for i in index]
            taught = [a or b or c for a, b, c in zip(sure, held_up, kept, strict=True)]
            labels = [self.first[i] if c else label for i, c, label in zip(index, kept, weak, strict=True)]
            self.kept_decided += sum(a != b for a, b in zip(labels, weak, strict=True))
        targets = []
        for b, (y, yes) in enumerate(zip(labels, taught, strict=True)):
            first = self.first[index[b]]
            others = [0.8 * chance + 0.2 * (k == first) for k, chance in enumerate(chances[b])]
            if self.settings.unsure == "nothing":
                others = [0.0] * CLUSTERS
            targets.append([float(k == y) for k in range(CLUSTERS)] if yes else others)
        self.taught += sum(taught)
        self.sure += sum(sure)
        strong = [[dot(x, w) for w in self.centers] for x in x_SBD[1]]
        self.remember(weak, sure, [cosines.index(max(cosines)) for cosines in strong], index)
        return self.learn(x_SBD[1], targets)

    def remember(self, weak: list[int], sure: list[bool], strong: list[int], index: list[int]) -> None:
        rate = self.settings.dual_lr
        for i, label in zip(index, weak, strict=True):
            self.memory[i] = label
        for k in range(CLUSTERS):
            wanted = self.settings.smallest * self.first.count(k) / IMAGES
            held_up = self.bonus[k] + rate * (wanted - weak.count(k) / len(weak))
            self.bonus[k] = min(max(0.0, held_up), 10 * self.temperature)
        agree = sum(a == b for a, b in zip(weak, strong, strict=True))
        self.sharpness = min(20.0, self.sharpness * math.exp(rate * (agree - sum(sure)) / len(sure)))

    def learn(self, x_BD: list[list[float]], targets: list[list[float]]) -> tuple[float, list[list[float]]]:
        """Mean over the clusters that are taught of the mean cross-entropy of their images."""
        loss, slope = 0.0, [[0.0] * DIM for _ in targets]
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
    config = Config.model_validate({"heads": [heads], "loss": {"temperature": temperature}, "selflabel": settings})
    torch.manual_seed(3)
    return config, Teaching(config, images, dim)


@pytest.mark.parametrize("outputs", [2, 4])
@pytest.mark.parametrize(("warmup", "confidence"), [(2, 0.8), (0, 0.6), (5, 0.9)])
@pytest.mark.parametrize(("unsure", "kept"), [("chances", 0.3), ("nothing", 0.0)])
def test_steps_follow_the_docstrings(float64, outputs, warmup, confidence, unsure, kept):
    """Five epochs of five batches: loss, gradient, bonus, sharpness, memory and counts, after every single step."""
    config, teaching = make(warmup_epochs=warmup, confidence=confidence, dual_lr=0.5, unsure=unsure, kept=kept)
    first = [i % CLUSTERS for i in range(IMAGES)]
    sureness = torch.rand(IMAGES, generator=torch.Generator().manual_seed(0))
    teaching.begin(torch.tensor(first), sureness)
    reference = Reference(config, teaching.centers.weight[0].detach(), first, sureness.tolist())
    for epoch in range(5):
        teaching.start_epoch()
        reference.start_epoch()
        for index in torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch)).split(BATCH):
            x = draw_embeddings(outputs, index, epoch).requires_grad_()
            losses = teaching.step(x, index)
            expected, slope = reference.step(x.tolist(), index.tolist())
            losses.representation.backward()
            assert losses.representation.item() == pytest.approx(expected, abs=1e-10)
            assert losses.centers.item() == 0
            torch.testing.assert_close(x.grad[1], torch.tensor(slope), rtol=1e-8, atol=1e-10)
            assert (x.grad[[s for s in range(outputs) if s != 1]] == 0).all()
            assert teaching.labels[:, 0].tolist() == reference.memory
            assert int(teaching.taught) == reference.taught
            assert teaching.bonus.tolist() == pytest.approx(reference.bonus, abs=1e-12)
            assert teaching.log_sharpness.exp().item() == pytest.approx(reference.sharpness, abs=1e-12)
        record = teaching.record()
        assert record["taught"] == pytest.approx(reference.taught / IMAGES)
        assert record["sure"] == pytest.approx(reference.sure / IMAGES)
        moved = sum(now != start for now, start in zip(reference.memory, first, strict=True))
        assert record["moved"] == pytest.approx(moved / IMAGES)
        assert record["held_up"] == sum(value > config.loss.temperature for value in reference.bonus)
        assert record["sharpness"] == pytest.approx(reference.sharpness)
    # Else one of them could be left out.
    assert min(reference.bonus_decided, reference.unsure, reference.sharpness_decided) > 0
    assert reference.held_up > 0 or warmup == 5
    assert (reference.kept_decided > 0) == (kept > 0 and warmup < 5)


def test_all_images_learn_the_first_labels_while_warming_up_and_their_own_afterwards():
    """Every image lies on a center other than that of its first label."""
    _, teaching = make(warmup_epochs=2, kept=0)
    first, index = torch.arange(IMAGES) % CLUSTERS, torch.arange(IMAGES)
    teaching.begin(first, torch.ones(len(first)))
    x_BD = teaching.head()[(first + 1) % CLUSTERS]
    losses = []
    for _ in range(3):
        teaching.start_epoch()
        teaching.bonus.zero_()
        loss = teaching.step(torch.stack([x_BD, x_BD]), index).representation
        logits = x_BD @ teaching.head().T / 0.1
        losses.append(loss.item())
        taught = first if len(losses) < 3 else (first + 1) % CLUSTERS
        weight = 1 / torch.bincount(taught, minlength=CLUSTERS)
        assert loss.item() == pytest.approx(F.cross_entropy(logits, taught, weight).item(), rel=1e-5)
        assert teaching.labels[:, 0].tolist() == ((first + 1) % CLUSTERS).tolist()
    assert losses[0] == losses[1] > losses[2] + 1
    assert teaching.record()["taught"] == 1
    assert teaching.record()["moved"] == 1


def test_labels_at_the_start_are_remembered_and_counted():
    _, teaching = make()
    first = torch.tensor([0] * 11 + [2] * 8 + [1] * 3)
    teaching.begin(first, torch.ones(len(first)))
    assert teaching.labels[:, 0].tolist() == first.tolist()
    assert teaching.sizes().tolist() == [11, 3, 8, 0]
    assert teaching.first_share.tolist() == pytest.approx([11 / 22, 3 / 22, 8 / 22, 0])


def test_without_labels_to_start_from_there_is_nothing_to_teach():
    """What ``secu train selflabel.confidence=0.8`` would do."""
    _, teaching = make()
    with pytest.raises(UserError, match="no labels to start from; use the command secu selflabel"):
        teaching.start_epoch()


def test_a_checkpoint_holds_what_a_step_needs():
    config, one = make(warmup_epochs=1, confidence=0.5, dual_lr=0.5)
    one.begin(torch.arange(IMAGES) % CLUSTERS, torch.linspace(0, 1, IMAGES))
    for epoch in range(2):
        one.start_epoch()
        for index in torch.arange(IMAGES).split(BATCH):
            one.step(draw_embeddings(2, index, epoch), index)
    other = Teaching(config, IMAGES, DIM)
    other.load_state_dict(one.state_dict())
    assert one.record() == other.record()
    losses = []
    for teaching in (one, other):
        teaching.start_epoch()
        index = torch.arange(8)
        losses.append(teaching.step(draw_embeddings(2, index, 2), index).representation.item())
    assert losses[0] == losses[1] > 0
    assert one.log_sharpness != 0
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("unsure", ["chances", "nothing"])
def test_a_compiled_step_equals_the_plain_one(unsure):
    """Warm-up and two epochs after it, from the same state with the same embeddings."""
    _, plain = make(warmup_epochs=1, confidence=0.5, dual_lr=0.5, unsure=unsure)
    plain.begin(torch.arange(IMAGES) % CLUSTERS, torch.linspace(0, 1, IMAGES))
    compiled = copy.deepcopy(plain)
    step = torch.compile(compiled.step, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    shares = []
    for epoch in range(3):
        for teaching in (plain, compiled):
            teaching.start_epoch()
        for index in torch.arange(20).split(BATCH):
            x, y = (draw_embeddings(4, index, epoch).requires_grad_() for _ in range(2))
            mine, theirs = plain.step(x, index).representation, step(y, index).representation
            for loss in (mine, theirs):
                loss.backward()
            torch.testing.assert_close(mine, theirs)
            torch.testing.assert_close(x.grad, y.grad)
        for name, value in plain.named_buffers():
            assert torch.equal(value, dict(compiled.named_buffers())[name]), name
        shares.append(plain.record()["taught"])
    assert shares[0] == pytest.approx(20 / IMAGES)
    assert shares[0] > shares[1] > 0


# The share of sure images


@pytest.mark.parametrize("temperature", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("agreement", [0.1, 0.5, 0.9])
def test_as_many_images_become_sure_as_have_one_label_in_both_views(temperature, agreement):
    """At 0.01 nearly all are sure to begin with, at 0.5 none."""
    _, teaching = make(200, 2, 2, temperature, warmup_epochs=0, smallest=0, unsure="nothing", kept=0)
    with torch.no_grad():
        teaching.centers.weight.copy_(torch.eye(2))
    teaching.begin(torch.arange(200) % 2, torch.ones(200))
    angle = torch.linspace(0, 0.2 * math.pi, 200)[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    weak_BD = torch.stack([angle.cos(), angle.sin()], 1)  # the smaller the angle, the surer
    strong_BD = torch.where(torch.arange(200)[:, None] < 200 * agreement, weak_BD, weak_BD.flip(1))
    told = []
    for _ in range(400):
        teaching.start_epoch()
        teaching.step(torch.stack([weak_BD, strong_BD]), torch.arange(200))
        told.append(teaching.record()["sure"])
    assert told[-1] == pytest.approx(agreement, abs=0.02) != pytest.approx(told[0], abs=0.02)
    assert teaching.record()["taught"] == told[-1]
    assert (teaching.record()["sharpness"] > 1) == (told[0] < agreement)


def test_sureness_has_an_end():
    """Embeddings that lie between two centers all have one label, but nothing can make them sure of it."""
    _, teaching = make(8, 2, 2, warmup_epochs=0, smallest=0, dual_lr=1)
    with torch.no_grad():
        teaching.centers.weight.copy_(torch.eye(2))
    teaching.begin(torch.zeros(8, dtype=torch.int64), torch.ones(8))
    between_SBD = F.normalize(torch.tensor([1.0, 0.99999]), dim=0).expand(2, 8, 2)
    for _ in range(10):
        teaching.start_epoch()
        loss = teaching.step(between_SBD, torch.arange(8)).representation
    assert teaching.record()["sharpness"] == pytest.approx(20)
    assert teaching.record()["sure"] == 0
    assert loss == 0


# Who keeps the first label


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1, width=32)), min_size=1, max_size=30),
    st.sampled_from([0, 0.25, 0.5, 0.75, 1]),
)
def test_the_surest_of_every_cluster_are_found(images, share):
    labels, sureness = (torch.tensor(column) for column in zip(*images, strict=True))
    found = surest(labels, sureness, share)
    for k in set(labels.tolist()):
        inside, outside = sureness[(labels == k) & found], sureness[(labels == k) & ~found]
        assert len(inside) == math.ceil(share * int((labels == k).sum()))
        assert not len(inside) or not len(outside) or inside.min() >= outside.max()


# The guard


@pytest.mark.parametrize(("smallest", "least", "most"), [(0.0, 0, 0), (0.5, 45, 70), (0.8, 72, 90)])
def test_a_cluster_whose_images_drift_to_another_is_held_at_half_of_its_size(smallest, least, most):
    """Three clusters of 100; the images of the last move to the first, each at its own pace, in fixed embeddings."""
    _, teaching = make(300, 3, 3, smallest=smallest)
    with torch.no_grad():
        teaching.centers.weight.copy_(torch.eye(3))
    first = torch.arange(300) % 3
    teaching.begin(first, torch.ones(len(first)))
    pace, start = 0.6 + 0.4 * torch.rand(300, generator=torch.Generator().manual_seed(0)), torch.eye(3)[first]
    for epoch in range(40):
        way = (pace * min(epoch / 20, 1) * (first == 2))[:, None]
        x_ND = F.normalize((1 - way) * start + way * torch.eye(3)[0], dim=-1)
        teaching.start_epoch()
        for index in torch.randperm(300, generator=torch.Generator().manual_seed(epoch)).split(50):
            teaching.step(torch.stack([x_ND[index]] * 2), index)
    sizes = teaching.sizes().tolist()
    assert least <= sizes[2] <= most
    assert sizes[1] == 100
    assert teaching.bonus[:2].max() < 0.01  # hardly anything is given to those who need nothing
    assert teaching.bonus[2] > 0.2 if smallest else teaching.record()["held_up"] == 0


def shades(images: int) -> tuple[Images, Tensor]:
    """Three kinds of image, a bright quadrant each; the last in all shades, of which two clusters have a half each."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 40, (images, 1, 8, 8), dtype=torch.uint8, generator=generator)
    kind, shade = torch.arange(images) % 3, torch.rand(images, generator=generator)
    level = (90 + 120 * torch.where(kind == 2, shade, 1)).to(torch.uint8).view(-1, 1, 1, 1)
    for k in range(3):
        top, left = 4 * (k // 2), 4 * (k % 2)
        pixels[k::3, :, top : top + 4, left : left + 4] += level[k::3]
    return Images(pixels), torch.where((kind == 2) & (shade > 0.5), 3, kind)


@pytest.mark.timeout(600)
def test_trainings_lose_clusters_without_the_guard_and_none_with_it():
    """Where one shade ends and the other begins is for the model to say, and it moves on until one is gone.

    How far it moves is chaotic. Of 5 seeds at learning rates of 0.01, 0.03, 0.05, 0.08, 0.1 and 0.15 each, 12 of 30
    trainings lose a cluster without the guard. With it all labels stay, though in one of the 30 the model itself, to
    which the bonus is unknown, forgets a cluster. Hence three of the seeds at 0.1, of which two lose a cluster.
    """
    images, first = shades(240)
    schedule = ["optim.batch_size=16", "optim.epochs=24", "optim.initial_epochs=0", "optim.warmup_epochs=0"]
    fixed = ["centers.lr=0", "constraint.kind=none", "optim.lr=0.1", "loss.temperature=0.1", "encoder.dim=16"]
    teaching = ["warmup_epochs=5", "operations=0", "cutout=0.3", "decay=0", "unsure=nothing", "kept=0"]
    smallest = {}
    for seed, guard in itertools.product((1, 2, 3), (0, 0.5)):
        settings = [f"selflabel.{setting}" for setting in (*teaching, f"smallest={guard}")]
        config = load_config("digits", ["heads=[4]", f"seed={seed}", *schedule, *fixed, *settings])
        model = build(config, len(images), images.shape, CPU)
        step = step_of(config)(config, images, model.augmentation, model.encoder, model.clustering, CPU)
        model.clustering.begin(first, torch.ones(len(first)))
        for number in range(24):
            Engine([step], "eager").epoch(number)
        cosines = embed(model.encoder, model.augmentation, images) @ model.clustering.head().T
        sizes = (model.clustering.sizes(), cosines.argmax(-1).bincount(minlength=4))
        smallest[seed, guard] = [int(counts.min()) for counts in sizes]
    assert any(smallest[seed, 0] == [0, 0] for seed in (1, 2, 3))
    labels, found = zip(*(smallest[seed, 0.5] for seed in (1, 2, 3)), strict=True)
    assert min(labels) > 0.25 * int(first.bincount().min())
    assert min(found) > 0


# The teacher


def test_the_teacher_follows_the_student_as_a_moving_average():
    """Weights and statistics against a loop; nothing but the student moves them, and labels are those of evaluation."""
    images, first = shades(48)
    settings = ["heads=[4]", "optim.batch_size=16", "optim.initial_epochs=0", "optim.lr=0.05"]
    settings += ["selflabel.decay=0.7", "selflabel.smallest=0"]
    config = load_config("digits", ["constraint.kind=none", "optim.warmup_epochs=0", "centers.lr=0", *settings])
    model = build(config, len(images), images.shape, CPU)
    step = TeachStep(config, images, model.augmentation, model.encoder, model.clustering, CPU)
    model.clustering.begin(first, torch.ones(len(first)))
    expected = [value.clone() for value in model.encoder.state_dict().values()]
    step.start_epoch(0)
    for student, teacher in zip(step.encoder.state_dict().values(), model.encoder.state_dict().values(), strict=True):
        assert torch.equal(student, teacher)
        assert student.data_ptr() != teacher.data_ptr()
    for size in step.sizes:
        step.feed.next()
        index_B = step.order[int(step.images_done) :][:size]
        labels_B = (embed(model.encoder, model.augmentation, images) @ model.clustering.head().T).argmax(-1)[index_B]
        step.run(size)
        assert torch.equal(model.clustering.labels[index_B, 0], labels_B)
        students = list(step.encoder.state_dict().values())
        expected = [0.7 * mean + 0.3 * now for mean, now in zip(expected, students, strict=True)]
    for value, mean, student in zip(model.encoder.state_dict().values(), expected, students, strict=True):
        torch.testing.assert_close(value, mean)
        assert not torch.equal(value, student)
    assert not any(weight.requires_grad for weight in model.encoder.parameters())
    assert not model.encoder.training
    assert step.encoder.training

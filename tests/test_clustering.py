"""The order of one training step, against a reference in plain Python numbers, written from the paper and its code."""

import math

import pytest
import torch
from torch import Tensor

from secu.cluster.clustering import Clustering
from secu.cluster.constraints import NO_LABEL
from secu.config import Config

HEADS = (3, 5)
DIM = 6
IMAGES = 22
BATCH = 5  # four batches of five and one of two
LR = 0.7
MOMENTUM = 0.9
DECAY = 1e-2


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def normalize(a: list[float]) -> list[float]:
    norm = math.sqrt(dot(a, a))
    return [x / norm for x in a]


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    exponentials = [math.exp(value - top) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


class Reference:
    """One training step, head by head and number by number."""

    def __init__(self, config: Config, free_HKD: Tensor) -> None:
        self.config = config
        self.free = [[free_HKD[h, k].tolist() for k in range(clusters)] for h, clusters in enumerate(config.heads)]
        self.velocity = [[[0.0] * DIM for _ in head] for head in self.free]
        self.memory = [[None] * IMAGES for _ in config.heads]
        self.rho = [[0.0] * clusters for clusters in config.heads]

    def start_epoch(self) -> None:
        self.epoch_centers = [[normalize(w) for w in head] for head in self.free]
        self.sums = [[[0.0] * DIM for _ in head] for head in self.free]

    def step(self, x_SBD: list[list[list[float]]], index: list[int]) -> tuple[float, float, list[list[list[float]]]]:
        """Return the representation loss, the center loss, and the gradient of the first for every embedding."""
        self.slope = [[[0.0] * DIM for _ in view] for view in x_SBD]
        self.terms = len(x_SBD) * len(index) * len(self.config.heads)
        parts = [self.one_head(h, x_SBD, index) for h in range(len(self.config.heads))]
        return sum(a for a, _ in parts) / self.terms, sum(b for _, b in parts) / self.terms, self.slope

    def one_head(self, h: int, x_SBD: list[list[list[float]]], index: list[int]) -> tuple[float, float]:
        loss = self.config.loss
        views = len(x_SBD)
        centers = [normalize(w) for w in self.free[h]]
        clusters = range(len(centers))
        # 2. Scores: the mean over the embeddings of an image, for the current centers.
        cosines = [[[dot(x, w) for w in centers] for x in view] for view in x_SBD]
        p = [[softmax([c / loss.center_temperature for c in row]) for row in view] for view in cosines]
        if self.config.constraint.score == "cosine":
            terms = cosines
        else:
            terms = [[[math.log(value) for value in row] for row in view] for view in p]
        scores = [[sum(view[b][j] for view in terms) / views for j in clusters] for b in range(len(index))]
        # 3. New labels, and only then an update of constraint and memory.
        previous = [self.memory[h][i] for i in index]
        labels = [self.assign(h, row, i) for row, i in zip(scores, index, strict=True)]
        self.learn(h, labels)
        for i, y in zip(index, labels, strict=True):
            self.memory[h][i] = y
        # 4. Center loss with the new labels.
        center_loss = -sum(math.log(view[b][y]) for view in p for b, y in enumerate(labels))
        self.move_centers(h, x_SBD, p, labels)
        # 5. Representation loss with the previous labels and the centers from the start of the epoch.
        representation = 0.0
        old = self.epoch_centers[h]
        q = [[softmax([dot(x, w) / loss.temperature for w in old]) for x in view] for view in x_SBD]
        for s in range(views):
            teacher = q[1 - s % 2]  # the projection of the other view
            for b in range(len(index)):
                hard = labels[b] if previous[b] is None else previous[b]
                tau = loss.hard_label_weight
                soft = [tau * (j == hard) + (1 - tau) * teacher[b][j] for j in clusters]
                representation -= sum(soft[j] * math.log(q[s][b][j]) for j in clusters)
                for d in range(DIM):
                    pull = sum((q[s][b][j] - soft[j]) * old[j][d] for j in clusters)
                    self.slope[s][b][d] += pull / loss.temperature / self.terms
        return representation, center_loss

    def assign(self, h: int, scores: list[float], image: int) -> int:
        kind = self.config.constraint.kind
        if kind == "none":
            bonus = [0.0] * len(scores)
        elif kind == "size":
            bonus = self.rho[h]
        else:
            bonus = [self.entropy_after(h, image, j) for j in range(len(scores))]
        total = [score + extra for score, extra in zip(scores, bonus, strict=True)]
        return total.index(max(total))

    def entropy_after(self, h: int, image: int, label: int) -> float:
        """Return α·H with this image's label replaced, while the rest of its batch still has its previous labels."""
        moved = list(self.memory[h])
        moved[image] = label
        shares = [moved.count(j) / IMAGES for j in range(self.config.heads[h]) if j in moved]
        return 6 * IMAGES / 50 * -sum(share * math.log(share) for share in shares)

    def learn(self, h: int, labels: list[int]) -> None:
        constraint = self.config.constraint
        for j in range(len(self.rho[h])):
            share = labels.count(j) / len(labels)
            moved = self.rho[h][j] + constraint.dual_lr * (constraint.lower / self.config.heads[h] - share)
            self.rho[h][j] = max(0.0, moved)

    def move_centers(self, h: int, x_SBD: list, p: list, labels: list[int]) -> None:
        kind = self.config.centers.kind
        temperature = self.config.loss.center_temperature
        gradients = [[0.0] * DIM for _ in self.free[h]]
        for s, view in enumerate(x_SBD):
            for b, x in enumerate(view):
                for j in range(len(gradients)):
                    wanted = 1.0 if labels[b] == j else 0.0
                    if wanted == 0 and self.config.loss.name == "secu":
                        continue
                    for d in range(DIM):
                        gradients[j][d] += (p[s][b][j] - wanted) * x[d] / temperature / self.terms
                weight = 1.0 if kind == "kmeans" else 1 - p[s][b][labels[b]]
                self.sums[h][labels[b]] = [a + weight * c for a, c in zip(self.sums[h][labels[b]], x, strict=True)]
        for j, w in enumerate(self.free[h]):
            if kind == "sgd":
                self.free[h][j] = self.sgd(w, gradients[j], self.velocity[h][j])
            elif any(self.sums[h][j]):
                self.free[h][j] = normalize(self.sums[h][j])

    @staticmethod
    def sgd(w: list[float], gradient: list[float], velocity: list[float]) -> list[float]:
        """Return the free vector after one step; the normalization passes only the gradient tangent to the sphere."""
        norm = math.sqrt(dot(w, w))
        unit = normalize(w)
        radial = dot(gradient, unit)
        for d in range(DIM):
            velocity[d] = MOMENTUM * velocity[d] + (gradient[d] - radial * unit[d]) / norm + DECAY * w[d]
        return [value - LR * v for value, v in zip(w, velocity, strict=True)]


def make(dim: int = DIM, images: int = IMAGES, **parts: dict) -> tuple[Config, Clustering]:
    config = Config.model_validate({"heads": HEADS, **parts})
    torch.manual_seed(3)
    return config, Clustering(config, images, dim)


def draw_embeddings(count: int, index: Tensor, epoch: int) -> Tensor:
    """Return unit vectors around one point per image, which differ from epoch to epoch and from view to view."""
    points = torch.randn(IMAGES, DIM, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(4, IMAGES, DIM, generator=torch.Generator().manual_seed(epoch + 1))
    x = points[index] + 0.5 * noise[:count, index]
    return x / x.norm(dim=-1, keepdim=True)


CASES = [
    pytest.param(centers, constraint, 2, "secu", "cosine", id=f"{centers}-{constraint}")
    for centers in ("sgd", "closed_form", "kmeans")
    for constraint in ("none", "size", "entropy")
] + [
    pytest.param("sgd", "size", 4, "secu", "cosine", id="sgd-size-prediction"),
    pytest.param("closed_form", "entropy", 4, "secu", "cosine", id="closed_form-entropy-prediction"),
    pytest.param("sgd", "size", 2, "ce", "cosine", id="sgd-size-ce"),
    pytest.param("sgd", "size", 2, "secu", "log_prob", id="sgd-size-log_prob"),
    pytest.param("sgd", "entropy", 4, "secu", "log_prob", id="sgd-entropy-prediction-log_prob"),
]


@pytest.mark.parametrize(("centers", "constraint", "outputs", "loss", "score"), CASES)
def test_steps_follow_the_order_of_the_paper(float64, centers, constraint, outputs, loss, score):
    """Four epochs of five batches: labels, losses, gradients, centers and duals, after every single step."""
    config, clustering = make(
        constraint={"kind": constraint, "score": score},
        centers={"kind": centers},
        loss={"name": loss, "temperature": 0.1, "center_temperature": 0.4},
    )
    reference = Reference(config, clustering.centers.weight.detach())
    weights = list(clustering.parameters())
    optimizer = torch.optim.SGD(weights, LR, MOMENTUM, weight_decay=DECAY) if weights else None
    changed = 0
    for epoch in range(4):
        clustering.start_epoch()
        reference.start_epoch()
        for index in torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch)).split(BATCH):
            x = draw_embeddings(outputs, index, epoch).requires_grad_()
            before = clustering.labels[index]
            losses = clustering.step(x, index)
            expected_x, expected_w, slope = reference.step(x.tolist(), index.tolist())
            assert clustering.labels.T.tolist() == [[-1 if y is None else y for y in m] for m in reference.memory]
            assert losses["loss"].item() == pytest.approx(expected_x, abs=1e-10)
            assert losses["center_loss"].item() == pytest.approx(expected_w, abs=1e-10)
            if optimizer is not None:
                optimizer.zero_grad()
            (losses["loss"] + losses["center_loss"]).backward()
            torch.testing.assert_close(x.grad, torch.tensor(slope), rtol=1e-8, atol=1e-10)
            if optimizer is not None:
                optimizer.step()
            for h, clusters in enumerate(HEADS):
                mine = clustering.centers.weight[h, :clusters].detach()
                torch.testing.assert_close(mine, torch.tensor(reference.free[h]), rtol=1e-8, atol=1e-10)
                if constraint == "size":
                    duals = clustering.constraint.lower_dual[h, :clusters].tolist()
                    assert duals == pytest.approx(reference.rho[h], abs=1e-12)
            changed += int(((before != NO_LABEL) & (before != clustering.labels[index])).sum())
    assert changed > 0  # otherwise, previous and new labels would never differ


def test_float32_gives_the_labels_of_float64():
    """A thousand images with settings like ImageNet's: only near-ties may be decided differently."""
    agree = []
    for kind in ("size", "entropy"):
        config, single = make(64, 1000, constraint={"kind": kind}, heads=(100, 50))
        double = Clustering(config, 1000, 64).double()
        double.load_state_dict({name: value.clone() for name, value in single.state_dict().items()})
        for epoch in range(3):
            single.start_epoch()
            double.start_epoch()
            for index in torch.arange(1000).split(200):
                generator = torch.Generator().manual_seed(1000 * epoch + int(index[0]))
                x = torch.randn(2, 200, 64, generator=generator)
                x = x / x.norm(dim=-1, keepdim=True)
                single.step(x, index)
                double.step(x.double(), index)
        agree.append((single.labels == double.labels).float().mean().item())
    assert min(agree) > 0.999


def test_each_loss_has_a_gradient_for_its_own_part_alone():
    for name in ("secu", "ce"):
        _, clustering = make(loss={"name": name})
        clustering.start_epoch()
        index = torch.arange(BATCH)
        x = draw_embeddings(2, index, 0).requires_grad_()
        losses = clustering.step(x, index)
        weight = clustering.centers.weight
        assert torch.autograd.grad(losses["loss"], weight, retain_graph=True, allow_unused=True) == (None,)
        assert torch.autograd.grad(losses["center_loss"], x, retain_graph=True, allow_unused=True) == (None,)
        assert torch.autograd.grad(losses["center_loss"], weight)[0].abs().max() > 0


def test_padded_centers_are_never_labels_and_get_no_gradient():
    for name in ("secu", "ce"):
        _, clustering = make(loss={"name": name}, constraint={"kind": "none"})
        with torch.no_grad():  # padded centers that would win every image if they were not masked
            clustering.centers.weight[0, 3:] = draw_embeddings(1, torch.tensor([0]), 0)[0]
        clustering.start_epoch()
        index = torch.zeros(1, dtype=torch.int64)
        clustering.step(draw_embeddings(2, index, 0), index)["center_loss"].backward()
        assert clustering.labels[0, 0] in (0, 1, 2)
        assert (clustering.centers.weight.grad[0, 3:] == 0).all()


def test_padded_centers_that_have_decayed_to_zero_do_no_harm():
    """They have no gradient but are decayed: on CIFAR-10 they are zero in float32 after about 200 epochs."""
    for name in ("secu", "ce"):
        for decayed in (0.0, 1e-40, 1e-20):
            _, clustering = make(loss={"name": name})
            with torch.no_grad():
                clustering.centers.weight[0, 3:] = decayed
            clustering.start_epoch()
            index = torch.arange(BATCH)
            x = draw_embeddings(2, index, 0).requires_grad_()
            losses = clustering.step(x, index)
            (losses["loss"] + losses["center_loss"]).backward()
            assert clustering.labels[index, 0].max() < 3
            assert clustering.centers.weight.grad.isfinite().all()
            assert x.grad.isfinite().all()


def test_new_labels_are_used_where_there_is_no_previous_one():
    """With τ = 1 the representation loss is the cross-entropy of that label."""
    for remembered in (NO_LABEL, 2):
        _, clustering = make(loss={"hard_label_weight": 1.0}, constraint={"kind": "none"})
        clustering.labels.fill_(remembered)
        clustering.start_epoch()
        index = torch.arange(4)
        x = draw_embeddings(2, index, 0)
        loss = clustering.step(x, index)["loss"]
        total = 0.0
        for h, clusters in enumerate(HEADS):
            log_p = torch.log_softmax(x @ clustering.epoch_centers[h, :clusters].T / 0.05, -1)
            hard = clustering.labels[index, h] if remembered == NO_LABEL else torch.full((4,), remembered)
            total -= sum(log_p[s, b, hard[b]].item() for s in range(2) for b in range(4))
        assert loss.item() == pytest.approx(total / (2 * 4 * 2), rel=1e-5)
        assert (clustering.labels[index] != remembered).any()


def test_only_labels_of_the_batch_change():
    _, clustering = make()
    clustering.start_epoch()
    index = torch.tensor([7, 2, 11])
    clustering.step(draw_embeddings(2, index, 0), index)
    others = [i for i in range(IMAGES) if i not in (7, 2, 11)]
    assert (clustering.labels[index] != NO_LABEL).all()
    assert (clustering.labels[others] == NO_LABEL).all()


def test_head_and_sizes_describe_one_head_without_padding():
    _, clustering = make()
    assert clustering.head().shape == (3, DIM)
    assert clustering.head(1).shape == (5, DIM)
    assert not clustering.head().requires_grad
    torch.testing.assert_close(clustering.head(1), torch.nn.functional.normalize(clustering.centers.weight[1], dim=-1))
    assert clustering.sizes().tolist() == [0, 0, 0]
    clustering.labels[:6] = torch.tensor([[0, 4], [0, 1], [2, 1], [0, 1], [2, 0], [0, 0]])
    assert clustering.sizes().tolist() == [4, 0, 2]
    assert clustering.sizes(1).tolist() == [2, 3, 0, 0, 1]


def test_head_and_sizes_are_by_default_those_of_the_answer():
    _, clustering = make(head=1)
    clustering.labels.copy_(torch.stack([torch.arange(IMAGES) % k for k in HEADS], 1))
    assert torch.equal(clustering.head(), clustering.head(1))
    assert torch.equal(clustering.sizes(), clustering.sizes(1))
    assert clustering.head(0).shape == (3, DIM)
    assert len(clustering.sizes(0)) == 3


def test_a_checkpoint_holds_what_a_step_needs():
    """A clustering with the state of another takes the same step, for every kind of centers and constraint."""
    for centers in ("sgd", "closed_form", "kmeans"):
        for constraint in ("size", "entropy"):
            parts = {"centers": {"kind": centers}, "constraint": {"kind": constraint}}
            config, one = make(**parts)
            one.start_epoch()
            for index in torch.arange(IMAGES).split(BATCH):
                one.step(draw_embeddings(2, index, 0), index)
            other = Clustering(config, IMAGES, DIM)
            other.load_state_dict(one.state_dict())
            for clustering in (one, other):
                clustering.start_epoch()  # a checkpoint is taken between epochs
            index = torch.arange(8)
            x = draw_embeddings(2, index, 1)
            assert one.step(x, index) == other.step(x, index)
            assert torch.equal(one.labels, other.labels)
            assert torch.equal(one.centers.unit(), other.centers.unit())


# Records


def test_the_record_describes_the_head_that_answers():
    labels = torch.tensor([[0] * 8, [0, 0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 3, 0, 1, 2]]).T
    expected = [
        {"largest": 8, "smallest": 0, "changed": 1.0, "crowded": 5 / 8},
        {"largest": 3, "smallest": 2, "changed": 1.0, "crowded": 5 / 8},
        {"largest": 5, "smallest": 1, "changed": 1.0},  # no other head is as fine
    ]
    for head, record in enumerate(expected):
        _, clustering = make(images=8, heads=(2, 3, 4), head=head)
        clustering.labels.copy_(labels)
        assert list(clustering.record().items()) == list(record.items())
        assert all(isinstance(clustering.record()[name], int) for name in ("largest", "smallest"))


def test_heads_of_the_same_size_as_the_answer_count_as_finer():
    _, clustering = make(images=4, heads=(2, 2))
    clustering.labels.copy_(torch.tensor([[0, 1], [0, 1], [1, 1], [1, 0]]))
    assert clustering.record()["crowded"] == 3 / 4
    _, alone = make(images=4, heads=(2,))
    assert "crowded" not in alone.record()


@pytest.mark.parametrize("head", [0, 1])
def test_changed_labels_are_those_of_one_epoch(head):
    """From epoch to epoch and after a checkpoint, against a copy of the labels."""
    config, clustering = make(head=head)
    shares = []
    for epoch in range(4):
        if epoch == 2:
            state = clustering.state_dict()
            clustering = Clustering(config, IMAGES, DIM)
            clustering.load_state_dict(state)
        before = clustering.labels[:, head].tolist()
        clustering.start_epoch(epoch / 4)
        for index in torch.arange(IMAGES).split(BATCH):
            clustering.step(draw_embeddings(2, index, epoch), index)
        after = clustering.labels[:, head].tolist()
        shares.append(sum(a != b for a, b in zip(before, after, strict=True)) / IMAGES)
        assert clustering.record()["changed"] == pytest.approx(shares[-1])
    assert shares[0] == 1
    assert all(0 < share < 1 for share in shares[1:])


def test_checkpoints_hold_the_same_tensors_as_ever():
    """Runs of earlier versions can be resumed, and their models loaded."""
    names = ["labels", "epoch_centers", "centers.weight"]
    duals = ["constraint.lower_dual", "constraint.upper_dual"]
    assert list(make()[1].state_dict()) == names + duals
    _, closed_form = make(centers={"kind": "closed_form"}, constraint={"kind": "entropy"})
    assert list(closed_form.state_dict()) == [*names, "centers.sums", "constraint.counts"]


@pytest.mark.parametrize(
    "constraint", [{"kind": "none"}, {"kind": "size"}, {"kind": "entropy"}, {"kind": "entropy", "alpha_over": "seen"}]
)
def test_a_step_compiles_without_a_graph_break(constraint):
    """Compiled and eager steps give the same losses, labels and state."""
    index = torch.arange(BATCH)
    x = draw_embeddings(2, index, 0)
    _, eager = make(constraint=constraint)
    _, compiled = make(constraint=constraint)
    for clustering in (eager, compiled):
        clustering.start_epoch()
    expected = eager.step(x, index)
    losses = torch.compile(compiled.step, backend="aot_eager", fullgraph=True, dynamic=False)(x, index)
    assert list(losses) == ["loss", "center_loss"]
    for name, value in losses.items():
        torch.testing.assert_close(value, expected[name])
    for name, value in compiled.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name])

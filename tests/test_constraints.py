"""Constraints against loops: dual ascent as in appendix B, and entropy by enumerating every move."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secu.cluster.constraints import NO_LABEL, Constraint, EntropyConstraint, SizeConstraint, build_constraint
from secu.config import ConstraintConfig
from secu.registry import CONSTRAINTS

HEADS = (3, 5)
CLUSTERS = torch.tensor(HEADS)
OUT = -1e4  # the score of a padded cluster


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_scores(images: int, heads: tuple[int, ...] = HEADS, seed: int = 0, scale: float = 1.0) -> Tensor:
    scores = scale * torch.randn(images, len(heads), max(heads), generator=seeded(seed))
    for h, clusters in enumerate(heads):
        scores[:, h, clusters:] = OUT
    return scores


def draw_labels(images: int, heads: tuple[int, ...] = HEADS, seed: int = 0) -> Tensor:
    return torch.stack([torch.randint(0, k, (images,), generator=seeded(seed + h)) for h, k in enumerate(heads)], 1)


def no_labels(images: int, heads: int = len(HEADS)) -> Tensor:
    return torch.full((images, heads), NO_LABEL)


def best(scores: list[float]) -> int:
    return max(range(len(scores)), key=lambda j: scores[j])


# None


def test_without_constraint_every_image_takes_its_best_cluster():
    scores = draw_scores(20)
    constraint = Constraint(CLUSTERS)
    labels = constraint.assign(scores, no_labels(20))
    constraint.update(labels, no_labels(20))
    expected = [[best(scores[b, h].tolist()) for h in range(2)] for b in range(20)]
    assert labels.tolist() == expected
    assert constraint.assign(scores, labels).tolist() == expected


# Size


class SizeOracle:
    """Appendix B, one number at a time."""

    def __init__(self, heads: tuple[int, ...], lower: float, upper: float | None, dual_lr: float) -> None:
        self.heads = heads
        self.lower = lower
        self.upper = upper
        self.dual_lr = dual_lr
        self.rho = [[0.0] * k for k in heads]
        self.rho_upper = [[0.0] * k for k in heads]

    def batch(self, scores: list[list[list[float]]]) -> list[list[int]]:
        labels = []
        for image in scores:
            row = []
            for h, clusters in enumerate(self.heads):
                row.append(best([image[h][j] + self.rho[h][j] - self.rho_upper[h][j] for j in range(clusters)]))
            labels.append(row)
        for h, clusters in enumerate(self.heads):
            for j in range(clusters):
                share = sum(1 for row in labels if row[h] == j) / len(labels)
                self.rho[h][j] += self.dual_lr * (self.lower / clusters - share)
                if self.lower < 1:
                    self.rho[h][j] = max(0.0, self.rho[h][j])
                if self.upper is not None:
                    moved = self.rho_upper[h][j] + self.dual_lr * (share - self.upper / clusters)
                    self.rho_upper[h][j] = max(0.0, moved)
        return labels


@pytest.mark.parametrize("lower", [0.0, 0.4, 0.9, 1.0])
@pytest.mark.parametrize("upper", [None, 1.0, 1.3])
@pytest.mark.parametrize("dual_lr", [0.1, 20.0])
def test_size_constraint_equals_dual_ascent_in_a_loop(float64, lower, upper, dual_lr):
    constraint = SizeConstraint(CLUSTERS, lower, upper, dual_lr)
    oracle = SizeOracle(HEADS, lower, upper, dual_lr)
    for number in range(30):
        scores = draw_scores(7 if number % 5 == 4 else 16, seed=number)  # the last batch of an epoch is smaller
        labels = constraint.assign(scores, no_labels(len(scores)))
        constraint.update(labels, no_labels(len(scores)))
        assert labels.tolist() == oracle.batch(scores.tolist())
        for h, clusters in enumerate(HEADS):
            assert constraint.lower_dual[h, :clusters].tolist() == pytest.approx(oracle.rho[h], abs=1e-12)
            assert constraint.upper_dual[h, :clusters].tolist() == pytest.approx(oracle.rho_upper[h], abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "rates"), [("constant", [0.4, 0.4, 0.4, 0.4]), ("falling", [0.4, 0.3414, 0.2, 0.0586])]
)
def test_the_dual_step_size_may_decay_to_zero(schedule, rates):
    constraint = SizeConstraint(torch.tensor([2]), 0.9, None, 0.4, schedule)
    for epoch, rate in enumerate(rates):
        constraint.start_epoch(epoch / len(rates))
        before = constraint.lower_dual.clone()
        constraint.update(torch.zeros(8, 1, dtype=torch.int64), no_labels(8, 1))
        assert (constraint.lower_dual - before)[0].tolist() == pytest.approx([0, 0.45 * rate], abs=1e-4)


def test_duals_become_negative_only_for_balanced_clusters():
    """γ = 1 is an equality, whose multiplier may have either sign."""
    for lower, sign in ((0.9, 0), (1.0, -1)):
        constraint = SizeConstraint(torch.tensor([2]), lower, None, 0.1)
        constraint.update(torch.zeros(8, 1, dtype=torch.int64), no_labels(8, 1))
        assert torch.sign(constraint.lower_dual[0]).tolist() == [sign, 1]


def test_assigning_changes_no_state():
    for constraint in (SizeConstraint(CLUSTERS, 0.9, 1.1, 0.1), EntropyConstraint(CLUSTERS, 50, 6.0)):
        constraint.update(draw_labels(16), no_labels(16))
        before = {name: value.clone() for name, value in constraint.state_dict().items()}
        scores = draw_scores(16)
        constraint.assign(scores, draw_labels(16))
        assert len(before) > 0
        assert all(torch.equal(value, before[name]) for name, value in constraint.state_dict().items())
        assert torch.equal(scores, draw_scores(16))  # the input is unchanged, too


def run_passes(constraint: Constraint, scores: Tensor, passes: int, batch: int) -> list[int]:
    """Return the cluster sizes after several passes over the same scores in random order."""
    images = len(scores)
    memory = no_labels(images, 1)
    for number in range(passes):
        for index in torch.randperm(images, generator=seeded(number)).split(batch):
            previous = memory[index]
            memory[index] = constraint.assign(scores[index], previous)
            constraint.update(memory[index], previous)
    return torch.bincount(memory[:, 0], minlength=scores.shape[-1]).tolist()


def skewed_scores(images: int, clusters: int) -> Tensor:
    """Cosine-like scores that put nearly all images into the first two clusters."""
    return 0.1 * torch.randn(images, 1, clusters, generator=seeded(5)) + torch.linspace(0.6, 0, clusters)


def test_duals_drive_sizes_into_their_bounds():
    images = 1000
    clusters = 5
    scores = skewed_scores(images, clusters)
    greedy = run_passes(Constraint(torch.tensor([clusters])), scores, 1, 50)
    assert min(greedy) < 0.05 * images / clusters
    sizes = run_passes(SizeConstraint(torch.tensor([clusters]), 0.8, None, 0.1), scores, 40, 50)
    assert min(sizes) > 0.95 * 0.8 * images / clusters
    assert max(sizes) > 1.2 * images / clusters  # a lower bound does not balance them
    sizes = run_passes(SizeConstraint(torch.tensor([clusters]), 0.0, 1.5, 0.1), scores, 40, 50)
    assert max(sizes) < 1.05 * 1.5 * images / clusters
    assert min(sizes) < 0.6 * images / clusters
    sizes = run_passes(SizeConstraint(torch.tensor([clusters]), 1.0, None, 0.1), scores, 40, 50)
    assert max(sizes) - min(sizes) < 0.15 * images / clusters


def test_padded_clusters_are_never_assigned_however_long_the_run():
    constraint = SizeConstraint(torch.tensor([2, 20]), 0.9, None, 20.0)
    largest = 0
    for number in range(1200):
        labels = constraint.assign(draw_scores(40, (2, 20), seed=number, scale=0.1), no_labels(40))
        constraint.update(labels, no_labels(40))
        largest = max(largest, int(labels[:, 0].max()))
    assert largest < 2


# Entropy


def entropy(labels: list[int], images: int) -> float:
    """Return H of the paper with N the whole data set; images without a label are not counted, 0·log 0 = 0."""
    shares = [labels.count(j) / images for j in set(labels) if j != NO_LABEL]
    return -sum(share * math.log(share) for share in shares)


def enumerate_moves(memory: list[int], image: int, clusters: int, alpha: float) -> list[float]:
    """Return α·H with this image moved to each cluster in turn and all others unchanged."""
    bonus = []
    for j in range(clusters):
        moved = list(memory)
        moved[image] = j
        bonus.append(alpha * entropy(moved, len(memory)))
    return bonus


def partly_labeled(images: int, clusters: int, seed: int, known: float) -> list[int]:
    """Return skewed labels with some images not assigned yet, as in the middle of the first epoch."""
    generator = seeded(seed)
    labels = (torch.rand(images, generator=generator) ** 2 * clusters).long()
    return torch.where(torch.rand(images, generator=generator) < known, labels, NO_LABEL).tolist()


def filled(memory: list[int], clusters: int, alpha: float) -> EntropyConstraint:
    constraint = EntropyConstraint(torch.tensor([clusters]), len(memory), alpha)
    known = torch.tensor([label for label in memory if label != NO_LABEL], dtype=torch.int64)
    constraint.update(known[:, None], no_labels(len(known), 1))
    return constraint


@pytest.mark.parametrize("known", [0.0, 0.5, 1.0])
def test_change_of_entropy_is_exact_for_every_image_and_move(float64, known):
    """If two scores differ by exactly the enumerated entropy, the clusters are tied and 1e-9 decides."""
    images = 14
    clusters = 4
    alpha = 3.0
    memory = partly_labeled(images, clusters, 3, known)
    constraint = filled(memory, clusters, alpha)
    for image in range(images):
        bonus = enumerate_moves(memory, image, clusters, alpha)
        for first in range(clusters):
            for second in range(clusters):
                if first == second:
                    continue
                for edge, winner in ((1e-9, first), (-1e-9, second)):
                    scores = torch.full((1, 1, clusters), -1e3)
                    scores[0, 0, first] = bonus[second] - bonus[first] + edge
                    scores[0, 0, second] = 0
                    label = constraint.assign(scores, torch.tensor([[memory[image]]]))
                    assert int(label) == winner


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6).flatmap(
        lambda k: st.tuples(st.just(k), st.lists(st.integers(-1, k - 1), min_size=3, max_size=20))
    ),
    st.floats(0, 50),
    st.integers(0, 2**31),
)
def test_assignment_is_the_best_of_all_enumerated_moves(case, alpha, seed):
    clusters, memory = case
    scores = torch.randn(len(memory), 1, clusters, generator=seeded(seed))
    labels = filled(memory, clusters, alpha).assign(scores, torch.tensor(memory)[:, None])
    for image in range(len(memory)):
        bonus = enumerate_moves(memory, image, clusters, alpha)
        total = [float(scores[image, 0, j]) + bonus[j] for j in range(clusters)]
        assert total[int(labels[image, 0])] == pytest.approx(max(total), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 25), st.lists(st.integers(1, 25), min_size=1, max_size=8))
def test_counts_are_those_of_the_label_memory(seed, images, batches):
    """After any sequence of batches with any new labels."""
    constraint = EntropyConstraint(CLUSTERS, images, 1.0)
    memory = no_labels(images)
    for number, size in enumerate(batches):
        index = torch.randperm(images, generator=seeded(seed + number))[:size]
        labels = draw_labels(len(index), seed=seed + number)
        constraint.update(labels, memory[index])
        memory[index] = labels
        assigned = int((memory[:, 0] != NO_LABEL).sum())
        assert constraint.counts.sum(1).tolist() == [assigned, assigned]
        for h, clusters in enumerate(HEADS):
            expected = [int((memory[:, h] == j).sum()) for j in range(clusters)]
            assert constraint.counts[h, :clusters].tolist() == expected


def test_images_of_a_batch_see_the_same_counts():
    """Two equal images in an empty data set take the same cluster; counts change after the batch."""
    constraint = EntropyConstraint(torch.tensor([2]), 4, 100.0)
    scores = torch.tensor([[[0.1, 0.0]], [[0.1, 0.0]]])
    first = constraint.assign(scores, no_labels(2, 1))
    assert first.tolist() == [[0], [0]]
    constraint.update(first, no_labels(2, 1))
    assert constraint.counts.tolist() == [[2, 0]]
    assert constraint.assign(scores, no_labels(2, 1)).tolist() == [[1], [1]]


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(5)), st.integers(0, 2**31), st.sampled_from(["none", "size", "entropy"]))
def test_renaming_clusters_renames_everything(order, seed, kind):
    order = torch.tensor(order)
    new_name = torch.argsort(order)  # new name of each cluster k
    upper = {"upper": 1.2} if kind == "size" else {}
    config = ConstraintConfig(kind=kind, **upper)
    plain, renamed = (build_constraint(config, torch.tensor([5]), 30) for _ in range(2))
    memory = no_labels(30, 1)
    memory_renamed = no_labels(30, 1)
    for number in range(6):
        scores = 0.1 * torch.randn(10, 1, 5, generator=seeded(seed + number))
        index = torch.arange(10) + 10 * (number % 3)
        labels = plain.assign(scores, memory[index])
        labels_renamed = renamed.assign(scores[..., order], memory_renamed[index])
        assert torch.equal(labels_renamed, new_name[labels])
        plain.update(labels, memory[index])
        renamed.update(labels_renamed, memory_renamed[index])
        memory[index] = labels
        memory_renamed[index] = labels_renamed
    for name, value in plain.state_dict().items():
        assert torch.allclose(renamed.state_dict()[name], value[:, order], atol=1e-6)


def test_entropy_in_float32_is_accurate_for_imagenet():
    """N = 1.28 million, K = 1000, α = 90,000: 2e-6 decides a tie made in float64, less than one image (5e-5)."""
    images = 1_281_167
    clusters = 1000
    alpha = 90_000.0
    sizes = torch.randint(0, 2600, (clusters,), generator=seeded(1))
    sizes[:3] = torch.tensor([0, 1, 2])
    sizes[3] += images - int(sizes.sum())
    constraint = EntropyConstraint(torch.tensor([clusters]), images, alpha)
    rest = torch.repeat_interleave(torch.arange(clusters), sizes)
    for part in rest.split(200_000):
        constraint.update(part[:, None], no_labels(len(part), 1))
    assert constraint.counts[0].tolist() == sizes.tolist()

    def h(n: int) -> float:
        return -n / images * math.log(n / images) if n > 0 else 0.0

    def bonus(j: int, old: int) -> float:
        """Return α times the change of H when an image moves from its old cluster to another."""
        n_old, n = int(sizes[old]), int(sizes[j])
        return 0.0 if j == old else alpha * (h(n + 1) - h(n) + h(n_old - 1) - h(n_old))

    for old in (1, 2, 3, 500):
        for j in (0, 4, 77, 999):
            for edge, winner in ((2e-6, j), (-2e-6, old)):
                scores = torch.full((1, 1, clusters), -100.0)
                scores[0, 0, old] = 0.0
                scores[0, 0, j] = -bonus(j, old) + edge
                assert int(constraint.assign(scores, torch.tensor([[old]]))) == winner, (old, j)


def label_by_enumeration(
    memory: list[int], batch: list[int], scores: list[list[float]], alpha: float, whole: bool
) -> None:
    """Assign the images of a batch against the same counts, trying every move, and store their labels.

    In the first epoch the weight of a change of N·H is α/(images seen so far + 1), in others α/N.
    """
    clusters = len(scores[0])
    counts = [memory.count(j) for j in range(clusters)]
    divisor = len(memory) if whole else sum(counts) + 1
    labels = []
    for image in batch:
        others = list(counts)
        if memory[image] != NO_LABEL:
            others[memory[image]] -= 1
        totals = []
        for j in range(clusters):
            moved = [n + (k == j) for k, n in enumerate(others)]
            change = -sum(n * math.log(n / len(memory)) for n in moved if n)
            totals.append(scores[image][j] + alpha / divisor * change)
        labels.append(best(totals))
    for image, label in zip(batch, labels, strict=True):
        memory[image] = label


@pytest.mark.parametrize("size", [1, 4, 7])
def test_in_the_first_epoch_alpha_may_be_divided_by_the_images_seen_so_far(float64, size):
    """Two heads, three epochs; between two batches the state goes through a checkpoint."""
    images = 30
    alpha = 6.0
    scores = draw_scores(images)
    memories = [[NO_LABEL] * images for _ in HEADS]
    labels = no_labels(images)
    constraint = EntropyConstraint(CLUSTERS, images, alpha, "seen")
    for epoch in range(3):
        order = torch.randperm(images, generator=seeded(epoch))
        constraint.start_epoch(0.0)
        for batch in order.split(size):
            new = constraint.assign(scores[batch], labels[batch])
            constraint.update(new, labels[batch])
            labels[batch] = new
            for head, clusters in enumerate(HEADS):
                mine = scores[:, head, :clusters].tolist()
                label_by_enumeration(memories[head], batch.tolist(), mine, alpha, whole=epoch > 0)
            assert labels.T.tolist() == memories
            resumed = EntropyConstraint(CLUSTERS, images, alpha, "seen")
            resumed.load_state_dict(constraint.state_dict())
            resumed.start_epoch(0.0)
            constraint = resumed


def test_labels_spread_from_the_start_when_alpha_is_divided_by_the_images_seen():
    """With α/N the first images go where their scores are best, and some clusters hardly get any in the first epoch."""
    images = 3000
    clusters = 30
    scores = 0.2 * torch.randn(clusters, generator=seeded()) + 0.05 * torch.randn(
        images, 1, clusters, generator=seeded(1)
    )
    sizes = {
        over: run_passes(EntropyConstraint(torch.tensor([clusters]), images, 6 * images / 50, over), scores, 1, 50)
        for over in ("all", "seen")
    }
    assert min(sizes["seen"]) > 3 * min(sizes["all"])
    assert max(sizes["seen"]) < 0.9 * max(sizes["all"])


def test_both_ways_to_divide_alpha_are_the_same_once_all_images_are_labeled():
    memory = partly_labeled(40, 4, 5, 1.0)
    first = filled(memory, 4, 9.0)
    second = EntropyConstraint(torch.tensor([4]), 40, 9.0, "seen")
    second.load_state_dict(first.state_dict())
    second.start_epoch(0.0)
    assert torch.equal(first.gain, second.gain)


# Choosing a constraint


def test_build_constraint_reads_its_config():
    assert type(build_constraint(ConstraintConfig(kind="none"), CLUSTERS, 100)) is Constraint
    size = build_constraint(ConstraintConfig(kind="size", lower=0.4, upper=1.5, dual_lr=20), CLUSTERS, 100)
    assert isinstance(size, SizeConstraint)
    assert (size.lower, size.upper, size.dual_lr, size.schedule) == (0.4, 1.5, 20, "constant")
    falling = build_constraint(ConstraintConfig(dual_schedule="falling"), CLUSTERS, 100)
    assert isinstance(falling, SizeConstraint)
    assert falling.schedule == "falling"
    entropy_default = build_constraint(ConstraintConfig(kind="entropy"), CLUSTERS, 50_000)
    assert isinstance(entropy_default, EntropyConstraint)
    assert (entropy_default.images, entropy_default.alpha) == (50_000, 6000)  # α = 6N/50
    assert entropy_default.over == "all"
    assert build_constraint(ConstraintConfig(kind="entropy", alpha=0), CLUSTERS, 50).alpha == 0
    assert build_constraint(ConstraintConfig(kind="entropy", alpha_over="seen"), CLUSTERS, 50).over == "seen"


def test_a_constraint_from_outside_is_chosen_by_name(monkeypatch):
    """A subclass that only assigns needs no ``build`` of its own."""
    monkeypatch.setattr(CONSTRAINTS, "_parts", dict(CONSTRAINTS._parts))

    @CONSTRAINTS.register("last")
    class Last(Constraint):
        def assign(self, scores_BHK: Tensor, previous_BH: Tensor) -> Tensor:
            return (self.clusters - 1).expand_as(previous_BH)

    constraint = build_constraint(ConstraintConfig(kind="last", lower=0.5), CLUSTERS, 100)
    assert type(constraint) is Last
    assert constraint.assign(draw_scores(2), no_labels(2)).tolist() == [[2, 4], [2, 4]]
    with pytest.raises(ValueError, match="unknown 'lst'; did you mean last"):
        ConstraintConfig(kind="lst")

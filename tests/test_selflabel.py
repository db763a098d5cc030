"""Self-labeling as a method: what it starts from, learns, records, keeps and concludes."""

import copy
import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import secu.train.clock
from second_runs import COUNT, SHORT, STEPS, few_digits, make_first, predictions_of
from secu.apps.selflabel import second_config
from secu.base.errors import UserError
from secu.cluster.metrics import calibration_error, matched
from secu.data import Images
from secu.methods import Conclusion, build_method, selflabel
from secu.methods.confident import most_confident
from secu.methods.outcome import State, consistency, doubts
from secu.methods.predictor import choose
from secu.methods.selflabel import SelfLabeling, estimate
from secu.results.results import find_results
from secu.settings import load_config, merge
from secu.train.checkpoint import load_method, load_predictor
from secu.train.engine import Engine
from secu.train.run import Run
from secu.train.session import Session
from secu.train.step import Step
from small_runs import CPU, Interrupting, assert_same, open_session, trained

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Run:
    """Make the run to start from."""
    return make_first(tmp_path_factory.mktemp("first") / "run")


def config_of(first: Run, settings: dict | None = None):
    return second_config(first.config(), first.path, COUNT, merge(SHORT, settings or {}))


def self_labeled(first: Run, path: Path, settings: dict | None = None, **options) -> Session:
    """Train the second stage."""
    images = options.pop("images", few_digits())
    return trained(path, config_of(first, settings), images, test=images, **options)


@pytest.fixture(scope="module")
def concluded(tmp_path_factory, first) -> tuple[Session, Conclusion]:
    """Train and conclude."""
    session = self_labeled(first, tmp_path_factory.mktemp("second") / "run")
    return session, session.conclude(few_digits())


@pytest.fixture
def second(concluded) -> Session:
    return concluded[0]


@pytest.fixture
def outcome(concluded) -> dict:
    return concluded[1].summary


# What it starts from and learns


def test_encoder_learns_and_the_centers_do_not(second, first):
    before = first.load_model()
    after = second.run.load_model()
    centers = "clustering.centers.weight"
    assert torch.equal(after[centers][0], before[centers][0, :4])
    assert not torch.equal(after["encoder.projection.0.weight"], before["encoder.projection.0.weight"])


def test_images_start_with_the_labels_of_the_first_run(second, first):
    found = predictions_of(first, few_digits())
    assert torch.equal(second.method.clustering.first_labels, found.cluster)


def test_most_confident_half_of_every_cluster_keeps_its_label(second, first):
    """At the temperature of the first run."""
    assert second.config.loss.temperature == first.config().loss.temperature
    found = predictions_of(first, few_digits())
    kept = second.method.clustering.kept
    assert torch.equal(kept, most_confident(found.cluster, found.confidence, 0.5))
    for cluster in range(4):
        inside = found.cluster == cluster
        assert int(kept[inside].sum()) == math.ceil(int(inside.sum()) / 2)


def test_teacher_averages_statistics_and_copies_counters(first):
    """An ordinary batch-norm counts its batches, in a whole number."""
    method = build_method(config_of(first, {"selflabel": {"decay": 0.75}}), COUNT, (1, 8, 8), CPU)
    for encoder, value, count in ((method.encoder, 1.0, 0), (method.student, 5.0, 7)):
        encoder.register_buffer("statistic", torch.tensor(value))
        encoder.register_buffer("batches", torch.tensor(count))
    method.after_step()
    assert method.encoder.statistic == 2.0
    assert method.encoder.batches == 7


def test_without_a_first_run_there_is_nothing_to_learn(tmp_path, first):
    config = config_of(first).model_copy(update={"init_from": None})
    with pytest.raises(UserError, match="selflabel: there are no labels to start from; run secu selflabel"):
        open_session(tmp_path / "run", config, few_digits())


def test_run_whose_views_are_smaller_than_its_images_can_be_self_labeled(tmp_path):
    first = make_first(tmp_path / "first", "augment.size=6", "augment.plain=whole")
    session = self_labeled(first, tmp_path / "second", {"optim": {"epochs": 1}})
    assert session.method.views.view_size == (8, 8)
    assert session.method.lesson.views.view_size == (6, 6)
    assert 0 <= session.conclude(None).summary["before"]["information"] <= 1


def test_self_labeled_run_can_be_self_labeled_again(tmp_path, second, outcome):
    """Compared by the same views: not the strong ones that the second run trained with."""
    third = self_labeled(second.run, tmp_path / "third", {"optim": {"epochs": 1}})
    again = third.conclude(few_digits()).summary["before"]
    assert again == outcome["after"]
    assert third.config.loss.temperature == second.config.loss.temperature


# What is recorded


def test_epochs_are_described_without_true_labels(second):
    records = second.run.metrics()
    labeling = second.method.clustering
    assert [record["taught"] == 1 for record in records] == [True, False, False]  # one epoch of fixed labels
    for record in records:
        assert 0 < record["taught"] <= 1
        assert 0 <= record["information"] <= 1
        assert 0 < record["agreement"] <= 1
        assert 0 < record["confident"] <= 1
        assert "center_loss" not in record
    moved = (labeling.labels[:, 0] != labeling.first_labels).float().mean()
    assert records[-1]["moved"] == pytest.approx(float(moved))
    assert (records[-1]["largest"], records[-1]["smallest"]) == (max(labeling.sizes()), min(labeling.sizes()))


def test_conclusion_is_written_down(concluded):
    session, conclusion = concluded
    written = json.loads((session.run.path / "outcome.json").read_text())
    assert written == json.loads(json.dumps(conclusion.summary)) == session.run.outcome()
    temperature = session.run.config().loss.confidence_temperature
    assert conclusion.settings == {"loss": {"confidence_temperature": temperature}}
    assert session.config == session.method.config == session.run.config()
    assert conclusion.warnings == conclusion.summary["warnings"]


def test_outcome_describes_both_models(second, first, outcome):
    images = few_digits()
    before = predictions_of(first, images)
    after = predictions_of(second.run, images)
    assert outcome["moved"] == pytest.approx(float((after.cluster != before.cluster).float().mean()))
    usual = load_method(first, CPU).views
    strong = load_method(second.run, CPU).views
    for state, found, run in ((outcome["before"], before, first), (outcome["after"], after, second.run)):
        sizes = found.cluster.bincount(minlength=4).tolist()
        assert (list(state["sizes"]), state["largest"], state["smallest"]) == (sizes, max(sizes), min(sizes))
        assert state["confidence"] == pytest.approx(float(found.confidence.mean()), abs=1e-5)
        assert state["confident"] == pytest.approx(float((found.confidence > 0.6).float().mean()))
        right = matched(images.targets.numpy(), found.cluster.numpy())
        expected = calibration_error(found.confidence.numpy(), right)
        assert state["calibration_error"] == pytest.approx(expected, abs=1e-5)
        assert state["acc"] == pytest.approx(right.mean())
        model = load_predictor(run, CPU)
        seen = consistency(model, usual, images, torch.arange(COUNT))
        hard = consistency(model, strong, images, torch.arange(COUNT), numbers=(1,))
        assert state["agreement"] == pytest.approx(max(seen.agreement, hard.agreement))
        assert state["information"] == pytest.approx((seen.information + hard.information) / 2)
        assert seen.information > hard.information > 0


def test_mean_confidence_is_between_that_of_the_first_run_and_the_agreement_of_views(second, first, outcome):
    model = load_predictor(second.run, CPU)
    seen = consistency(model, load_method(first, CPU).views, few_digits(), torch.arange(COUNT))
    assert seen.agreement == pytest.approx(outcome["after"]["agreement"])
    assert 0.003 < model.temperature < 1
    assert model.temperature != second.config.loss.temperature
    before = float(predictions_of(first, few_digits()).confidence.mean())
    assert abs(before - seen.agreement) > 0.02
    confidence = choose(model.cosines(few_digits()), model.temperature).confidence
    assert before > 0.8
    expected = (before + seen.agreement) / 2
    assert float(confidence.mean()) == pytest.approx(expected, abs=5e-3)


def test_agreement_counts_for_half_or_for_less_after_an_uncertain_run():
    assert estimate(0.8, 0.9) == pytest.approx(0.85)
    assert estimate(0.9, 0.7) == pytest.approx(0.8)
    assert estimate(2 / 3, 0.9) == pytest.approx((2 / 3 + 0.9) / 2)
    assert estimate(0.5, 0.9) == pytest.approx(0.5 + 0.25 * 0.4)
    assert estimate(0.33, 0.7) == pytest.approx(0.33)


def test_images_of_unknown_classes_have_no_calibration_error(tmp_path, first):
    blind = Images(few_digits().tensor)
    session = self_labeled(first, tmp_path / "run", {"optim": {"epochs": 1}}, images=blind)
    summary = session.conclude(None).summary
    for state in (summary["before"], summary["after"]):
        assert (state["calibration_error"], state["acc"]) == (None, None)
    assert "acc" not in session.run.metrics()[-1]


def test_scores_are_those_of_the_images_to_score(second, first):
    """ACC and calibration of the test split, everything else of the training images."""
    half = Images(few_digits().tensor[:120], few_digits().targets[:120])
    summary = second.method.conclude(few_digits(), half).summary
    found = predictions_of(first, half)
    assert summary["before"]["acc"] == pytest.approx(matched(half.targets.numpy(), found.cluster.numpy()).mean())
    assert sum(summary["before"]["sizes"]) == COUNT


def test_doubts_name_what_got_worse():
    good = State(0.8, 0.9, 0.9, 0.7, (110, 60, 90), 110, 60, None)
    assert doubts(good, replace(good, information=0.71, agreement=0.83, sizes=(60, 30, 45))) == []
    assert doubts(good, replace(good, information=0.6)) == ["the label-free score fell from 0.800 to 0.600"]
    (line,) = doubts(good, replace(good, agreement=0.81))
    assert line == "random views of an image are in its cluster less often than before (81.0%, 90.0% before)"
    tiny = replace(good, sizes=(100, 4, 5))
    (line,) = doubts(tiny, replace(good, sizes=(107, 0, 2)))  # 4 images may go by chance
    assert line == "cluster 2 fell from 5 to 2 images"
    (line,) = doubts(good, replace(good, sizes=(54, 60, 90)))  # not the smallest, but less than half of its size
    assert line == "cluster 0 fell from 110 to 54 images"
    assert len(doubts(good, replace(good, information=0.1, sizes=(0, 60, 0)))) == 3
    assert asdict(good)["acc"] is None


def test_limits_separate_the_runs_that_were_seen_to_help_from_those_that_lost(kept_outcomes):
    """No kept run is doubted; the run on CIFAR-100-20, which lost nine points, is."""
    for before, after in kept_outcomes:
        assert doubts(before, after) == []
    before = replace(kept_outcomes[0][0], information=0.574, agreement=0.912)
    assert doubts(before, replace(before, information=0.624, agreement=0.791))


@pytest.fixture
def kept_outcomes():
    names = [field.name for field in fields(State)]
    found = []
    for path in sorted(RESULTS.glob("*-selflabel-*.json")):
        outcome = json.loads(path.read_text())["selflabel"]
        found.append([State(**{name: outcome[key].get(name) for name in names}) for key in ("before", "after")])
    assert len(found) >= 10
    return found


# A second model that is worse


@pytest.fixture(params=[True, False], ids=["kept best", "kept last"])
def doubted(request, tmp_path, first, monkeypatch):
    """Train and conclude a run whose model is doubted; return it, and whether it must return to the first model."""
    monkeypatch.setattr("secu.methods.selflabel.doubts", lambda before, after: ["views disagree", "clusters vanish"])
    session = self_labeled(first, tmp_path / "run", {"selflabel": {"keep_best": request.param}})
    return session, session.conclude(few_digits()), request.param


def test_a_worse_model_is_replaced_by_that_of_the_first_run(doubted, first):
    session, conclusion, restored = doubted
    images = few_digits()
    before = predictions_of(first, images)
    after = predictions_of(session.run, images)
    same = [torch.equal(getattr(before, field.name), getattr(after, field.name)) for field in fields(before)]
    assert all(same) == restored
    assert conclusion.restored == restored
    summary = conclusion.summary
    assert ("rejected" in summary) == restored
    if not restored:
        advice = "keep the previous run, or lower optim.lr"
        assert conclusion.warnings == (f"views disagree: {advice}", f"clusters vanish: {advice}")
        return
    assert summary["after"] == summary["before"]
    assert summary["moved"] == 0 < summary["rejected"]["moved"]
    assert summary["rejected"]["acc"] != summary["before"]["acc"]
    reasons = "views disagree; clusters vanish"
    assert conclusion.warnings == (f"{reasons}: self-labeling did not help, and the previous run's model is kept",)
    kept = session.run.record()["kept"]
    right = matched(images.targets.numpy(), before.cluster.numpy())
    assert kept["epoch"] is None
    assert kept["acc"] == pytest.approx(right.mean())


def test_a_replaced_model_stays_so_when_the_run_is_resumed_at_its_end(doubted, first):
    session, conclusion, restored = doubted
    settings = {"selflabel": {"keep_best": restored}}
    again = self_labeled(first, session.run.path, settings, resume=True)
    assert again.conclude(few_digits()).summary == conclusion.summary
    assert_same(again.run, session.run)


def test_epochs_of_a_model_that_was_not_kept_are_no_reason_to_warn(doubted):
    session, _, restored = doubted
    session.run.add_metrics({"epoch": 9, "changed": 0.9})
    found = find_results(session.run, load_predictor(session.run, CPU), few_digits())
    unsettled = any("90% of the images still changed cluster" in warning for warning in found.warnings)
    assert unsettled == (not restored)


# The epoch that is kept


def scripted(monkeypatch, scores: list[float]) -> list[Tensor]:
    """Let epochs have these label-free scores; return a list that gets a weight of the model after each."""
    given = iter(scores)
    weights = []
    look = SelfLabeling._look

    def seen(method, predictor, most):
        found = look(method, predictor, most)
        if most != selflabel.IMAGES_PER_EPOCH:
            return found
        weights.append(method.encoder.state_dict()["projection.0.weight"].clone())
        return found._replace(information=next(given))

    monkeypatch.setattr(SelfLabeling, "_look", seen)
    return weights


@pytest.mark.parametrize("keep_best", [False, True])
def test_run_ends_with_the_last_epoch_near_the_best_score_or_with_the_last(tmp_path, first, monkeypatch, keep_best):
    scores = [0.3, 0.8, 0.76, 0.74]
    weights = scripted(monkeypatch, scores)
    settings: dict = {"optim": {"epochs": 4, "lr": 0.3}, "evaluate_every": 1}
    settings["selflabel"] = {"warmup_epochs": 4, "keep_best": keep_best}
    session = self_labeled(first, tmp_path / "run", settings)
    run = session.run
    assert [record["information"] for record in run.metrics()] == scores
    written = run.load_model()["encoder.projection.0.weight"]
    kept = 2 if keep_best else 3
    assert [torch.equal(written, weight) for weight in weights] == [epoch == kept for epoch in range(4)]
    assert torch.equal(session.method.encoder.state_dict()["projection.0.weight"], written)
    noted = run.record()
    assert noted.get("kept", {}).get("epoch") == (2 if keep_best else None)
    assert (run.path / "best.safetensors").exists() == keep_best
    if keep_best:  # the last record is that of the last epoch; the kept one has scores of its own
        assert noted["kept"]["acc"] == pytest.approx(run.metrics()[2]["acc"])
        assert len({record["acc"] for record in run.metrics()}) > 1
        assert noted["last_epoch"]["epoch"] == 3
    sizes = session.conclude(few_digits()).summary["after"]["sizes"]
    assert list(sizes) == predictions_of(run, few_digits()).cluster.bincount(minlength=4).tolist()
    resumed = self_labeled(first, run.path, settings, resume=True)
    assert resumed.run.record().get("kept") == noted.get("kept")


def test_interruption_while_the_kept_epoch_is_scored_costs_one_epoch(tmp_path, first, monkeypatch):
    """The last epoch is far from the best: what is on disk in the end must be the best one, and no half of each."""
    scripted(monkeypatch, [1.0, 0.5, 0.4, 0.4])
    settings = {"selflabel": {"keep_best": True}}

    def interrupted(session, test):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            self_labeled(first, tmp_path / "run", settings)
    assert Run(tmp_path / "run").load_state()["epochs_done"] == 2
    session = self_labeled(first, tmp_path / "run", settings, resume=True)
    run = session.run
    assert run.metadata("best.safetensors")["epoch"] == "0"
    for name, tensor in session.method.encoder.state_dict().items():
        assert torch.equal(tensor, run.load_model("best.safetensors")[f"encoder.{name}"])
        assert torch.equal(tensor, run.load_model()[f"encoder.{name}"])


# Resumed


@pytest.mark.parametrize("decay", [0, 0.9])
def test_interrupted_run_continues_as_if_it_had_not_been(tmp_path, first, monkeypatch, decay):
    """With a student and without; each part of the state, and the best epoch."""
    monkeypatch.setattr(secu.train.clock, "CHECKPOINT_SECONDS", -1)
    settings = {"selflabel": {"keep_best": True, "decay": decay}}
    whole = self_labeled(first, tmp_path / "whole", settings).run
    with pytest.raises(KeyboardInterrupt):
        self_labeled(first, tmp_path / "parts", settings, listener=Interrupting(step=2 * STEPS + 1))
    assert Run(tmp_path / "parts").load_state()["epochs_done"] == 2
    parts = self_labeled(first, tmp_path / "parts", settings, resume=True).run
    assert_same(parts, whole)
    assert any(name.startswith("student.") for name in parts.load_state()["tensors"]) == (decay > 0)
    assert not any(name.startswith("student.") for name in parts.load_model())


def test_first_run_that_was_replaced_is_noticed(tmp_path):
    first = make_first(tmp_path / "first")
    self_labeled(first, tmp_path / "second", time_limit=1e-9)
    tensors = first.load_model()
    tensors["clustering.centers.weight"] = tensors["clustering.centers.weight"].flip(1).contiguous()
    first.save_model("model.safetensors", tensors)
    first.write_record(first.record())
    message = r"resume: the previous run changed since this one began: \d+% of its labels are different; start a new"
    with pytest.raises(UserError, match=message):
        self_labeled(first, tmp_path / "second", resume=True)


# Student and teacher


def shades(images: int) -> tuple[Images, Tensor]:
    """Three kinds of image, a bright quadrant each; the last in all shades, divided between two clusters."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 40, (images, 1, 8, 8), dtype=torch.uint8, generator=generator)
    kind = torch.arange(images) % 3
    shade = torch.rand(images, generator=generator)
    level = (90 + 120 * torch.where(kind == 2, shade, 1)).to(torch.uint8).view(-1, 1, 1, 1)
    for k in range(3):
        top, left = 4 * (k // 2), 4 * (k % 2)
        pixels[k::3, :, top : top + 4, left : left + 4] += level[k::3]
    return Images(pixels), torch.where((kind == 2) & (shade > 0.5), 3, kind)


def make_step(images: Images, first: Tensor, *overrides: str) -> Step:
    """Return the step of an untrained method that starts from given labels."""
    fixed = ["method=selflabel", "heads=[4]", "constraint.kind=none", "centers.lr=0", "optim.batch_size=16"]
    schedule = ["optim.initial_epochs=0", "optim.warmup_epochs=0"]
    config = load_config("digits", [*fixed, *schedule, *overrides])
    method = build_method(config, len(images), images.shape, CPU)
    method.clustering.begin(first, torch.ones(len(first)))
    return Step(method, images, CPU)


def test_teacher_follows_the_student_as_a_moving_average():
    """Weights and statistics against a loop; nothing but the student moves them, and labels are those of evaluation."""
    images, first = shades(48)
    step = make_step(images, first, "optim.lr=0.05", "selflabel.decay=0.7", "selflabel.smallest=0")
    method = step.method
    teacher = method.encoder
    student = method.student
    expected = [value.clone() for value in teacher.state_dict().values()]
    step.start_epoch(0)
    for mine, theirs in zip(student.state_dict().values(), teacher.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    for size in step.sizes:
        step.feed.next()
        index_B = step.order[int(step.images_done) :][:size]
        labels_B = method.predictor().predict(images).cluster[index_B]
        step.run(size)
        assert torch.equal(method.clustering.labels[index_B, 0], labels_B)
        students = list(student.state_dict().values())
        expected = [0.7 * mean + 0.3 * now for mean, now in zip(expected, students, strict=True)]
    for value, mean, now in zip(teacher.state_dict().values(), expected, students, strict=True):
        torch.testing.assert_close(value, mean)
        assert not torch.equal(value, now)
    assert not any(weight.requires_grad for weight in teacher.parameters())
    assert not teacher.training
    assert student.training


def test_without_decay_one_encoder_does_both():
    images, first = shades(48)
    step = make_step(images, first, "selflabel.decay=0")
    assert step.method.student is None
    weights = step.method.trained_parameters()[0]
    assert weights[0] is next(step.method.encoder.parameters())
    before = weights[0].detach().clone()
    Engine([step], "eager").epoch(0)
    assert not torch.equal(weights[0], before)
    assert step.method.encoder.training


@pytest.mark.parametrize("statistics", ["shared", "separate"])
def test_views_share_batch_statistics_or_have_their_own(statistics):
    """Against an encoder of one view that gets both in one pass, or the weak ones and then the strong ones."""
    images, first = shades(48)
    settings = [f"selflabel.statistics={statistics}", "selflabel.decay=0"]
    method = make_step(images, first, *settings).method
    oracle = copy.deepcopy(method.encoder)
    oracle.expect_views(1)
    views = method.views(images.tensor, torch.Generator().manual_seed(0))
    weak, strong = method.train()._embed(views)
    oracle.train()
    expected = [oracle.embed(views.flatten(0, 1))] if statistics == "shared" else [oracle.embed(v) for v in views]
    torch.testing.assert_close(torch.cat([weak, strong]), torch.cat(expected))
    for mine, other in zip(method.encoder.buffers(), oracle.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def test_separate_statistics_need_a_single_encoder():
    with pytest.raises(UserError, match=r"selflabel\.statistics: separate needs selflabel\.decay=0, got 0\.9"):
        load_config("digits", ["method=selflabel", "heads=[4]", "selflabel.statistics=separate", "selflabel.decay=0.9"])


def test_centers_learn_at_their_own_rate():
    images, first = shades(48)
    for rate in (0.0, 0.05):
        step = make_step(images, first, "selflabel.decay=0", f"centers.lr={rate}")
        before = step.method.clustering.head().clone()
        Engine([step], "eager").epoch(0)
        assert torch.equal(step.method.clustering.head(), before) == (rate == 0)


@pytest.mark.timeout(600)
def test_runs_lose_clusters_without_the_boost_and_none_with_it():
    """Where one shade ends and the other begins is for the model to decide, and it moves on until one is gone.

    How far it moves is chaotic. Of 5 seeds at learning rates of 0.01, 0.03, 0.05, 0.08, 0.1 and 0.15 each, 12 of 30
    runs lose a cluster without the boost. With it all labels stay, though in one of the 30 the model itself, which
    does not know the bonus, forgets a cluster. Hence the first seed that loses one at a rate of 0.1, and another.
    """
    images, first = shades(240)
    fixed = ["optim.epochs=24", "optim.lr=0.1", "loss.temperature=0.1", "encoder.dim=16"]
    labeling = ["warmup_epochs=5", "operations=0", "cutout=0.3", "decay=0", "uncertain=nothing", "kept=0"]

    def smallest(seed: int, boost: float) -> list[int]:
        """Return the size of the smallest cluster, by the labels of the run and by its model."""
        settings = [f"selflabel.{setting}" for setting in (*labeling, f"smallest={boost}")]
        step = make_step(images, first, f"seed={seed}", *fixed, *settings)
        for number in range(24):
            Engine([step], "eager").epoch(number)
        found = step.method.predictor().predict(images).cluster
        return [int(sizes.min()) for sizes in (step.method.clustering.sizes(), found.bincount(minlength=4))]

    lost = next(seed for seed in (1, 2, 3, 4, 5) if smallest(seed, 0) == [0, 0])
    for seed in (lost, lost + 1):
        labels, found = smallest(seed, 0.5)
        assert labels > 0.25 * int(first.bincount().min())
        assert found > 0

"""The engine on the CPU: sizes of batches, and the compiled step against the plain one."""

import math
import warnings
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secu.backbones import ViewNorm
from secu.checkpoint import Trained, build, restore, snapshot
from secu.constraints import SizeConstraint
from secu.data import Images
from secu.engine import Engine, choose_engine, fastest_convolutions
from secu.errors import UserError
from secu.feed import HostFeed
from secu.run import Run
from secu.settings import load_config
from secu.steps import ClusterStep, batch_sizes, compile_part, step_of
from secu.teaching import Teaching


@given(st.integers(2, 400), st.integers(2, 64))
def test_batches_cover_the_data_and_none_is_a_single_image(images, batch):
    sizes = batch_sizes(images, batch)
    assert sum(sizes) == images
    assert min(sizes) >= 2
    assert max(sizes) <= batch + 1
    assert set(sizes[:-1]) <= {batch}


def test_graph_needs_cuda():
    with pytest.raises(UserError, match="graph needs a CUDA device, got cpu"):
        choose_engine("graph", torch.device("cpu"))
    assert choose_engine("auto", torch.device("cpu")) == "eager"
    assert choose_engine("auto", torch.device("cuda")) == "graph"


@pytest.mark.parametrize("shape", [(12, 5, 4, 3), (12, 5)])
def test_view_norm_of_one_pass_equals_a_pass_for_each_view(shape):
    """Values, gradients and running statistics of both forms against torch's batch-norm called view by view."""
    torch.manual_seed(0)
    x = 3 + torch.randn(shape) * torch.arange(1, 13.0).view(-1, *[1] * (len(shape) - 1))
    oracle = torch.nn.BatchNorm2d(5) if len(shape) == 4 else torch.nn.BatchNorm1d(5)
    plain, compiled = ViewNorm(5), ViewNorm(5)
    inputs = [x.clone().requires_grad_() for _ in range(3)]
    outputs = [
        torch.cat([oracle(view) for view in inputs[0].chunk(2)]),
        plain(inputs[1]),
        torch.compile(compiled, backend="aot_eager", fullgraph=True)(inputs[2]),
    ]
    slope = torch.randn(shape)
    for output in outputs:
        output.backward(slope)
    for norm, output, given_x in zip((plain, compiled), outputs[1:], inputs[1:], strict=True):
        torch.testing.assert_close(output, outputs[0])
        torch.testing.assert_close(given_x.grad, inputs[0].grad)
        torch.testing.assert_close(norm.weight.grad, oracle.weight.grad)
        torch.testing.assert_close(norm.running_mean, oracle.running_mean)
        torch.testing.assert_close(norm.running_var, oracle.running_var)


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ENGINES = [
    pytest.param("compiled", "cpu", False, id="compiled-cpu"),
    pytest.param("compiled", "cuda", False, id="compiled-cuda", marks=CUDA),
    pytest.param("graph", "cuda", False, id="graph", marks=CUDA),
    pytest.param("graph", "cuda", True, id="graph-images-on-host", marks=CUDA),
]


@pytest.fixture(scope="module")
def blobs() -> Images:
    """Four kinds of image that no one can confuse: a bright quadrant each, in noise. 50 batches of 16 and one of 9."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 60, (809, 1, 8, 8), dtype=torch.uint8, generator=generator)
    for kind in range(4):
        top, left = 4 * (kind // 2), 4 * (kind % 2)
        pixels[kind::4, :, top : top + 4, left : left + 4] += 180
    return Images(pixels)


def make_step(
    blobs: Images, engine: str, device: str, constraint: str, seed: int = 0, more: Sequence[str] = ()
) -> tuple[Trained, ClusterStep]:
    """Build a run in float32 whose learning rate is still high at the end."""
    jitter = [f"augment.affine.{name}" for name in ("rotation=0", "shift=0.1", "scale=0", "aspect=0", "shear=0.2")]
    schedule = ["optim.batch_size=16", "optim.epochs=40", "optim.warmup_epochs=1", "optim.mixed_precision=false"]
    config = load_config(
        "digits", ["heads=[4,6]", f"constraint.kind={constraint}", f"seed={seed}", *jitter, *schedule, *more]
    )
    place = torch.device(device)
    model = build(config, len(blobs), blobs.shape, place)
    parts = (model.augmentation, model.encoder, model.clustering)
    return model, step_of(config)(config, blobs, *parts, place, compiled=engine != "eager")


def train_for(model: Trained, step: ClusterStep, engine: str, epochs: range):
    """Return the losses of the last epoch, the centers and the labels."""
    runner = Engine([step], engine)
    losses = [runner.epoch(number)[0] for number in epochs]
    return list(losses[-1]), model.clustering.centers.unit().detach().cpu(), model.clustering.labels.cpu()


@pytest.fixture(scope="module")
def settled(blobs, tmp_path_factory) -> dict[tuple[str, int], Run]:
    """Runs with settled labels by constraint and seed: a hair's breadth at the start of a run is a mile at its end.

    They are trained on the CPU, where the same seed gives the same run on every day.
    """
    runs = {}
    for constraint, seed in (("size", 0), ("entropy", 0), ("entropy", 1)):
        model, step = make_step(blobs, "eager", "cpu", constraint, seed)
        train_for(model, step, "eager", range(6))
        runs[constraint, seed] = Run.create(tmp_path_factory.mktemp("settled") / "run", model.config)
        runs[constraint, seed].save(*snapshot(model, step))
    return runs


def take_up(run: Run, blobs: Images, engine: str, device: str, constraint: str, seed: int = 0):
    model, step = make_step(blobs, engine, device, constraint, seed)
    restore(run, model, step)
    return model, step


def assert_close(result, expected):
    """Sums are taken in another order, so float32 differs in its last digits, which training amplifies.

    The second head has more clusters than there are kinds of image: which of them an image gets hangs by a thread.
    """
    losses, centers, labels = result
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert (centers * expected[1]).sum(-1)[0, :4].min() > 0.9999
    assert (labels[:, 0] == expected[2][:, 0]).float().mean() > 0.995


@pytest.mark.parametrize("constraint", ["size", "entropy"])
@pytest.mark.parametrize(("engine", "device", "on_host"), ENGINES)
def test_engine_does_what_the_eager_step_does(blobs, settled, engine, device, on_host, constraint, monkeypatch):
    """51 steps from the same checkpoint with the same views, small last batch included.

    The checkpoint is one of the eager engine: that one engine takes up another's work is shown too.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, step = take_up(settled[constraint, 0], blobs, "eager", device, constraint)
    other_model, other_step = take_up(settled[constraint, 0], blobs, engine, device, constraint)
    if on_host:
        other_step.feed = HostFeed(blobs, max(step.sizes), torch.device(device))
    expected = train_for(model, step, "eager", range(6, 7))
    assert_close(train_for(other_model, other_step, engine, range(6, 7)), expected)


@pytest.fixture
def exact(monkeypatch):
    """Sums are taken in the same order every time, so that not a bit may differ."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("constraint", ["size", "entropy"])
@pytest.mark.parametrize(
    ("engine", "device", "on_host"),
    [
        pytest.param("compiled", "cpu", True, id="cpu"),
        pytest.param("graph", "cuda", False, id="graph", marks=CUDA),
        pytest.param("graph", "cuda", True, id="graph-images-on-host", marks=CUDA),
    ],
)
def test_replays_are_the_compiled_step_bit_for_bit(blobs, settled, exact, engine, device, on_host, constraint):
    """One compiled step, so the same kernels: what is called from Python, then from a graph or with other pixels."""
    model, step = take_up(settled[constraint, 0], blobs, "compiled", device, constraint)
    called = train_for(model, step, "compiled", range(6, 7))
    restore(settled[constraint, 0], model, step)
    if on_host:
        step.feed = HostFeed(blobs, max(step.sizes), torch.device(device))
    replayed = train_for(model, step, engine, range(6, 7))
    assert replayed[0] == called[0]
    assert torch.equal(replayed[1], called[1])
    assert torch.equal(replayed[2], called[2])


@CUDA
def test_the_small_last_batch_has_a_graph_of_its_own(blobs, monkeypatch, tmp_path):
    """With one warm-up step and two batches an epoch, the second epoch captures both and the third only replays."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr("secu.engine.WARM_UP", 1)
    few = Images(blobs.pixels[:25])
    model, step = make_step(few, "eager", "cuda", "size")
    train_for(model, step, "eager", range(6))
    run = Run.create(tmp_path / "run", model.config)
    run.save(*snapshot(model, step))
    expected = train_for(model, step, "eager", range(6, 9))

    model, step = make_step(few, "graph", "cuda", "size")
    restore(run, model, step)
    runner = Engine([step], "graph")
    losses = [list(runner.epoch(number)[0]) for number in range(6, 9)][-1]
    assert runner.replays is not None
    assert set(runner.replays.graphs) == {16, 9}
    assert losses == pytest.approx(expected[0], rel=1e-3)
    assert torch.equal(model.clustering.labels[:, 0].cpu(), expected[2][:, 0])


@pytest.mark.parametrize("engine", ["eager", pytest.param("graph", marks=CUDA)])
def test_a_falling_dual_step_reaches_the_step_epoch_by_epoch(blobs, engine):
    """A captured graph must read the new rate, not the one it was captured with."""
    device = "cuda" if engine == "graph" else "cpu"
    model, step = make_step(blobs, engine, device, "size", more=["constraint.dual_schedule=falling"])
    constraint, runner = model.clustering.constraint, Engine([step], engine)
    assert isinstance(constraint, SizeConstraint)
    runner.epoch(0)
    runner.epoch(20)
    assert float(constraint.rate) == pytest.approx(
        0.1 * (1 + math.cos(math.pi * 20 / step.config.optim.total_epochs)) / 2
    )
    constraint.dual_lr = 0.0
    duals = constraint.lower_dual.clone()
    runner.epoch(21)
    assert torch.equal(constraint.lower_dual, duals)


@pytest.mark.parametrize("decay", [0, 0.9])
@pytest.mark.parametrize(("engine", "device", "on_host"), ENGINES)
def test_engine_teaches_as_the_eager_step_does(blobs, settled, engine, device, on_host, decay, monkeypatch):
    """Self-labeling: loss, labels, who is sure, and all networks after 51 steps of weak and strong views.

    At a rate at which weights that differ by a thousandth still come to the same labels: at ten times it they do not.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    first, _ = take_up(settled["size", 0], blobs, "eager", device, "size")
    labels = first.clustering.labels
    results = []
    for kind in ("eager", engine):
        second = ["selflabel.warmup_epochs=0", "selflabel.operations=2", f"selflabel.decay={decay}"]
        schedule = ["optim.initial_epochs=0", "optim.warmup_epochs=0", "optim.lr=0.0001"]
        model, step = make_step(blobs, kind, device, "none", more=["heads=[4]", *schedule, *second])
        model.encoder.load_state_dict(first.encoder.state_dict())
        model.clustering.centers.load_state_dict({"weight": first.clustering.centers.weight[:1, :4]})
        assert isinstance(model.clustering, Teaching)
        model.clustering.begin(labels[:, 0], torch.linspace(0, 1, len(labels), device=device))
        if kind == engine and on_host:
            step.feed = HostFeed(blobs, max(step.sizes), torch.device(device))
        losses, _, found = train_for(model, step, kind, range(1))
        assert 0.2 < model.clustering.record()["sure"] < 1
        weights = [[weight.cpu() for weight in net.state_dict().values()] for net in (model.encoder, step.encoder)]
        results.append(([*losses, float(model.clustering.log_sharpness)], found, weights))
        assert (step.encoder is model.encoder) == (decay == 0)
        learned = next(step.encoder.parameters()) - next(first.encoder.parameters())
        assert learned.abs().max() > 1e-3
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-3, abs=1e-3)
    assert (results[1][1] == results[0][1]).float().mean() > 0.995
    for mine, theirs in zip(results[1][2], results[0][2], strict=True):
        for weight, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("engine", "device"), [("eager", "cpu"), pytest.param("graph", "cuda", marks=CUDA)])
def test_runs_side_by_side_are_the_runs_alone(blobs, settled, exact, engine, device):
    starts = (("size", 0), ("entropy", 1))
    made = [take_up(settled[start], blobs, engine, device, *start) for start in starts]
    together = Engine([step for _, step in made], engine)
    losses = [together.epoch(number) for number in range(6, 8)][-1]
    for number, start in enumerate(starts):
        model, step = take_up(settled[start], blobs, engine, device, *start)
        alone = train_for(model, step, engine, range(6, 8))
        clustering = made[number][0].clustering
        result = list(losses[number]), clustering.centers.unit().detach().cpu(), clustering.labels.cpu()
        assert result[0] == alone[0]
        assert torch.equal(result[1], alone[1])
        assert torch.equal(result[2], alone[2])


def test_images_on_the_host_give_the_same_run_bit_for_bit(blobs):
    model, step = make_step(blobs, "eager", "cpu", "size")
    other_model, other_step = make_step(blobs, "eager", "cpu", "size")
    other_step.feed = HostFeed(blobs, max(step.sizes), torch.device("cpu"))
    losses, centers, labels = train_for(model, step, "eager", range(2))
    other_losses, other_centers, other_labels = train_for(other_model, other_step, "eager", range(2))
    assert other_losses == losses
    assert torch.equal(centers, other_centers)
    assert torch.equal(labels, other_labels)


def test_the_compiler_keeps_its_advice_to_itself():
    """On a GPU it tells everybody to multiply matrices less exactly, in two lines in the middle of the progress."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        compile_part(torch.add)
        for text in ("TensorFloat32 tensor cores are there", "\nOnline softmax is disabled on the fly", "be warned"):
            warnings.warn_explicit(text, UserWarning, "file.py", 1, module="torch._inductor.compile_fx")
    assert [str(warning.message) for warning in heard] == ["be warned"]


def test_what_the_caller_set_for_convolutions_is_put_back():
    for mine in (True, False):
        torch.backends.cudnn.benchmark = mine
        with fastest_convolutions():
            assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark == mine


def test_any_number_of_shapes_can_be_compiled(monkeypatch):
    """A notebook that tries many numbers of clusters: dynamo's own limit is 8, and reaching it is an error."""
    compile_for_real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, **settings: compile_for_real(part, backend="eager", **settings))

    def double(x):
        return 2 * x

    for size in range(1, 13):
        x = torch.ones(size)
        assert torch.equal(compile_part(double)(x), 2 * x)

"""The engines: sizes of batches, and compiled and captured steps against the eager one.

What needs a GPU is skipped without one; the compiled engine is tested on the CPU, too.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from secu.base.errors import UserError
from secu.cluster.constraints import SizeConstraint
from secu.data import Images
from secu.methods import Method, build_method
from secu.methods.selflabel import SelfLabeling
from secu.nets.norm import ViewNorm
from secu.settings import load_config, with_shape
from secu.train.checkpoint import Checkpoint
from secu.train.engine import Engine, choose_engine, fastest_convolutions
from secu.train.feed import HostFeed, build_feed
from secu.train.run import Run
from secu.train.step import CompiledCall, Step, batch_sizes
from small_runs import new_run

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ENGINES = [
    pytest.param("compiled", "cpu", False, id="compiled-cpu"),
    pytest.param("compiled", "cuda", False, id="compiled-cuda", marks=CUDA),
    pytest.param("graph", "cuda", False, id="graph", marks=CUDA),
    pytest.param("graph", "cuda", True, id="graph-images-on-host", marks=CUDA),
]

Trained = tuple[dict[str, float], Tensor, Tensor]  # losses, centers and labels after the last epoch


@given(st.integers(2, 400), st.integers(2, 64))
def test_batches_cover_the_data_and_none_is_a_single_image(images, batch):
    sizes = batch_sizes(images, batch)
    assert sum(sizes) == images
    assert min(sizes) >= 2
    assert max(sizes) <= batch + 1
    assert set(sizes[:-1]) <= {batch}


def test_graph_needs_cuda():
    with pytest.raises(UserError, match="graph needs a CUDA device, got cpu; valid here: auto, eager, compiled"):
        choose_engine("graph", torch.device("cpu"))
    assert choose_engine("auto", torch.device("cpu")) == "eager"
    assert choose_engine("auto", torch.device("cuda")) == "graph"
    assert choose_engine("compiled", torch.device("cpu")) == "compiled"


@pytest.mark.parametrize("shape", [(12, 5, 4, 3), (12, 5)])
def test_view_norm_of_one_pass_equals_one_pass_per_view(shape):
    """Values, gradients and running statistics of both forms against torch's batch-norm called view by view."""
    torch.manual_seed(0)
    x = 3 + torch.randn(shape) * torch.arange(1, 13.0).view(-1, *[1] * (len(shape) - 1))
    oracle = torch.nn.BatchNorm2d(5) if len(shape) == 4 else torch.nn.BatchNorm1d(5)
    plain = ViewNorm(5)
    compiled = ViewNorm(5)
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


# Small runs of all engines


@pytest.fixture(scope="module")
def blobs() -> Images:
    """Make four kinds of image that no one can confuse: a bright quadrant each. 50 batches of 16 and one of 9."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 60, (809, 1, 8, 8), dtype=torch.uint8, generator=generator)
    for kind in range(4):
        top, left = 4 * (kind // 2), 4 * (kind % 2)
        pixels[kind::4, :, top : top + 4, left : left + 4] += 180
    return Images(pixels)


def make_step(
    blobs: Images, engine: str, device: str, constraint: str, seed: int = 0, more: Sequence[str] = ()
) -> Step:
    """Return the step of a run in float32 whose learning rate is still high at the end."""
    jitter = [f"augment.affine.{name}" for name in ("rotation=0", "shift=0.1", "scale=0", "aspect=0", "shear=0.2")]
    schedule = ["optim.batch_size=16", "optim.epochs=40", "optim.warmup_epochs=1", "optim.precision=fp32"]
    overrides = ["heads=[4,6]", f"constraint.kind={constraint}", f"seed={seed}", *jitter, *schedule, *more]
    config = with_shape(load_config("digits", overrides), blobs.shape)
    place = torch.device(device)
    return Step(build_method(config, len(blobs), blobs.shape, place), blobs, place, compiled=engine != "eager")


def train_for(step: Step, engine: str, epochs: range) -> Trained:
    """Train, and return losses of the last epoch, centers and labels."""
    runner = Engine([step], engine)
    losses = [runner.epoch(number)[0] for number in epochs]
    return losses[-1], *found_by(step.method)


def found_by(method: Method) -> tuple[Tensor, Tensor]:
    return method.clustering.centers.unit().detach().cpu(), method.clustering.labels.cpu()


def save(step: Step, run: Run, epochs: int) -> Run:
    Checkpoint.take(step.method, step, epochs, 0.0).save(run, step.method.trained_tensors)
    return run


def restore(run: Run, step: Step) -> Step:
    Checkpoint.load(run).restore(run, step.method, step)
    return step


@pytest.fixture(scope="module")
def settled(blobs, tmp_path_factory) -> dict[str, Run]:
    """Make runs with settled labels, by constraint: small differences at the start of a run grow large.

    They are trained on the CPU, where the same seed always gives the same run.
    """
    runs = {}
    for constraint in ("size", "entropy"):
        step = make_step(blobs, "eager", "cpu", constraint)
        train_for(step, "eager", range(6))
        runs[constraint] = save(step, new_run(tmp_path_factory.mktemp("settled") / "run", step.config), 6)
    return runs


@pytest.fixture(scope="module")
def resume(blobs, settled) -> Callable[..., Step]:
    """Return a function that restores a settled run; a compiled step is made once, as compiling takes a minute."""
    make_compiled = cache(partial(make_step, blobs, "compiled"))

    def resumed(engine: str, device: str, constraint: str, *, on_host: bool = False, seed: int = 0) -> Step:
        again = engine == "compiled" and seed == 0
        step = make_compiled(device, constraint) if again else make_step(blobs, engine, device, constraint, seed)
        largest = max(step.sizes)
        place = torch.device(device)
        step.feed = HostFeed(blobs, largest, place) if on_host else build_feed(blobs, largest, place)
        return restore(settled[constraint], step)

    return resumed


def assert_close(result: Trained, expected: Trained) -> None:
    """Compare up to rounding: sums are taken in another order, and training amplifies float32's last digits.

    The second head has more clusters than there are kinds of image, so its labels are not determined.
    """
    losses, centers, labels = result
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert (centers * expected[1]).sum(-1)[0, :4].min() > 0.9999
    assert (labels[:, 0] == expected[2][:, 0]).float().mean() > 0.995


def assert_equal(result: Trained, expected: Trained) -> None:
    assert result[0] == expected[0]
    assert torch.equal(result[1], expected[1])
    assert torch.equal(result[2], expected[2])


@pytest.mark.timeout(600)  # compiling takes a minute, and several where others use the machine
@pytest.mark.parametrize("constraint", ["size", "entropy"])
@pytest.mark.parametrize(("engine", "device", "on_host"), ENGINES)
def test_engine_does_what_the_eager_step_does(resume, engine, device, on_host, constraint, monkeypatch):
    """51 steps from the same checkpoint with the same views, small last batch included.

    The checkpoint was written by the eager engine, so this also shows that one engine can continue another's run.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    expected = train_for(resume("eager", device, constraint), "eager", range(6, 7))
    assert list(expected[0]) == ["loss", "center_loss"]
    step = resume(engine, device, constraint, on_host=on_host)
    assert_close(train_for(step, engine, range(6, 7)), expected)


@pytest.fixture
def exact(monkeypatch, device):
    """Take sums in the same order every time, so that not a bit may differ; one thread of a CPU always does."""
    if device == "cpu":
        yield
        return
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
def test_replays_are_the_compiled_step_bit_for_bit(resume, exact, engine, device, on_host, constraint):
    """One compiled step, so the same kernels: called from Python, then from a graph or with streamed inputs."""
    called = train_for(resume("compiled", device, constraint), "compiled", range(6, 7))
    step = resume("compiled", device, constraint, on_host=on_host)
    assert_equal(train_for(step, engine, range(6, 7)), called)


@CUDA
def test_small_last_batch_has_a_graph_of_its_own(blobs, monkeypatch, tmp_path):
    """With one warm-up step and two batches an epoch, the second epoch captures both and the third only replays."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr("secu.train.engine.WARM_UP", 1)
    few = Images(blobs.tensor[:25])
    step = make_step(few, "eager", "cuda", "size")
    train_for(step, "eager", range(6))
    run = save(step, new_run(tmp_path / "run", step.config), 6)
    expected = train_for(step, "eager", range(6, 9))

    step = restore(run, make_step(few, "graph", "cuda", "size"))
    runner = Engine([step], "graph")
    losses = [runner.epoch(number)[0] for number in range(6, 9)][-1]
    assert runner.replays is not None
    assert set(runner.replays.graphs) == {(16, False), (9, False)}
    assert losses == pytest.approx(expected[0], rel=1e-3)
    assert torch.equal(step.method.clustering.labels[:, 0].cpu(), expected[2][:, 0])


@pytest.mark.parametrize("engine", ["eager", pytest.param("graph", marks=CUDA)])
def test_falling_dual_step_reaches_the_step_epoch_by_epoch(blobs, engine):
    """A captured graph must read the new rate, not the one it was captured with."""
    device = "cuda" if engine == "graph" else "cpu"
    step = make_step(blobs, engine, device, "size", more=["constraint.dual_schedule=falling"])
    constraint = step.method.clustering.constraint
    runner = Engine([step], engine)
    assert isinstance(constraint, SizeConstraint)
    runner.epoch(0)
    runner.epoch(20)
    share = (1 + math.cos(math.pi * 20 / step.config.optim.total_epochs)) / 2
    assert float(constraint.rate) == pytest.approx(0.1 * share)
    constraint.dual_lr = 0.0
    duals = constraint.lower_dual.clone()
    runner.epoch(21)
    assert torch.equal(constraint.lower_dual, duals)


@pytest.mark.timeout(600)  # compiling takes a minute, and several where others use the machine
@pytest.mark.parametrize("decay", [0, 0.9])
@pytest.mark.parametrize(("engine", "device", "on_host"), ENGINES)
def test_engine_self_labels_as_the_eager_step_does(blobs, resume, engine, device, on_host, decay, monkeypatch):
    """Self-labeling: loss, labels, confident images and all networks after 51 steps of weak and strong views.

    The learning rate is one at which weights that differ by a thousandth still come to the same labels: at ten times
    that rate they do not.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    first = resume("eager", device, "size").method
    labels = first.clustering.labels[:, 0]
    second = ["method=selflabel", "selflabel.warmup_epochs=0", "selflabel.operations=2", f"selflabel.decay={decay}"]
    schedule = ["optim.initial_epochs=0", "optim.warmup_epochs=0", "optim.lr=0.0001"]
    results = []
    for kind in ("eager", engine):
        step = make_step(blobs, kind, device, "none", more=["heads=[4]", *schedule, *second])
        method = step.method
        assert isinstance(method, SelfLabeling)
        method.start_from(first)
        if method.student is not None:
            method.student.load_state_dict(method.encoder.state_dict())
        method.clustering.begin(labels, torch.linspace(0, 1, len(labels), device=device))
        if kind == engine and on_host:
            step.feed = HostFeed(blobs, max(step.sizes), torch.device(device))
        losses, _, found = train_for(step, kind, range(1))
        assert list(losses) == ["loss"]
        assert 0.2 < method.clustering.record()["confident"] < 1
        assert (method.student is None) == (decay == 0)
        learner = method.student or method.encoder
        weights = [[weight.cpu() for weight in net.state_dict().values()] for net in (method.encoder, learner)]
        results.append(([losses["loss"], float(method.clustering.log_sharpness)], found, weights))
        learned = next(learner.parameters()) - next(first.encoder.parameters())
        assert learned.abs().max() > 1e-3
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-3, abs=1e-3)
    assert (results[1][1] == results[0][1]).float().mean() > 0.995
    for mine, theirs in zip(results[1][2], results[0][2], strict=True):
        for weight, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("engine", "device"), [("eager", "cpu"), pytest.param("graph", "cuda", marks=CUDA)])
def test_runs_side_by_side_are_the_runs_alone(resume, exact, engine, device):
    seeds = {"size": 0, "entropy": 1}
    steps = [resume(engine, device, constraint, seed=seed) for constraint, seed in seeds.items()]
    together = Engine(steps, engine)
    losses = [together.epoch(number) for number in range(6, 8)][-1]
    for number, (constraint, seed) in enumerate(seeds.items()):
        alone = train_for(resume(engine, device, constraint, seed=seed), engine, range(6, 8))
        assert_equal((losses[number], *found_by(steps[number].method)), alone)


@pytest.mark.timeout(600)  # compiling takes a minute
@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize(("engine", "device"), [("eager", "cpu"), pytest.param("graph", "cuda", marks=CUDA)])
def test_every_precision_trains_like_float32(blobs, settled, engine, device, precision):
    """51 steps, on CUDA with the scale of the losses in the graph; a CPU uses float32 whatever is set."""
    before = torch.backends.cudnn.allow_tf32
    exact = train_for(restore(settled["size"], make_step(blobs, "eager", device, "size")), "eager", range(6, 7))
    more = [f"optim.precision={precision}"]
    step = restore(settled["size"], make_step(blobs, engine, device, "size", more=more))
    assert (step.loss_scale > 1) == (device == "cuda" and precision == "fp16")
    losses, _, labels = train_for(step, engine, range(6, 7))
    assert losses == pytest.approx(exact[0], rel=0.05)
    assert (labels[:, 0] == exact[2][:, 0]).float().mean() > 0.98
    assert all(value.isfinite().all() for value in step.method.state_dict().values())
    assert torch.backends.cudnn.allow_tf32 == before


def test_images_on_the_host_give_the_same_run_bit_for_bit(blobs):
    step = make_step(blobs, "eager", "cpu", "size")
    other = make_step(blobs, "eager", "cpu", "size")
    other.feed = HostFeed(blobs, max(step.sizes), torch.device("cpu"))
    assert_equal(train_for(other, "eager", range(2)), train_for(step, "eager", range(2)))


def test_after_every_step_the_caller_is_called(blobs):
    step = make_step(Images(blobs.tensor[:41]), "eager", "cpu", "size")
    seen = []
    Engine([step], "eager").epoch(0, lambda: seen.append(int(step.images_done)))
    assert seen == [16, 32, 41]


# Compiling


@pytest.fixture
def compiled(monkeypatch) -> list[Callable]:
    """Let torch.compile take no time, and return the functions that it is called for."""
    compile_for_real = torch.compile
    functions = []

    def compile_fast(function, **settings):
        functions.append(function)
        return compile_for_real(function, backend="eager", **settings)

    monkeypatch.setattr(torch, "compile", compile_fast)
    return functions


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_any_number_of_shapes_can_be_compiled(compiled):
    """A notebook that tries many numbers of clusters: dynamo's own limit is 8, and reaching it is an error."""
    for size in range(1, 13):
        x = torch.ones(size)
        assert torch.equal(CompiledCall()(double, x), 2 * x)
    assert len(compiled) == 12


def test_each_function_is_compiled_once(compiled):
    call = CompiledCall()
    for _ in range(3):
        call(double, torch.ones(2))
        call(torch.neg, torch.ones(2))
    assert compiled == [double, torch.neg]


def test_parts_of_a_full_batch_are_compiled_and_the_odd_last_one_is_not(blobs, compiled):
    """Compiling everything again for one small batch per epoch would not pay."""
    step = make_step(Images(blobs.tensor[:41]), "compiled", "cpu", "size")
    method = step.method
    seen = []
    losses = method.losses

    def spy(batch: Tensor, index: Tensor) -> dict[str, Tensor]:
        seen.append((len(index), method.call is step.compiled_call))
        return losses(batch, index)

    method.losses = spy
    for number in range(2):
        Engine([step], "compiled").epoch(number)
    assert seen == [(16, True), (16, True), (9, False)] * 2
    assert compiled == [method.views.render, method.encoder, method.clustering.step]


def test_advice_of_the_compiler_is_not_shown():
    """On a GPU it tells everybody to multiply matrices less exactly, in two lines in the middle of the progress."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        CompiledCall()
        for text in ("TensorFloat32 tensor cores are there", "\nOnline softmax is disabled on the fly", "be warned"):
            warnings.warn_explicit(text, UserWarning, "file.py", 1, module="torch._inductor.compile_fx")
    assert [str(warning.message) for warning in heard] == ["be warned"]


def test_setting_of_the_caller_for_convolutions_is_restored():
    for mine in (True, False):
        torch.backends.cudnn.benchmark = mine
        with fastest_convolutions():
            assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark == mine

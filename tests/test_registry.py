"""Parts by name: added from outside, imported on first use, and named in errors."""

import subprocess
import sys

import pytest
import torch

from secu.base.errors import UserError
from secu.cluster.constraints import Constraint, SizeConstraint, build_constraint
from secu.config import Config
from secu.nets.encoder import Encoder
from secu.registry import BACKBONES, CENTERS, CONSTRAINTS, METHODS, SOURCES, Registry
from secu.settings import load_config, resolve

BUILT_IN = {
    CONSTRAINTS: ("none", "size", "entropy"),
    CENTERS: ("sgd", "closed_form", "kmeans"),
    BACKBONES: ("small", "resnet18", "resnet34", "resnet50", "lite0", "hf"),
    METHODS: ("secu", "selflabel"),
    SOURCES: ("dataset",),
}


@pytest.fixture
def shapes(tmp_path, monkeypatch) -> Registry:
    """Make a registry with one built-in part, in a module that nobody has imported."""
    (tmp_path / "lazy_shapes.py").write_text("imported = []\n\n\ndef circle():\n    return 'round'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lazy_shapes", raising=False)
    return Registry("shape.kind", circle="lazy_shapes:circle")


# Adding parts


def test_registered_part_is_found_by_its_name(shapes):
    @shapes.register("square")
    def square():
        return "four corners"

    assert square() == "four corners"  # the decorator returns what it is given
    assert shapes["square"] is square
    assert "square" in shapes
    assert shapes.check("square") == "square"


def test_name_can_be_taken_once(shapes):
    @shapes.register("square")
    def first():
        return 1

    def second():
        return 2

    with pytest.raises(ValueError, match=r"^shape.kind: 'square' is already registered; choose another name$"):
        shapes.register("square")(second)
    assert shapes["square"] is first


def test_same_part_defined_again_replaces_itself(shapes):
    """As when a notebook cell is run twice."""

    def define(value):
        @shapes.register("square")
        def square():
            return value

    define(1)
    define(2)
    assert shapes["square"]() == 2


def test_built_in_part_cannot_be_replaced(shapes):
    """Neither before nor after it is imported."""
    for _ in range(2):
        with pytest.raises(ValueError, match="'circle' is already registered"):
            shapes.register("circle")(lambda: "oval")
        assert shapes["circle"]() == "round"


def test_same_part_may_be_registered_again(shapes):
    """As when a module that registers an imported part is executed twice."""

    def square():
        return "four corners"

    assert shapes.register("square")(square) is square
    assert shapes.register("square")(square) is square


# Looking them up


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("circel", "shape.kind: unknown 'circel'; did you mean circle? valid: circle"),
        ("xyz", "shape.kind: unknown 'xyz'; valid: circle"),
        ("", "shape.kind: unknown ''; valid: circle"),
    ],
)
def test_unknown_name_is_reported_with_the_valid_ones(shapes, name, message):
    for look in (shapes.check, shapes.__getitem__):
        with pytest.raises(ValueError, match="unknown") as error:
            look(name)
        assert str(error.value) == message
    assert name not in shapes


def test_part_is_imported_on_first_use(shapes):
    assert "circle" in shapes
    assert shapes.check("circle") == "circle"
    assert "lazy_shapes" not in sys.modules
    part = shapes["circle"]
    assert part() == "round"
    assert "lazy_shapes" in sys.modules
    sys.modules["lazy_shapes"].circle = None
    assert shapes["circle"] is part  # and only then


@pytest.mark.parametrize(("registry", "names"), BUILT_IN.items(), ids=lambda value: getattr(value, "setting", ""))
def test_built_in_parts_exist(registry, names):
    for name in names:
        assert callable(registry[name])


def test_config_is_read_without_importing_torch():
    code = "import sys, secu.settings; secu.settings.load_config('cifar10'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# In a config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "seku"}, "method: unknown 'seku'; did you mean secu? valid: "),
        ({"constraint": {"kind": "sizes"}}, "constraint.kind: unknown 'sizes'; did you mean size? valid: entropy, "),
        ({"centers": {"kind": "k-means"}}, "centers.kind: unknown 'k-means'; did you mean kmeans?"),
        ({"encoder": {"backbone": "resnet"}}, "encoder.backbone: unknown 'resnet'; did you mean resnet"),
    ],
)
def test_unknown_part_in_a_config_is_one_line(settings, message):
    with pytest.raises(UserError) as error:
        resolve(settings)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.fixture
def own_tables(monkeypatch):
    """Let registrations end with the test."""
    for registry in BUILT_IN:
        monkeypatch.setattr(registry, "_parts", dict(registry._parts))


def test_part_from_outside_is_a_valid_setting(own_tables):
    @CONSTRAINTS.register("outside")
    class Outside(SizeConstraint):
        """Any subclass will do."""

    @BACKBONES.register("flat")
    def flat(config, channels):
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * 64, 12))
        module.features = 12
        return module

    config = load_config("digits", ["constraint.kind=outside", "encoder.backbone=flat", "heads=[3]"])
    assert isinstance(build_constraint(config.constraint, torch.tensor([3]), 10), Outside)
    encoder = Encoder(config.encoder, 1)
    assert encoder.eval().embed(torch.rand(4, 1, 8, 8)).shape == (4, encoder.dim)
    assert Config.model_validate(config.model_dump()) == config


def test_part_is_gone_with_its_registration():
    with pytest.raises(UserError, match=r"constraint.kind: unknown 'outside'"):
        resolve({"constraint": {"kind": "outside"}})
    assert issubclass(CONSTRAINTS["size"], Constraint)

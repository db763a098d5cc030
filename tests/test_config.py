"""Settings: recipes, overrides, defaults and the one line that every mistake becomes."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from secu.base.errors import UserError, nearest
from secu.config import Config
from secu.settings import load_config, load_recipe, merge, parse_overrides, recipe_names, resolve, with_shape
from secu.train.run import Run


def complaint(*overrides, recipe="cifar10"):
    """Return the message of the error that these overrides make; it must be a single line."""
    with pytest.raises(UserError) as caught:
        load_config(recipe, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message
    return message


# Overrides


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=0.1", {"optim": {"lr": 0.1}}),
        ("heads=[3, 5]", {"heads": [3, 5]}),
        ("augment.affine=null", {"augment": {"affine": None}}),
        ("augment.affine.scale=0.3", {"augment": {"affine": {"scale": 0.3}}}),
        ("data={source: 'dataset:digits', train: all}", {"data": {"source": "dataset:digits", "train": "all"}}),
        ("description=a=b", {"description": "a=b"}),
        ("data.strict=false", {"data": {"strict": False}}),
    ],
)
def test_an_override_is_a_dotted_path_and_a_yaml_value(override, expected):
    assert parse_overrides([override]) == expected


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("optim.weight_decay=1e-4", lambda c: c.optim.weight_decay, 1e-4),  # YAML itself reads 1e-4 as text
        ("optim.lr=2", lambda c: c.optim.lr, 2.0),
        ("optim.epochs=7", lambda c: c.optim.epochs, 7),
        ("heads=[3,5]", lambda c: c.heads, (3, 5)),
        ("augment.blur_radius=[0.5,1]", lambda c: c.augment.blur_radius, (0.5, 1.0)),
        ("constraint.upper=1.5", lambda c: c.constraint.upper, 1.5),
        ("augment.affine={scale: 0.5}", lambda c: (c.augment.affine.scale, c.augment.affine.shear), (0.5, 0.2)),
        ("augment.affine.shear=0", lambda c: c.augment.affine.shear, 0.0),
        ("init_from=runs/a", lambda c: c.init_from, "runs/a"),
        ("seed=4294967295", lambda c: c.seed, 2**32 - 1),
    ],
)
def test_an_override_reaches_the_setting_with_its_type(override, read, expected):
    value = read(load_config("cifar10", [override]))
    assert value == expected
    assert type(value) is type(expected)


def test_null_puts_an_optional_setting_back():
    assert load_config("digits").augment.affine is not None
    assert load_config("digits", ["augment.affine=null"]).augment.affine is None


def test_a_later_override_wins_and_leaves_its_neighbors_alone():
    config = load_config("cifar10", ["optim.lr=1", "optim.epochs=3", "optim.lr=2"])
    assert (config.optim.lr, config.optim.epochs, config.optim.momentum) == (2.0, 3, 0.9)
    assert parse_overrides(["optim.lr=1", "optim={epochs: 3}"]) == {"optim": {"lr": 1, "epochs": 3}}


def test_an_override_beats_the_recipe_and_the_recipe_the_default():
    assert load_config("digits").optim.batch_size == 32 != Config().optim.batch_size
    assert load_config("digits", ["optim.batch_size=64"]).optim.batch_size == 64


def test_merge_changes_neither_of_its_arguments():
    base = {"a": {"b": 1}, "c": 2}
    change = {"a": {"d": 3}}
    assert merge(base, change) == {"a": {"b": 1, "d": 3}, "c": 2}
    assert (base, change) == ({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}})


@given(st.dictionaries(st.sampled_from(["lr", "momentum", "weight_decay"]), st.floats(0, 0.5), min_size=1))
def test_overrides_survive_the_text_they_are_written_in(values):
    config = load_config("cifar10", [f"optim.{key}={value!r}" for key, value in values.items()])
    assert {key: getattr(config.optim, key) for key in values} == values


# Mistakes


@pytest.mark.parametrize("override", ["optim.lr", "=3", "", "no equals sign"])
def test_an_override_without_key_or_value_says_how_one_looks(override):
    assert complaint(override) == f"override: {override!r} must look like key=value, for example optim.lr=0.1"


def test_a_value_that_is_no_yaml_is_named():
    expected = "override: heads: the value '[3,' is not valid YAML: while parsing a flow node"
    assert complaint("heads=[3,").startswith(expected)


@pytest.mark.parametrize(
    ("override", "key", "meant"),
    [
        ("optm.lr=1", "optm", "optim"),
        ("optim.epoch=3", "optim.epoch", "epochs"),
        ("augment.affine.scal=1", "augment.affine.scal", "scale"),
        ("paper.ac=1", "paper.ac", "acc"),
        ("haeds=[3]", "haeds", "heads"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one_at_every_depth(override, key, meant):
    message = complaint(override)
    assert message.startswith(f"{key}: unknown setting; did you mean {meant}? valid: ")


def test_an_unknown_key_that_is_near_nothing_lists_what_is_valid():
    message = complaint("optim.zzzzzzz=1")
    assert "did you mean" not in message
    names = "average_from, backbone_lr, batch_size, epochs, initial_epochs, lr, momentum, name, precision, schedule"
    assert message.endswith(f"valid: {names}, warmup_epochs, weight_decay")


@pytest.mark.parametrize("key", ["..", "optim.", ".optim", "optim.lr.x", "heads.0"])
def test_a_malformed_path_is_an_error(key):
    assert complaint(f"{key}=3")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lr=fast", ["optim.lr", "'fast'", "number"]),
        ("optim.epochs=3.5", ["optim.epochs", "3.5", "integer"]),
        ("optim.epochs=-1", ["optim.epochs", "-1", "0"]),
        ("heads=5", ["heads", "5", "list"]),
        ("heads=[5,x]", ["heads.1", "'x'", "integer"]),
        ("optim=3", ["optim", "3", "optim.SETTING=VALUE"]),
        ("optim.lr=", ["optim.lr", "None", "number"]),
        ("optim.lr=nan", ["optim.lr", "nan", "finite"]),
        ("centers.lr=.inf", ["centers.lr", "inf", "finite"]),
        (
            "encoder.backbone=resnet19",
            ["encoder.backbone: unknown 'resnet19'; did you mean resnet18?", "resnet50, small"],
        ),
        ("encoder.prediction_layers=1", ["encoder.prediction_layers", "1", "0 or 2"]),
        ("encoder.projection_layers=4", ["encoder.projection_layers", "4", "3"]),
        ("encoder.dim=1", ["encoder.dim", "1", "2"]),
        (
            "constraint.kind=sise",
            ["constraint.kind: unknown 'sise'; did you mean size?", "entropy, none, size"],
        ),
        ("constraint.lower=1.1", ["constraint.lower", "1.1", "1"]),
        ("constraint.upper=0.9", ["constraint.upper", "0.9", "1"]),
        ("constraint.dual_lr=0", ["constraint.dual_lr", "0"]),
        (
            "centers.kind=kmean",
            ["centers.kind: unknown 'kmean'; did you mean kmeans?", "closed_form, kmeans, sgd"],
        ),
        ("loss.temperature=0", ["loss.temperature", "0"]),
        ("loss.hard_label_weight=1.5", ["loss.hard_label_weight", "1.5", "1"]),
        ("optim.name=adam", ["optim.name", "'adam'", "'sgd' or 'lars'"]),
        ("optim.batch_size=1", ["optim.batch_size", "1", "2"]),
        ("optim.momentum=1", ["optim.momentum", "1"]),
        ("augment.crop_min=0", ["augment.crop_min", "0"]),
        ("augment.blur_prob=[1,0.1,0.1]", ["augment.blur_prob"]),
        ("engine=fast", ["engine", "'fast'", "'auto'"]),
        ("seed=-1", ["seed", "-1", "0"]),
        ("seed=4294967296", ["seed", "4294967296"]),
        ("data.source=[a]", ["data.source", "['a']", "string"]),
        ("method=secus", ["method: unknown 'secus'", "did you mean secu?", "valid: secu, selflabel"]),
        ("head=-1", ["head", "-1", "0"]),
        ("data.values=int", ["data.values", "'int'", "match"]),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_valid(override, parts):
    message = complaint(override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["loss.name=ce", "centers.kind=closed_form"], ["loss.name: ce", "centers.kind must be sgd", "closed_form"]),
        (["loss.name=ce", "centers.kind=kmeans"], ["loss.name: ce", "kmeans"]),
        (["centers.kind=closed_form", "centers.schedule=rising"], ["centers.schedule: rising", "centers.kind=sgd"]),
        (["centers.kind=kmeans", "centers.schedule=settling"], ["centers.schedule: settling", "centers.kind=sgd"]),
        (["optim.precision=fp8"], ["optim.precision: 'fp8'", "bf16", "fp16", "tf32", "fp32"]),
        (["optim.average_from=1"], ["optim.average_from: 1", "less than 1"]),
        (["encoder.prediction_layers=2", "encoder.projection_layers=0"], ["encoder.projection_layers of 1 to 3"]),
        (["constraint.alpha=5"], ["constraint.alpha: 5.0", "kind=entropy", "got constraint.kind=size"]),
        (["constraint.kind=none", "constraint.alpha=5"], ["constraint.alpha", "got constraint.kind=none"]),
        (["constraint.kind=entropy", "constraint.lower=0.5"], ["constraint.lower: 0.5", "kind=size"]),
        (["constraint.kind=entropy", "constraint.upper=2"], ["constraint.upper: 2.0", "kind=size"]),
        (["constraint.kind=none", "constraint.dual_lr=1"], ["constraint.dual_lr: 1.0", "kind=size"]),
        (["heads=[]"], ["heads: []", "from 2 to"]),
        (["heads=[10,1]"], ["heads: [10, 1]", "from 2 to 1,000,000"]),
        (["augment.blur_radius=[2,1]"], ["augment.blur_radius: (2.0, 1.0)", "increasing"]),
        (["augment.blur_radius=[0,1]"], ["augment.blur_radius: (0.0, 1.0)", "positive"]),
        (["augment.blur_prob=[1,1.5]"], ["augment.blur_prob: (1.0, 1.5)", "0 to 1"]),
        (["augment.solarize_prob=[-0.1,0]"], ["augment.solarize_prob: (-0.1, 0.0)", "0 to 1"]),
        (["data.std=[0]"], ["data.std: [0.0]", "positive"]),
        (["data.std=[]"], ["data.std: []", "positive"]),
        (["optim.epochs=0", "optim.initial_epochs=0"], ["optim.epochs: 0", "optim.initial_epochs"]),
        (["head=10"], ["head: 10", "one of 10 heads, from 0"]),
        (["heads=[10]", "head=1"], ["head: 1", "one of 1 heads, from 0"]),
        (["method=selflabel"], ["selflabel: ", "got method=selflabel", "run secu selflabel"]),
        (["method=secu", "selflabel={}"], ["selflabel: ", "got method=secu", "run secu selflabel"]),
        (["selflabel={}"], ["selflabel: needs a single head", "run secu selflabel"]),
    ],
)
def test_an_impossible_combination_is_named(overrides, parts):
    message = complaint(*overrides)
    for part in parts:
        assert part in message


def test_a_config_written_out_in_full_is_valid_again():
    """Settings that the constraint does not read may be there, as long as they have their default values."""
    for name in recipe_names():
        config = load_config(name)
        assert resolve(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_a_config_cannot_be_changed():
    config = load_config("cifar10")
    for section, key in ((config, "seed"), (config.optim, "lr"), (config.augment, "crop_min")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, 1)
    assert load_config("cifar10") == config


# Recipes


def test_a_recipe_can_be_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data: {source: 'dataset:digits'}\nheads: [4]\ndescription: grün\n", encoding="utf-8")
    config = load_config(str(path), ["seed=3"])
    assert (config.data.source, config.heads, config.seed, config.description) == ("dataset:digits", (4,), 3, "grün")
    assert config.optim == Config().optim


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: [", "is not valid YAML"),
        (b"- 1\n- 2\n", "must hold key: value pairs, got list"),
        (b"just words", "must hold key: value pairs, got str"),
        (b"# nothing", "must hold key: value pairs, got nothing"),
        (b"\xff\xfe\x00", "is not a text file"),
        (b"!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_an_error(tmp_path, content, expected):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    message = complaint(recipe=str(path))
    assert message.startswith(f"recipe: {path} ")
    assert expected in message


NINES = "9" * 5000
DEEP = "[" * 5000
LAUGHS = [
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
]
CHAIN = ["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 3000))]
HOSTILE = {  # a part of the message → a value
    "digits": NINES,
    "more than 100 digits": "0x" + "f" * 5000,
    "month must be": "2024-13-45",
    "invalid literal": "!!int x",
    "the type that is stated": "!!timestamp x",
    "'a' appears twice": "{a: 1, a: 2}",
    "unhashable": "{[1]: 2}",
    "contains it": "&a {b: [*a]}",
    "levels deep": DEEP,
    "longer than": "x" * 200_000,
    "not allowed": "\0",
}


@pytest.mark.parametrize(("expected", "value"), HOSTILE.items(), ids=list(HOSTILE))
def test_a_hostile_value_is_one_short_line(tmp_path, expected, value):
    (tmp_path / "hostile.yaml").write_text(f"seed: {value}\n")
    for message in (complaint(f"seed={value}"), complaint(recipe=str(tmp_path / "hostile.yaml"))):
        assert expected in message
        assert "\n" not in message
        assert len(message) < 1000


@pytest.mark.parametrize("lines", [["a: &a [x]", *LAUGHS], CHAIN], ids=["wide", "deep"])
def test_aliases_that_expand_to_too_much_are_refused(tmp_path, lines):
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    message = complaint(recipe=str(path))
    assert "expand to more than 100,000 characters or 20 levels" in message
    (tmp_path / "run").mkdir()
    path.rename(tmp_path / "run" / "config.yaml")
    with pytest.raises(UserError, match="expand to more than"):
        Run(tmp_path / "run").config()


def test_aliases_and_merged_keys_work(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("heads: &some [4]\noptim: &o {lr: 0.5}\ndata: {mean: *some, std: *some}\ncenters: {<<: *o}\n")
    config = load_config(str(path))
    assert (config.data.mean, config.centers.lr) == ((4.0,), 0.5)


@pytest.mark.parametrize(
    "override",
    [
        "x" * 5000 + "=1",
        "x" * 5000,
        "a." * 5000 + "b=1",
        f"encoder.backbone={'x' * 5000}",
        f"heads=[{'1, ' * 5000}1]",
        f"optim={{lr: {'x' * 5000}}}",
        f"seed={'9' * 90}",
        f"data.values=int 0..{NINES}",
    ],
)
def test_a_long_value_is_shortened_in_the_message(override):
    message = complaint(override)
    assert len(message) <= 1003
    assert "…" in message or len(override) < 200


def test_a_recipe_whose_keys_are_numbers_is_an_error(tmp_path):
    (tmp_path / "numbers.yaml").write_text("1: 2\n")
    assert "strings" in complaint(recipe=str(tmp_path / "numbers.yaml"))


def test_a_missing_recipe_file_is_named(tmp_path):
    assert complaint(recipe=str(tmp_path / "no.yaml")) == f"recipe: no file {tmp_path / 'no.yaml'}"
    assert complaint(recipe=str(tmp_path)).startswith(f"recipe: unknown '{tmp_path}'")


def test_an_unknown_recipe_names_the_nearest():
    message = complaint(recipe="cifar10-entrop")
    assert message.startswith("recipe: unknown 'cifar10-entrop'; did you mean cifar10-entropy? valid: cifar10, ")
    assert message.endswith("or the path of a .yaml file")


def test_nearest_prefers_the_closest_and_sorts_the_rest():
    assert nearest("lars", ["sgd", "lars2", "adam"]) == "did you mean lars2? valid: adam, lars2, sgd"
    assert nearest("zzz", ["b", "a"]) == "valid: a, b"


def test_load_recipe_returns_only_what_differs():
    assert set(load_recipe("cifar10")) == {"description", "paper", "paper_selflabel", "data"}


# The head that answers


@pytest.mark.parametrize(("head", "clusters"), [(0, 4), (1, 2), (2, 9)])
def test_the_number_of_clusters_is_that_of_the_head_that_answers(head, clusters):
    assert load_config("digits", ["heads=[4,2,9]", f"head={head}"]).clusters == clusters


# The shape of the inputs


@pytest.mark.parametrize(
    ("overrides", "shape", "expected"),
    [
        ([], (3, 8, 8), (3, 8)),
        (["data.image_size=16"], (3, 8, 8), (3, 16)),
        (["data.channels=1"], (3, 8, 8), (1, 8)),
        ([], (3, 8, 9), (None, None)),
        ([], (64,), (None, None)),
    ],
)
def test_a_config_states_the_shape_that_it_left_to_the_data(overrides, shape, expected):
    before = load_config("digits", overrides)
    config = with_shape(before, shape)
    assert (config.data.channels, config.data.image_size) == expected
    assert config.model_copy(update={"data": before.data}) == before


# Files and overrides of earlier versions


def selflabel_settings(**change):
    """Return valid settings of self-labeling, without the method, as version 0.1 wrote them."""
    return {"heads": [10], "selflabel": {"decay": 0.5, **change}}


@pytest.mark.parametrize(
    ("old", "read", "expected"),
    [
        ({"data": {"name": "digits"}}, lambda c: c.data.source, "dataset:digits"),
        ({"data": {"name": "digits", "source": None}}, lambda c: c.data.source, "dataset:digits"),
        ({"data": {"name": "own", "source": "/pictures"}}, lambda c: c.data.source, "/pictures"),
        ({"data": {"name": "own", "source": None}}, lambda c: c.data.source, None),
        ({"augment": {"grey_prob": 0.125}}, lambda c: c.augment.gray_prob, 0.125),
        ({"optim": {"mixed_precision": True}}, lambda c: c.optim.precision, "bf16"),
        ({"optim": {"mixed_precision": False}}, lambda c: c.optim.precision, "tf32"),  # PyTorch's default
        ({"augment": {"plain": "centre"}}, lambda c: c.augment.plain, "center"),
        ({"augment": {"plain": "whole"}}, lambda c: c.augment.plain, "whole"),
        (selflabel_settings(unsure="chances"), lambda c: c.selflabel.uncertain, "probabilities"),
        (selflabel_settings(unsure="nothing"), lambda c: c.selflabel.uncertain, "nothing"),
        (selflabel_settings(uncertain="chances"), lambda c: c.selflabel.uncertain, "probabilities"),
        (selflabel_settings(), lambda c: c.method, "selflabel"),
        ({"selflabel": None}, lambda c: c.method, "secu"),
    ],
)
def test_old_spellings_are_still_read(old, read, expected):
    config = resolve(old)
    assert read(config) == expected
    assert resolve(config.model_dump(mode="json")) == config


def test_reading_old_spellings_changes_no_argument():
    old = {"data": {"name": "digits"}, "augment": {"grey_prob": 0.1, "plain": "centre"}}
    resolve(old)
    assert old == {"data": {"name": "digits"}, "augment": {"grey_prob": 0.1, "plain": "centre"}}


def test_nothing_is_written_in_an_old_spelling():
    settings = load_config("digits").model_dump(mode="json")
    assert "name" not in settings["data"]
    assert "grey_prob" not in settings["augment"]


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("augment.grey_prob=0.5", lambda c: c.augment.gray_prob, 0.5),
        ("augment.gray_prob=0.5", lambda c: c.augment.gray_prob, 0.5),
        ("optim.mixed_precision=false", lambda c: c.optim.precision, "tf32"),
        ("optim.precision=fp16", lambda c: c.optim.precision, "fp16"),
        ("augment.plain=centre", lambda c: c.augment.plain, "center"),
        ("data.name=cifar10", lambda c: c.data.source, "dataset:cifar10"),
        ("data.source=dataset:cifar10", lambda c: c.data.source, "dataset:cifar10"),
    ],
)
@pytest.mark.parametrize(
    "recipe",
    [
        "data: {name: digits}\naugment: {grey_prob: 0.1, plain: whole}\noptim: {mixed_precision: true}\n",
        "data: {source: 'dataset:digits'}\naugment: {gray_prob: 0.1, plain: whole}\n",
    ],
    ids=["old recipe", "new recipe"],
)
def test_an_override_wins_whichever_spelling_it_and_the_recipe_use(tmp_path, recipe, override, read, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(recipe)
    assert read(load_config(str(path), [override])) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["augment.grey_prob=x"], "augment.gray_prob: 'x': "),
        (["augment.plain=middle"], "augment.plain: 'middle': input should be 'center' or 'whole'"),
        (["data.name=[a]"], "data.name: unknown setting; "),
        (["augment=3"], "augment: 3: input should be augment.SETTING=VALUE"),
    ],
)
def test_a_mistake_in_an_old_spelling_is_one_line(overrides, message):
    assert complaint(*overrides).startswith(message)


# Defaults: those that the paper and its code state for every experiment


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda c: c.heads, (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)),
        (lambda c: (c.method, c.head, c.clusters), ("secu", 0, 10)),
        (lambda c: (c.data.source, c.data.train, c.data.test), (None, "train", "test")),
        (lambda c: (c.augment.crop_min, c.augment.size), (0.3, None)),
        (lambda c: c.augment.crop_aspect, 4 / 3),
        (lambda c: c.augment.jitter_prob, 0.8),
        (
            lambda c: (c.augment.brightness, c.augment.contrast, c.augment.saturation, c.augment.hue),
            (0.4, 0.4, 0.2, 0.1),
        ),
        (lambda c: c.augment.gray_prob, 0.2),
        (lambda c: c.augment.blur_prob, (1.0, 0.1)),
        (lambda c: c.augment.blur_radius, (0.1, 2.0)),
        (lambda c: c.augment.solarize_prob, (0.0, 0.2)),
        (lambda c: c.augment.flip_prob, 0.5),
        (lambda c: c.augment.affine, None),
        (lambda c: (c.encoder.backbone, c.encoder.stem), ("resnet18", "cifar")),
        (lambda c: (c.encoder.projection_layers, c.encoder.prediction_layers), (2, 0)),
        (lambda c: (c.encoder.hidden_dim, c.encoder.dim), (None, 128)),  # None: the backbone's 512
        (lambda c: c.loss.name, "secu"),
        (lambda c: (c.loss.temperature, c.loss.center_temperature), (0.05, 0.05)),
        (lambda c: c.loss.hard_label_weight, 0.2),  # τ of the paper
        (lambda c: (c.constraint.kind, c.constraint.score), ("size", "cosine")),
        (lambda c: (c.constraint.lower, c.constraint.upper, c.constraint.dual_lr), (0.9, None, 0.1)),
        (lambda c: c.constraint.alpha, None),  # 6N/50
        (lambda c: (c.centers.kind, c.centers.lr, c.centers.schedule), ("sgd", 1.2, "constant")),
        (lambda c: (c.optim.name, c.optim.lr, c.optim.momentum, c.optim.weight_decay), ("sgd", 0.2, 0.9, 1e-4)),
        (lambda c: c.optim.batch_size, 128),
        (lambda c: (c.optim.epochs, c.optim.initial_epochs, c.optim.warmup_epochs), (400, 1, 10)),
        (lambda c: c.optim.total_epochs, 401),
        (lambda c: (c.optim.precision, c.optim.average_from), ("bf16", None)),
    ],
)
def test_defaults_are_those_of_the_paper(read, expected):
    value = read(Config())
    assert value == expected
    if isinstance(value, float):
        assert math.isfinite(value)

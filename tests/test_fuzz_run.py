"""Damaged and hostile run folders: every reader works or raises one line, whatever the files contain."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from secu.apps import pipeline
from secu.apps.predict import read_limits
from secu.base.errors import UserError
from secu.cluster.tree import Tree
from secu.results.reading import read_assignments
from secu.results.results import find_results, write_report
from secu.settings import flatten, merge, nest
from secu.train.checkpoint import TREE, load_method, load_predictor
from secu.train.run import Run
from small_runs import CPU, config_of, digits, trained

CONFIG = config_of("answer=auto", "heads=[3,6]", "optim.epochs=2")
FEW = digits(60)
JSON = ("run.json", "metrics.jsonl", "outcome.json", "images.json")
TENSORS = ("model.safetensors", "state.safetensors")
FILES = ("config.yaml", "assignments.csv", "clusters.csv", *JSON, *TENSORS)
ODD: list[Any] = [
    None,
    True,
    -1,
    2**31,
    2**63,
    10**400,
    0.5,
    float("nan"),
    "",
    "x" * 5000,
    "1",
    [],
    [[]],
    {},
    {"a": {}},
]
LONGEST_MESSAGE = 2_000  # characters


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run with everything that a run can have, stopped before its last epoch but with the tables of the end."""
    path = tmp_path_factory.mktemp("fuzz") / "run"
    pipeline.run(CONFIG, FEW, path, device="cpu", report=False)
    left = {name: (path / name).read_bytes() for name in ("assignments.csv", "clusters.csv", "outcome.json")}
    pipeline.run(CONFIG, FEW, path, device="cpu", force=True, time_limit=1e-9)
    for name, content in left.items():
        (path / name).write_bytes(content)
    (path / "images.json").write_text(json.dumps({str(number): number for number in range(len(FEW))}))
    return path


@pytest.fixture
def damaged(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


def use(path: Path) -> list[str]:
    """Do with a run what the commands do; return the messages of those that refuse."""
    run = Run(path)
    readers = {
        "open": lambda: Run.open(path),
        "check": lambda: Run.check_free(path, force=True),
        "config": lambda: run.config(),
        "known": lambda: run.images(),
        "outcome": lambda: run.warnings(),
        "unfinished": lambda: run.unfinished(),
        "predict": lambda: load_predictor(run, CPU).predict(FEW),
        "limits": lambda: read_limits(path / "clusters.csv", run.config().clusters),
        "tables": lambda: read_assignments(path / "assignments.csv"),
        "resume": lambda: trained(path, CONFIG, FEW, resume=True),
    }
    messages = []
    for reader in readers.values():
        try:
            reader()
        except UserError as error:
            messages.append(str(error))
    for message in messages:
        assert "\n" not in message
        assert len(message) < LONGEST_MESSAGE
    return messages


def test_nothing_is_refused_without_damage(damaged):
    assert use(damaged) == []


@st.composite
def mutations(draw: st.DrawFn) -> tuple[str, int, int, bytes]:
    """Which file, where (in thousandths of it), how many bytes are cut out, and what is put there."""
    return (
        draw(st.sampled_from(FILES)),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([0, 1, 8, 10**9])),
        draw(st.sampled_from([b"", b"\x00", b"\xff", b"{", b'"', b",", b"\n", b"[" * 100_000, b"9" * 5000, b": &a"])),
    )


@settings(max_examples=120)
@given(mutation=mutations())
def test_bytes_that_are_cut_out_or_put_in(stopped, tmp_path_factory, mutation):
    name, where, cut, put = mutation
    path = shutil.copytree(stopped, tmp_path_factory.mktemp("bytes") / "run")
    content = (path / name).read_bytes()
    start = len(content) * where // 1000
    (path / name).write_bytes(content[:start] + put + content[start + cut :])
    use(path)
    shutil.rmtree(path)


@settings(max_examples=70)
@given(name=st.sampled_from(JSON), number=st.integers(0, 30), odd=st.sampled_from(ODD), inner=st.booleans())
def test_values_of_other_types_in_json(stopped, tmp_path_factory, name, number, odd, inner):
    path = shutil.copytree(stopped, tmp_path_factory.mktemp("json") / "run")
    lines = (path / name).read_text().splitlines() if name.endswith("l") else [(path / name).read_text()]
    content = json.loads(lines[0])
    place = content
    key = list(content)[number % len(content)]
    if inner and isinstance(content[key], dict) and content[key]:
        place = content[key]
        key = list(place)[number % len(place)]
    place[key] = odd
    (path / name).write_text("\n".join([json.dumps(content), *lines[1:]]) + "\n")
    use(path)
    shutil.rmtree(path)


@settings(max_examples=70)
@given(number=st.integers(0, 200), odd=st.sampled_from(ODD))
def test_other_settings_in_the_config(stopped, tmp_path_factory, number, odd):
    path = shutil.copytree(stopped, tmp_path_factory.mktemp("config") / "run")
    content = yaml.safe_load((path / "config.yaml").read_text())
    keys = list(flatten(content))
    changed = merge(content, nest(keys[number % len(keys)], odd))
    (path / "config.yaml").write_text(yaml.safe_dump(changed))
    use(path)
    shutil.rmtree(path)


CHANGES = {
    "removed": lambda tensor: None,
    "scalar": lambda tensor: tensor.flatten()[0].clone(),
    "one column": lambda tensor: tensor[..., :1].clone() if tensor.dim() else tensor,
    "transposed": lambda tensor: tensor.T.contiguous() if tensor.dim() == 2 else tensor.flatten(),
    "empty": lambda tensor: tensor[:0].clone() if tensor.dim() else tensor.expand(2).contiguous(),
    "halves": lambda tensor: tensor.half(),
    "doubles": lambda tensor: tensor.double(),
    "NaN": lambda tensor: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor + 1,
    "infinite": lambda tensor: torch.full_like(tensor, float("inf")) if tensor.is_floating_point() else tensor - 2,
    "huge": lambda tensor: torch.full_like(tensor, 100 if tensor.dtype == torch.uint8 else 2**62),
    "negative": lambda tensor: torch.full_like(tensor, 0 if tensor.dtype == torch.uint8 else -7),
}


def put_tensors(path: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Write a file of tensors as its owner would: with the metadata it had, and its checksum."""
    header = (path / name).read_bytes()
    length = int.from_bytes(header[:8], "little")
    metadata = json.loads(header[8 : 8 + length]).get("__metadata__")
    save_file(tensors, path / name, metadata)
    record = json.loads((path / "run.json").read_text())
    record["model_sha256"] = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    (path / "run.json").write_text(json.dumps(record))


@settings(max_examples=90)
@given(name=st.sampled_from(TENSORS), number=st.integers(0, 100), change=st.sampled_from(sorted(CHANGES)))
def test_other_tensors(stopped, tmp_path_factory, name, number, change):
    path = shutil.copytree(stopped, tmp_path_factory.mktemp("tensors") / "run")
    tensors = load_file(path / name)
    key = sorted(tensors)[number % len(tensors)]
    changed = CHANGES[change](tensors.pop(key))
    put_tensors(path, name, tensors if changed is None else tensors | {key: changed})
    use(path)
    shutil.rmtree(path)


@pytest.mark.parametrize("change", ["removed", "scalar", "one column", "empty", "halves", "NaN", "infinite"])
def test_wrong_centers_are_never_used(damaged, change):
    """Copying with broadcasting would let all of these predict one cluster for everything."""
    tensors = load_file(damaged / "model.safetensors")
    changed = CHANGES[change](tensors.pop("clustering.centers.weight"))
    put_tensors(
        damaged, "model.safetensors", tensors if changed is None else tensors | {"clustering.centers.weight": changed}
    )
    with pytest.raises(UserError, match=r"does not match its data and config|contains NaN or infinite values"):
        load_predictor(Run(damaged), CPU)


@pytest.mark.parametrize("value", [-2, 3, 2**62])
def test_labels_out_of_range_are_never_used(damaged, value):
    tensors = load_file(damaged / "state.safetensors")
    tensors["tensors.clustering.labels"][7, 0] = value
    put_tensors(damaged, "state.safetensors", tensors)
    with pytest.raises(UserError, match=r"is damaged: clustering\.labels has values out of range"):
        trained(damaged, CONFIG, FEW, resume=True)


@pytest.mark.parametrize("key", TREE)
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_damaged_tree_is_never_used(damaged, key, change):
    tree = Tree(torch.tensor([[0.0, 1, 0.5, 2], [3, 2, 0.7, 3]]).double(), torch.tensor([0, 3, 5]), torch.tensor(1))
    tensors = load_file(damaged / "model.safetensors") | dict(zip(TREE, tree, strict=True))
    put_tensors(damaged, "model.safetensors", tensors)
    assert load_method(Run(damaged), CPU).clustering.tree is not None
    before = tensors.pop(key)
    changed = CHANGES[change](before)
    put_tensors(damaged, "model.safetensors", tensors if changed is None else tensors | {key: changed})
    if changed is not None and (changed.dtype, changed.tolist()) == (before.dtype, before.tolist()):
        return  # not damaged
    with pytest.raises(UserError, match=r"tree of clusters in .* is damaged|contains NaN or infinite values"):
        load_method(Run(damaged), CPU)


@pytest.mark.usefixtures("quick_map")
@pytest.mark.parametrize("key", ["device", "engine", "versions", "seed"])
def test_a_report_needs_its_facts(damaged, key):
    record = json.loads((damaged / "run.json").read_text())
    del record[key]
    (damaged / "run.json").write_text(json.dumps(record))
    run = Run(damaged)
    with pytest.raises(UserError, match=rf"run.json is damaged: it has no {key}"):
        write_report(run, find_results(run, load_predictor(run, CPU), FEW))

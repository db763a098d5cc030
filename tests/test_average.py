"""The average of encoder and centers over the last epochs, against a slow mean of copies."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from secu.methods import Method
from secu.methods.average import move_towards
from secu.train.checkpoint import load_predictor
from secu.train.session import Session
from small_runs import CPU, config_of, digits, records, trained

AVERAGED = ("optim.epochs=5", "optim.average_from=0.5")  # 6 epochs, of which the last three count
KINDS = {"sgd": (), "closed-form": ("centers.kind=closed_form",), "settling": ("centers.schedule=settling",)}


@pytest.fixture
def ends(monkeypatch) -> list[dict[str, Tensor]]:
    """Return a list of the states at the ends of epochs, before the average replaces the last one."""
    states = []
    end_epoch = Method.end_epoch

    def spy(self: Method, done: float) -> None:
        states.append(deepcopy(self.state_dict()))
        end_epoch(self, done)

    monkeypatch.setattr(Method, "end_epoch", spy)
    return states


def train(path, *overrides: str, **options) -> Session:
    return trained(path, config_of(*overrides), digits(100), test=digits(), **options)


@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS.keys())
def test_the_model_at_the_end_is_the_mean_over_the_last_epochs(tmp_path, ends, overrides):
    session = train(tmp_path / "run", *AVERAGED, *overrides)
    model = session.run.load_model()
    last = [state for number, state in enumerate(ends, 1) if number / 6 > 0.5]
    assert len(last) == 3
    names = [name for name in model if name.startswith("encoder.")]
    assert any("running_var" in name for name in names)
    for name in names:
        mean = torch.stack([state[name].double() for state in last]).mean(0)
        torch.testing.assert_close(model[name].double(), mean, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(model[name], last[-1][name]) for name in names)
    centers = "clustering.centers.weight"
    mean = torch.stack([F.normalize(state[centers].double(), dim=-1) for state in last]).mean(0)
    torch.testing.assert_close(F.normalize(model[centers].double(), dim=-1), F.normalize(mean, dim=-1))
    assert int(session.run.load_state()["tensors"]["epoch_average.count"]) == 3


def test_the_mean_is_what_is_scored_at_the_end_and_loaded_from_the_run(tmp_path):
    session = train(tmp_path / "run", *AVERAGED)
    found = load_predictor(session.run, CPU).predict(digits())
    again = session.method.predictor().predict(digits())
    assert torch.equal(found.cluster, again.cluster)
    assert session.run.metrics()[-1]["acc"] == session.scores_on(digits())["acc"]


@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS.keys())
def test_averaging_changes_nothing_before_the_end(tmp_path, overrides):
    every = ("evaluate_every=1", *overrides)
    averaged = records(train(tmp_path / "averaged", *AVERAGED, *every).run)
    plain = records(train(tmp_path / "plain", AVERAGED[0], *every).run)
    assert averaged[:-1] == plain[:-1]
    for name in ("loss", "largest", "changed"):
        assert averaged[-1][name] == plain[-1][name]


def test_without_the_setting_nothing_is_kept(tmp_path):
    method = train(tmp_path / "run").method
    assert method.epoch_average is None
    assert not any(name.startswith("epoch_average") for name in method.state_dict())


def test_the_copy_is_not_trained(tmp_path):
    method = train(tmp_path / "run", *AVERAGED).method
    assert not any(weight.requires_grad for weight in method.epoch_average.parameters())
    trained_ones = {id(weight) for group in method.trained_parameters() for weight in group}
    assert not trained_ones & {id(weight) for weight in method.epoch_average.parameters()}


def test_means_move_by_the_weight_and_counters_are_copied():
    means = [torch.tensor([0.0, 4.0]), torch.tensor(3), torch.tensor([1.0])]
    move_towards(means, [torch.tensor([4.0, 0.0]), torch.tensor(9), torch.tensor([2.0])], 0.25)
    assert [mean.tolist() for mean in means] == [[1.0, 3.0], 9, [1.25]]

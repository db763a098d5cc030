"""Views of feature vectors: statistics and components against numpy in double precision, and dropout from its draws."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secu.config import FeaturesConfig
from secu.views import features as module
from secu.views.features import FeatureViews


def vectors(count: int = 50, features: int = 6, seed: int = 0) -> Tensor:
    """Return features of very different means and scales."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.arange(-2, features - 2)
    return torch.randn(count, features, generator=generator) * scale + scale * 3


def make(features: int = 6, dropout: float = 0.0, components: int = 256) -> FeatureViews:
    return FeatureViews(features, FeaturesConfig(components=components, dropout=dropout))


def learned(vectors_ND: Tensor, dropout: float = 0.0, components: int = 256) -> FeatureViews:
    views = make(vectors_ND.shape[1], dropout, components)
    views.learn(vectors_ND)
    return views


@pytest.mark.parametrize("part", [1, 7, 50, 2**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_mean_and_standard_deviation_are_those_of_numpy(part, dtype, monkeypatch):
    monkeypatch.setattr(module, "PART", part)
    vectors_ND = vectors().to(dtype)
    exact = vectors_ND.numpy().astype(np.float64)
    views = learned(vectors_ND)
    np.testing.assert_allclose(views.mean.numpy(), exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(views.std.numpy(), exact.std(0), rtol=1e-6)
    assert views.mean.dtype == views.std.dtype == torch.float32


def test_a_small_spread_around_a_large_mean_is_exact():
    """Sums in single precision would lose it."""
    exact = np.random.default_rng(0).normal(1000, 0.01, (5000, 2)).astype(np.float32)
    views = learned(torch.from_numpy(exact))
    np.testing.assert_allclose(views.std.numpy(), exact.astype(np.float64).std(0), rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.3, 1e-3, 12345.678, 1e6])
def test_a_constant_feature_is_only_shifted(value):
    vectors_ND = vectors(1000)
    vectors_ND[:, 2] = value
    views = learned(vectors_ND)
    assert views.std[2] == 1
    plain = views.plain(vectors_ND)
    assert torch.equal(plain[:, 2], torch.zeros(1000))
    assert views.plain(torch.full((1, 6), value + 1.0))[0, 2] == pytest.approx(1, abs=0.1)
    assert torch.isfinite(plain).all()


def test_one_vector_becomes_zero():
    vectors_ND = vectors(1)
    assert torch.equal(learned(vectors_ND).plain(vectors_ND), torch.zeros(1, 6))


def test_vectors_of_a_run_have_mean_zero_and_deviation_one():
    vectors_ND = vectors(400)
    plain = learned(vectors_ND).plain(vectors_ND)
    assert plain.dtype == torch.float32
    assert torch.allclose(plain.mean(0), torch.zeros(6), atol=1e-5)
    assert torch.allclose(plain.std(0, correction=0), torch.ones(6), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_vectors_are_standardized_like_those_of_the_run(dtype):
    seen = vectors(80)
    exact = seen.double().numpy()
    new = vectors(5, seed=1).to(dtype)
    expected = (new.double().numpy() - exact.mean(0)) / exact.std(0)
    plain = learned(seen, dropout=0.5).plain(new)
    assert plain.dtype == torch.float32
    np.testing.assert_allclose(plain.numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(learned(seen).plain(torch.stack([new, new])).numpy(), [expected, expected], atol=1e-4)


def test_before_learning_nothing_changes():
    vectors_ND = vectors()
    assert torch.equal(make(dropout=0.1).plain(vectors_ND), vectors_ND)


def test_statistics_are_part_of_a_checkpoint():
    views = learned(vectors())
    other = make()
    other.load_state_dict(views.state_dict())
    assert torch.equal(other.mean, views.mean)
    assert torch.equal(other.std, views.std)
    assert set(views.state_dict()) == {"mean", "std"}


def slow_views(plain_2BD: Tensor, keep: Tensor, dropout: float) -> Tensor:
    """Set features to zero one by one; scale up the others."""
    expected = torch.zeros_like(plain_2BD)
    for view in range(2):
        for i in range(plain_2BD.shape[1]):
            for feature in range(plain_2BD.shape[2]):
                if not keep[view, i, feature] < dropout:
                    expected[view, i, feature] = plain_2BD[view, i, feature] / (1 - dropout)
    return expected


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_two_views_of_the_same_vector(dropout):
    plain_BD = vectors(8)
    views = make(dropout=dropout)
    draws = views.draw(8, torch.Generator().manual_seed(0))
    assert draws["keep"].shape == (2, 8, 6)
    rendered = views.render(plain_BD, draws)
    assert torch.allclose(rendered, slow_views(torch.stack([plain_BD, plain_BD]), draws["keep"], dropout), rtol=1e-6)
    assert not torch.equal(rendered[0], rendered[1])
    assert rendered.dtype == torch.float32


def test_views_of_pairs():
    pairs = torch.stack([vectors(8), vectors(8, seed=1)])
    views = make(dropout=0.3)
    draws = views.draw(8, torch.Generator().manual_seed(0))
    assert torch.allclose(views.render(pairs, draws), slow_views(pairs, draws["keep"], 0.3), rtol=1e-6)


def test_views_of_plain_vectors_are_not_standardized_again():
    seen = vectors(50)
    views = learned(seen, 0.5)
    rendered = views.render(views.plain(seen), {"keep": torch.ones(2, 50, 6)})
    assert torch.allclose(rendered, 2 * views.plain(seen).expand(2, 50, 6))


def test_as_many_features_as_asked_for_are_zero_and_the_mean_stays():
    views = make(100, 0.2)
    rendered = views.render(torch.ones(500, 100), views.draw(500, torch.Generator().manual_seed(0)))
    zeros = float((rendered == 0).float().mean())
    assert abs(zeros - 0.2) < 4 * (0.2 * 0.8 / rendered.numel()) ** 0.5
    assert abs(float(rendered.mean()) - 1) < 0.01
    assert rendered.unique().tolist() == pytest.approx([0, 1.25])


def test_without_dropout_nothing_is_drawn_and_both_views_are_the_vector():
    views = learned(vectors(50))
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    draws = views.draw(8, generator)
    assert draws == {}
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(views.render(vectors(8), draws), torch.stack([vectors(8), vectors(8)]))
    pairs = torch.stack([vectors(8), vectors(8, seed=1)])
    assert torch.equal(views.render(pairs, draws), pairs)


def test_draws_are_a_function_of_the_generator():
    views = make(4, 0.5)
    one, same, other = (views.draw(3, torch.Generator().manual_seed(seed))["keep"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0 <= float(one.min()) <= float(one.max()) < 1


def test_inputs_stay_as_they_are():
    vectors_BD = vectors(8)
    before = vectors_BD.clone()
    views = learned(vectors_BD, 0.5)
    views.render(vectors_BD, views.draw(8, torch.Generator().manual_seed(0)))
    assert torch.equal(vectors_BD, before)


# Principal components


def correlated(count: int = 300, features: int = 10, seed: int = 0) -> Tensor:
    """Return features that depend on each other, with clearly different variances along their components."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randn(count, features, generator=generator) * 2.0 ** -torch.arange(features)
    return sources @ torch.randn(features, features, generator=generator) + 5


def slow_components(vectors_ND: Tensor, count: int) -> np.ndarray:
    """Return the standardized vectors along their singular vectors; signs are arbitrary."""
    exact = vectors_ND.numpy().astype(np.float64)
    standard = (exact - exact.mean(0)) / exact.std(0)
    _, _, directions = np.linalg.svd(standard, full_matrices=False)
    return standard @ directions[:count].T


@pytest.mark.parametrize("part", [7, 100, 2**14])
@pytest.mark.parametrize("count", [2, 5, 9])
def test_long_vectors_are_reduced_to_their_principal_components(count, part, monkeypatch):
    monkeypatch.setattr(module, "PART", part)
    vectors_ND = correlated()
    plain = learned(vectors_ND, components=count).plain(vectors_ND)
    assert plain.shape == (300, count)
    assert plain.dtype == torch.float32
    expected = slow_components(vectors_ND, count)
    np.testing.assert_allclose(np.abs(plain.numpy()), np.abs(expected), atol=1e-3)
    assert (plain.var(0).diff() < 0).all()


@pytest.mark.parametrize("components", [10, 11, 256])
def test_vectors_that_are_not_longer_stay_whole(components):
    vectors_ND = correlated()
    views = learned(vectors_ND, components=components)
    exact = vectors_ND.double().numpy()
    expected = (exact - exact.mean(0)) / exact.std(0)
    np.testing.assert_allclose(views.plain(vectors_ND).numpy(), expected, atol=1e-4)
    assert views.outputs == 10
    assert views.basis is None


def test_components_are_orthonormal_and_their_signs_are_fixed():
    basis = learned(correlated(), components=4).basis
    assert torch.allclose(basis.T @ basis, torch.eye(4), atol=1e-5)
    for column in basis.T:
        assert column[column.abs().argmax()] > 0


def test_cosines_survive_where_few_directions_matter():
    flat = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    vectors_ND = flat @ torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    whole = nn.functional.normalize(learned(vectors_ND).plain(vectors_ND))
    reduced = nn.functional.normalize(learned(vectors_ND, components=3).plain(vectors_ND))
    assert torch.allclose(reduced @ reduced.T, whole @ whole.T, atol=1e-4)


def test_fewer_vectors_than_components():
    vectors_ND = correlated(4)
    plain = learned(vectors_ND, components=8).plain(vectors_ND)
    assert plain.shape == (4, 8)
    assert torch.isfinite(plain).all()
    assert plain[:, 3:].abs().max() < 1e-3  # four points span three directions


def test_constant_features_do_not_matter_for_the_components():
    vectors_ND = correlated()
    padded = torch.cat([torch.full((300, 2), 7.0), vectors_ND], 1)
    torch.testing.assert_close(
        learned(padded, components=4).plain(padded), learned(vectors_ND, components=4).plain(vectors_ND)
    )


def test_dropout_is_of_components():
    views = learned(correlated(), 0.5, components=4)
    plain = views.plain(correlated(8, seed=1))
    draws = views.draw(8, torch.Generator().manual_seed(0))
    assert draws["keep"].shape == (2, 8, 4)
    expected = slow_views(torch.stack([plain, plain]), draws["keep"], 0.5)
    assert torch.allclose(views.render(plain, draws), expected)


def test_the_components_are_part_of_a_checkpoint():
    views = learned(correlated(), components=4)
    other = make(10, components=4)
    other.load_state_dict(views.state_dict())
    assert torch.equal(other.plain(correlated(seed=1)), views.plain(correlated(seed=1)))
    assert set(views.state_dict()) == {"mean", "std", "basis"}

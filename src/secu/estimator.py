"""The clustering as a scikit-learn estimator: ``SeCu(n_clusters=10).fit(X)``.

What a fitted estimator knows is a run folder, held in memory: saving, loading and pickling move the same files.
"""

import csv
import io
import json
import math
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from secu.checkpoint import Trained, load_trained
from secu.config import Config
from secu.console import DecodeProgress, ProgressListener
from secu.data.own import ArraySource, Source, printable
from secu.data.own.memory import open_images
from secu.engine import choose_engine
from secu.errors import UserError
from secu.evaluate import Predictions, embed, predict
from secu.files import aside, is_taken, write_json
from secu.fit import Request, decode_all, nested, plan_for
from secu.fit import fit as run_fit
from secu.health import warnings_of
from secu.metrics import accuracy
from secu.run import Run
from secu.second_stage import second_config
from secu.selflabel import self_label as teach_itself
from secu.settings import flatten, merge
from secu.tables import OURS
from secu.train import choose_device

FILES = ("run.json", "metrics.jsonl", "model.safetensors", "assignments.csv", "clusters.csv")  # besides the config
PathLike = str | os.PathLike[str]


class SeCu(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator):  # type: ignore[misc]
    """Clusters images without labels: stable cluster discrimination.

    What is not asked for follows from the number, size and colour of the images and from the device, as it does for
    ``secu fit``; the same settings give the same clusters. ``X`` is everywhere an array or tensor (N, H, W),
    (N, H, W, 3), (N, 3, H, W) or (N, H·H) of values from 0 to 1, 16 or 255, a list of paths or of PIL images, or the
    path of a folder, a glob, an array file, a manifest or an archive. Images may be of any size.

    Args:
        n_clusters: How many groups to find.
        balance: How equal the groups should be, from 0 (any size) to 1 (equally large).
        random_state: Seed of all random numbers; None: another one each time.
        epochs: How often training sees every image; None: by rule.
        self_label: Let the model teach itself afterwards, as ``secu selflabel`` does; instead of True the settings of
            that second training, such as ``{"optim.epochs": 50, "selflabel.confidence": 0.8}``.
        device: auto, cuda, mps or cpu.
        settings: Any other setting, such as ``{"optim.lr": 0.1}``.
        out: A new folder for the whole run: checkpoints while it trains, a report at the end; None: nothing is left.
            With ``self_label`` the run before lies beside it, its name followed by -first.
        allow_bad: Go on when more than 5% of a folder's images cannot be read.
        callback: Called after each epoch with its record: epoch, loss, largest, smallest, changed, seconds, and so on.
        verbose: 0 is silent; 1 shows bars and warnings on stderr.

    Attributes:
        labels_: The cluster of each image (N,). Images of a folder that cannot be read are left out, as ``ids_`` shows.
        ids_: What each image is called (N,): its path, or its number.
        cluster_centers_: The centers among the embeddings, of length 1 (n_clusters, dim).
        n_features_in_: How many numbers an image has in the array; without one, as many as the encoder sees.
        config_: All settings, as resolved.
        history_: The record of each epoch.
        warnings_: What to know before using the clusters, in plain words; empty if all is well.
    """

    def __init__(
        self,
        n_clusters: int = 10,
        *,
        balance: float = 0.9,
        random_state: int | np.random.RandomState | None = 0,
        epochs: int | None = None,
        self_label: bool | Mapping[str, Any] = False,
        device: str = "auto",
        settings: Mapping[str, Any] | None = None,
        out: PathLike | None = None,
        allow_bad: bool = False,
        callback: Callable[[dict[str, Any]], object] | None = None,
        verbose: int = 0,
    ) -> None:
        self.n_clusters, self.balance, self.random_state, self.epochs = n_clusters, balance, random_state, epochs
        self.self_label, self.device, self.settings, self.out, self.allow_bad = (
            self_label,
            device,
            settings,
            out,
            allow_bad,
        )
        self.callback, self.verbose = callback, verbose

    def fit(self, X: Any, y: object = None) -> Self:
        """Cluster the images; ``y`` is not read. What is wrong with X or a parameter is a ValueError of one line."""
        source = open_images(X)
        request, second, report = self._request(source), self._second_stage(), self.out is not None
        # A console that nobody reads, not a quiet one: that would swallow what the user's callback prints.
        console = Console(stderr=True) if self.verbose else Console(file=io.StringIO(), force_terminal=False)
        with TemporaryDirectory(prefix="secu-") as folder, DecodeProgress(console) as decoding:
            last = Path(self.out or Path(folder) / "run")
            first = last.with_name(f"{last.name}-first") if second is not None else last
            for place in {first, last}:
                if is_taken(place):
                    raise UserError(f"out: {place} exists; name a new folder")
            if second is not None:  # what is wrong with it shall not be found after the first training
                opened, plan = plan_for(request)
                asked = second_config(plan.config, first, len(opened), second)
                choose_engine(asked.engine, choose_device(self.device))
            with Told(console) as told:
                told.callback = self.callback
                run, _, results = run_fit(request, first, listener=told, progress=decoding, report=report)
            if second is not None and results is not None:
                with Told(console) as told:
                    told.callback = self.callback
                    options: dict[str, Any] = {"device": self.device, "listener": told, "report": report}
                    run, _, _ = teach_itself(run, last, second, images=results.images, **options)
            self._annotate(run, source)
            self._take(run)
        for warning in self.warnings_:
            console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
        return self

    def predict(self, X: Any) -> NDArray[np.int64]:
        """Return the cluster of each image (N,); one that cannot be read is an error."""
        embeddings_ND, centers_KD = self._embed(X)
        return predict(embeddings_ND, centers_KD, self.config_.loss.prediction_temperature).cluster.numpy()

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Return how likely each image is in each cluster (N, n_clusters)."""
        embeddings_ND, centers_KD = self._embed(X)
        return torch.softmax(embeddings_ND @ centers_KD.T / self.config_.loss.prediction_temperature, -1).numpy()

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return the embedding of each image, of length 1 (N, dim)."""
        return self._embed(X)[0].numpy()

    def score(self, X: Any, y: Any) -> float:
        """Return ACC: the share of images that the best one-to-one matching of clusters to true classes gets right."""
        found = self.predict(X)
        if np.shape(y) != found.shape:
            raise UserError(f"y: true labels of shape {np.shape(y)} for {len(found)} images; give one an image")
        return accuracy(np.unique(np.asarray(y), return_inverse=True)[1], found)

    def save(self, path: PathLike, *, force: bool = False) -> None:
        """Write a run folder for ``SeCu.load``, ``secu predict`` and ``secu export``; ``force`` replaces an old run."""
        check_is_fitted(self)
        path = Path(path)
        Run.check_free(path, force=force)
        with aside(path) as folder:  # an old run stays until the new one is whole
            for name, content in self._files.items():
                (folder / name).write_bytes(content)
            run = Run.create(path, self.config_, force=force)
            for name in self._files:
                (folder / name).replace(run.path / name)

    @classmethod
    def load(cls, path: PathLike, *, device: str = "auto") -> Self:
        """Return what was saved in a run folder, or what ``secu fit`` left in one; nothing is unpickled."""
        estimator = cls(device=device)
        estimator._take(Run.open(Path(path)))
        config, note = estimator.config_, estimator._note
        asked = {name: note.get(name) for name in ("epochs", "settings")}
        asked |= {"balance": note.get("balance", config.constraint.lower), "self_label": note.get("self_label", False)}
        estimator.set_params(n_clusters=config.heads[0], random_state=config.seed, **asked)
        return estimator

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = tags.input_tags.positive_only = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | ({"_models": {}} if "_models" in state else {})  # their device may be missing elsewhere

    @property
    def _n_features_out(self) -> int:
        return int(self.cluster_centers_.shape[1])

    def _request(self, source: Source) -> Request:
        """Return what ``secu fit`` would ask for."""
        state = self.random_state
        seed = state if isinstance(state, int | np.integer) else check_random_state(state).randint(2**31)
        settings = merge({"seed": int(seed)}, nested(self.settings or {}))
        if settings.pop("selflabel", None) is not None and self._second_stage() is None:
            raise UserError("settings: selflabel is only read with self_label=True")
        if self.epochs is not None:
            settings = merge(settings, {"optim": {"epochs": _number("epochs", self.epochs, operator.index)}})
        numbers = _number("n_clusters", self.n_clusters, operator.index), _number("balance", self.balance, float)
        return Request(source, *numbers, None, settings, self.device, self.allow_bad)

    def _second_stage(self) -> dict[str, Any] | None:
        """Return what is asked of self-labeling; None if it is not wanted."""
        wanted = self.self_label
        if not isinstance(wanted, bool | np.bool_ | Mapping):
            raise UserError(f"self_label: {wanted!r} must be True, False or the settings of the second training")
        if not isinstance(wanted, Mapping) and not wanted:
            return None
        asked = nested(wanted) if isinstance(wanted, Mapping) else {}
        return merge({"selflabel": nested(self.settings or {}).get("selflabel", {})}, asked)

    def _annotate(self, run: Run, source: Source) -> None:
        """Add to run.json what only the estimator knows."""
        settings = flatten(nested(self.settings or {})) or None
        note: dict[str, Any] = {"epochs": self.epochs and int(self.epochs), "settings": settings}
        taught = flatten(nested(self.self_label)) if isinstance(self.self_label, Mapping) else bool(self.self_label)
        note |= {"balance": float(self.balance), "self_label": taught}
        if isinstance(source, ArraySource):
            note["n_features_in"] = math.prod(source.array.shape[1:])
        path = run.path / "run.json"
        write_json(path, json.loads(path.read_bytes()) | {"estimator": note})

    def _take(self, run: Run) -> None:
        """Become what a finished run knows."""
        config, device = run.config(), choose_device(self.device)
        model = load_trained(run, _shape(config), device)
        try:
            noted = [name for name in ("images.json", "selflabel.json") if (run.path / name).is_file()]
            files = {name: (run.path / name).read_bytes() for name in (*FILES, *noted)}
            note = dict(json.loads(files["run.json"]).get("estimator", {}))
            rows = list(csv.DictReader(io.StringIO(files["assignments.csv"].decode(), newline="")))
            columns = [[kind(row[name]) for row in rows] for name, kind in OURS.items() if kind in (int, float)]
        except FileNotFoundError as error:
            raise UserError(f"run: no {error.filename}; was it stopped early?") from None
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"run: run.json or assignments.csv in {run.path} is not one of ours") from None
        found = Predictions(*map(torch.tensor, columns))
        self.labels_, self.ids_ = found.cluster.numpy(), np.array([row["id"] for row in rows])
        self.cluster_centers_ = model.clustering.head().cpu().numpy()
        self.n_features_in_ = note.get("n_features_in", math.prod(_shape(config)))
        self.config_, self.history_ = config, run.metrics()
        self.warnings_ = run.warnings() + warnings_of(self.history_, found, config)
        self._note, self._files, self._models = note, files, {device: model}

    def _model(self) -> Trained:
        """Return the model on the device that is wanted now; a pickle brings none along."""
        device = choose_device(self.device)
        if device not in self._models:
            with TemporaryDirectory(prefix="secu-") as folder:
                self.save(folder)
                self._models[device] = load_trained(Run.open(Path(folder)), _shape(self.config_), device)
        return self._models[device]

    def _embed(self, X: Any) -> tuple[Tensor, Tensor]:
        """Return the embeddings of images (N, D) and the centers (K, D)."""
        check_is_fitted(self)
        source = open_images(X)
        source.require_images()
        for name, reason in (*source.skipped, *source.repeated):
            raise UserError(f"X: {printable(name)}: {reason}; each row needs an answer (secu predict leaves it out)")
        if isinstance(source, ArraySource):
            given, wanted = math.prod(source.array.shape[1:]), self.n_features_in_
            if not source.place and np.ndim(X) == 2 and given != wanted:
                raise UserError(f"X has {given} features, but SeCu is expecting {wanted} features as input")
        source.read_new_as(self.config_.data.values)
        model, (channels, size, _) = self._model(), _shape(self.config_)
        embeddings_ND = embed(model.encoder, model.augmentation, decode_all(source, size, channels))
        return embeddings_ND.cpu(), model.clustering.head().cpu()


class Told(ProgressListener):
    """Shows a run, and tells the user's function of each epoch."""

    callback: Callable[[dict[str, Any]], object] | None = None

    def epoch_ended(self, record: dict[str, Any]) -> None:
        """Show the epoch, and hand over a copy of its record."""
        super().epoch_ended(record)
        if self.callback is not None:
            self.callback(dict(record))


def _number(name: str, value: Any, kind: Callable[[Any], Any]) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise UserError(f"{name}: {value!r} must be a {'whole ' * (kind is operator.index)}number") from None


def _shape(config: Config) -> tuple[int, int, int]:
    shape = config.data.shape
    if shape is None:
        raise UserError(f"run: it was trained on {config.data.name}; only runs of SeCu.fit and secu fit can be loaded")
    return shape

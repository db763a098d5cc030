"""SeCu as a scikit-learn estimator: ``SeCu(n_clusters=10).fit(X)``.

The state of a fitted estimator is a run folder held in memory, so saving, loading and pickling use the same files.
"""

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import load
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from secu.apps.console import CallbackListener
from secu.apps.fit import FitRequest, fit, prepare
from secu.apps.images import load_inputs
from secu.apps.parameters import NOTED, check_parameters, check_path, check_whole, noted, request_of, second_stage
from secu.apps.pipeline import Options
from secu.apps.selflabel import second_config, self_label
from secu.base import processes
from secu.base.errors import UserError
from secu.base.files import is_taken, write_json
from secu.base.names import printable
from secu.cluster.metrics import accuracy
from secu.data import ArraySource, Images, Source, open_images, shape_of
from secu.methods.predictor import Predictions, Predictor
from secu.results.health import warnings_of
from secu.results.reading import read_assignments
from secu.train.checkpoint import method_of
from secu.train.device import choose_device
from secu.train.engine import choose_engine
from secu.train.place import MODEL, OUTCOMES, held
from secu.train.run import Run

FILES = ("run.json", "metrics.jsonl", MODEL, "assignments.csv", "clusters.csv")  # besides the config
OPTIONAL_FILES = ("images.json", *OUTCOMES)
PathLike = str | os.PathLike[str]


class SeCu(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator):  # type: ignore[misc]
    """Clusters images, or feature vectors, without labels: stable cluster discrimination.

    Settings that are not given are chosen from the number, size and color of the images and the device, as in
    ``secu fit``. The same settings give the same clusters. ``X`` is one of the following: an array or tensor of images
    of shape (N, H, W), (N, H, W, 3) or (N, 3, H, W) with values from 0 to 1, 16 or 255; a matrix (N, D) of feature
    vectors; a matrix (N, H·H) of uint8, which are gray squares; a list of paths or of PIL images; or the path of a
    folder, an array file, a manifest or an archive, or a glob pattern. Images may have any size.

    Args:
        n_clusters: Number of clusters; ``"auto"``, or a range such as ``"5..40"``, to choose it without labels.
        encoder: ``lite0`` or ``hf:NAME-OR-FOLDER`` to cluster the features of a pretrained network; ``scratch`` to
            train a network on these images alone; if None, it is chosen by rule.
        balance: Minimum size of a cluster during training, as a share of an equal size, from 0 to 1; if None, it is
            chosen by rule.
        random_state: Random seed; if None, a different one each time.
        epochs: Number of passes over the images; if None, it is chosen automatically.
        self_label: Whether to run self-labeling afterward, as ``secu selflabel`` does: True, or the settings of that
            second run, such as ``{"optim.epochs": 50, "selflabel.confidence": 0.8}``.
        device: auto, cuda, mps or cpu.
        settings: Any other settings, such as ``{"optim.lr": 0.1}``.
        out: A new folder for the run, with checkpoints during training and a report at the end; if None, nothing is
            written. With ``self_label`` the first run is written next to it, with ``-first`` appended to its name.
        allow_bad: Continue when more than 5% of a folder's images cannot be read.
        callback: Called after each epoch with its record: epoch, loss, largest, smallest, changed, seconds, and so on.
        verbose: 0 is silent; 1 shows progress bars and warnings on stderr.

    Attributes:
        labels_: The cluster of each image (N,). Unreadable images of a folder are left out; see ``ids_``.
        ids_: The name of each image (N,): its path or its index.
        cluster_centers_: Unit-length cluster centers in embedding space (n_clusters, dim).
        n_features_in_: Number of values per image in the array; for other inputs, the size of the encoder's input.
        config_: All resolved settings.
        history_: The record of each epoch.
        n_clusters_: Number of clusters.
        choice_: If the number was chosen, a dict with the ``recommended`` number, the plausible range from ``low`` to
            ``high``, the ``scores`` and the ``reasons``; otherwise None.
        hints_: If ``fit`` was given hints, a dict with the number of hinted ``images``, how many of these are in the
            cluster of their hint (``followed``), and the ``names`` of clusters by number; otherwise None.
        warnings_: Possible problems with the clusters; empty if there are none.
    """

    def __init__(
        self,
        n_clusters: int | str = 10,
        *,
        encoder: str | None = None,
        balance: float | None = None,
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
        self.n_clusters = n_clusters
        self.encoder = encoder
        self.balance = balance
        self.random_state = random_state
        self.epochs = epochs
        self.self_label = self_label
        self.device = device
        self.settings = settings
        self.out = out
        self.allow_bad = allow_bad
        self.callback = callback
        self.verbose = verbose

    def fit(self, X: Any, y: object = None, *, hints: Any = None) -> Self:
        """Cluster the images; ``y`` is ignored. An invalid X or parameter raises a ValueError.

        Args:
            X: The images or feature vectors.
            y: Not used.
            hints: What is known about some images: one name per image (N,), where None, NaN, "" and -1 mean unknown; a
                dict from ids to names; or the path of a table, as for ``secu fit --hints``.
        """
        check_parameters(self.get_params(deep=False))
        if processes.world() > 1:
            raise UserError("SeCu: trains in one process; several share a run with torchrun -m secu fit")
        source = open_images(X)
        second = second_stage(self.self_label, self.settings)
        prepared = prepare(replace(self._request(source), hints=hints))
        # Not Console(quiet=True), which would also silence anything the user's callback prints.
        console = Console(stderr=True) if self.verbose else Console(file=io.StringIO(), force_terminal=False)
        with TemporaryDirectory(prefix="secu-") as folder:
            last = Path(self.out or Path(folder) / "run")
            first = last if second is None else last.with_name(f"{last.name}-first")
            for place in {first, last}:
                if is_taken(place):
                    raise UserError(f"out: {place} already exists; choose a new folder")
            if second is not None:  # validate its settings before the first run
                asked = second_config(prepared.plan.config, first, len(source.ids), second)
                choose_engine(asked.engine, choose_device(self.device))
            with CallbackListener(console, self.callback) as listener:
                options: Options = {"device": self.device, "report": self.out is not None}
                finished = fit(prepared, first, listener=listener, **options)
                if second is not None and finished.results is not None:
                    images = finished.results.images
                    finished = self_label(finished.run, last, second, images=images, listener=listener, **options)
            self._annotate(finished.run, source)
            self._take(finished.run)
        return self

    def predict(self, X: Any, level: int | None = None) -> NDArray[np.int64]:
        """Return the cluster of each image (N,); raise if an image cannot be read.

        With a ``level``, return groups of the tree of clusters instead, as ``secu predict --level`` does.
        """
        images = self._images(X)
        return self._predictor(level).predict(images).cluster.numpy()

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Return the probability of each cluster for each image (N, n_clusters)."""
        images = self._images(X)
        predictor = self._predictor()
        return torch.softmax(predictor.cosines(images).cpu() / predictor.temperature, -1).numpy()

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return the unit-length embedding of each image (N, dim)."""
        images = self._images(X)
        return self._predictor().embed(images).cpu().numpy()

    def score(self, X: Any, y: Any) -> float:
        """Return the accuracy under the best one-to-one matching of clusters to true classes."""
        found = self.predict(X)
        if np.shape(y) != found.shape:
            raise UserError(f"y: expected one true label per image ({len(found)}), got shape {np.shape(y)}")
        try:
            truth = np.unique(np.asarray(y), return_inverse=True)[1]
        except TypeError:  # values that cannot be sorted, such as None
            raise UserError("y: true labels must be numbers or texts, all of the same kind") from None
        return accuracy(truth, found)

    def save(self, path: PathLike, *, force: bool = False) -> None:
        """Write a run folder for ``SeCu.load``, ``secu predict`` and ``secu export``; ``force`` replaces an old run."""
        check_is_fitted(self)
        path = check_path("path", path)
        Run.check_free(path, force=force)
        with held(path):
            run = Run.create(path, self.config_, force=force)
            for name, content in self._files.items():
                (run.folder / name).write_bytes(content)
            run.put_in_place()

    @classmethod
    def load(cls, path: PathLike, *, device: str = "auto") -> Self:
        """Load a run folder written by ``save`` or by any secu command; nothing is unpickled."""
        estimator = cls(device=device)
        estimator._take(Run.open(check_path("path", path)))
        config = estimator.config_
        parameters = {"n_clusters": config.clusters, "random_state": config.seed}
        parameters |= {name: estimator._note[name] for name in NOTED if name in estimator._note}
        return estimator.set_params(**parameters)  # type: ignore[no-any-return]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | ({"_predictors": {}} if "_predictors" in state else {})  # they may be on a GPU

    @property
    def _n_features_out(self) -> int:
        return int(self.cluster_centers_.shape[1])

    def _request(self, source: Source) -> FitRequest:
        return request_of(self.get_params(deep=False), source)

    def _annotate(self, run: Run, source: Source) -> None:
        """Add the estimator's parameters to run.json."""
        note = noted(self.get_params(deep=False))
        if isinstance(source, ArraySource):
            note["n_features_in"] = math.prod(source.array.shape[1:])
        path = run.path / "run.json"
        write_json(path, json.loads(path.read_bytes()) | {"estimator": note})

    def _take(self, run: Run) -> None:
        """Load the fitted state from a finished run."""
        config = run.config()
        run.load_model()  # raises with the path if the model is missing or damaged; _predictor uses the copy in memory
        try:
            optional = [name for name in OPTIONAL_FILES if (run.path / name).is_file()]
            files = {name: (run.path / name).read_bytes() for name in (*FILES, *optional)}
            note = dict(json.loads(files["run.json"]).get("estimator", {}))
        except FileNotFoundError as error:
            raise UserError(f"run: no {error.filename}; was it stopped early?") from None
        except (ValueError, AttributeError, TypeError):
            raise UserError(f"run: run.json in {run.path} was not written by secu") from None
        table = read_assignments(files["assignments.csv"], config.clusters)
        columns = ("cluster", "confidence", "second", "second_confidence", "cosine")
        found = Predictions(**{name: torch.tensor(table[name]) for name in columns})
        self._note = note
        self._files = files
        self._predictors: dict[torch.device, Predictor] = {}
        self.config_ = config
        self.history_ = run.metrics()
        self.labels_ = found.cluster.numpy()
        self.ids_ = np.array(table["id"])
        self.cluster_centers_ = self._predictor().centers.cpu().numpy()
        self.n_features_in_ = note.get("n_features_in", math.prod(shape_of(config.data)))
        self.n_clusters_ = config.clusters
        self.choice_ = run.outcome().get("number")
        self.hints_ = run.outcome().get("hints")
        self.warnings_ = run.warnings() + warnings_of(run.model_metrics(), found, config)

    def _predictor(self, level: int | None = None) -> Predictor:
        """Return the model on the current device; it is cached, but not pickled. With a ``level``, it is built anew."""
        check_is_fitted(self, "_files")
        device = choose_device(self.device)
        if device not in self._predictors or level is not None:
            method = method_of(self.config_, load(self._files[MODEL]), device, MODEL)
            if level is not None:
                return method.predictor(check_whole("level", level))
            self._predictors[device] = method.predictor()
        return self._predictors[device]

    def _images(self, X: Any) -> Images:
        """Load images in the format that the model expects."""
        check_is_fitted(self)
        given = np.shape(X)[1] if getattr(X, "ndim", 0) == 2 else self.n_features_in_
        if given != self.n_features_in_:
            wanted = self.n_features_in_
            raise UserError(f"X has {given} features, but SeCu is expecting {wanted} features as input")
        source = open_images(X)
        source.require_images()
        for name, reason in (*source.skipped, *source.repeated):
            raise UserError(
                f"X: {printable(name)}: {reason}; predict needs every image (secu predict skips unreadable ones)"
            )
        data = self.config_.data
        values = source.values_of(data.values, new=True)
        config = self.config_.model_copy(update={"data": data.model_copy(update={"values": values})})
        return load_inputs(config, source, device=self.device, strict=True)

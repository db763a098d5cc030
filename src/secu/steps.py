"""One training step, in the same Python whichever way it is executed (engine.py).

A step keeps everything it needs on the device (the order of the images, the place in it, the learning rates, the random
generator), so that a replayed graph does all the work of an epoch without asking the host.
"""

import copy
import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from secu.augment import Augmentation
from secu.clustering import Clustering, Losses
from secu.config import Config
from secu.data import ImageSource
from secu.feed import ResidentFeed, build_feed
from secu.model import Encoder
from secu.optim import build_optimizer, learning_rates


def batch_sizes(images: int, batch: int) -> list[int]:
    """Return the sizes of an epoch's batches: the small last one is kept.

    A last batch of a single image would have no variance for a batch-norm to divide by: it joins the one before.
    """
    full, rest = divmod(images, batch)
    sizes = [batch] * full + [rest] * (rest > 0)
    if len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


class Step:
    """One training step, from the index of its images to moved weights: what every kind of training shares.

    A kind of training says in ``losses`` what it learns from a batch.
    """

    def __init__(
        self,
        config: Config,
        source: ImageSource,
        encoder: Encoder,
        centers: nn.Module,
        device: torch.device,
        feed: ResidentFeed | None = None,
    ) -> None:
        self.config, self.source, self.device, self.encoder = config, source, device, encoder
        self.sizes = batch_sizes(len(source), config.optim.batch_size)
        self.rates = torch.zeros(2, device=device)
        self.optimizer = build_optimizer(config.optim, encoder, centers, self.rates[0], self.rates[1])
        self.generator = torch.Generator(device)
        self.feed = feed or build_feed(source, max(self.sizes), device)
        # What a step reads besides its weights; refilled once an epoch, always in place.
        self.order = torch.zeros(len(source), dtype=torch.int64, device=device)
        self.rate_table = torch.zeros(len(self.sizes), 2, device=device)
        self.images_done = torch.zeros(1, dtype=torch.int64, device=device)
        self.steps_done = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss_sums = torch.zeros(2, device=device)
        self.places = torch.arange(max(self.sizes), device=device)

    def losses(self, pixels: Tensor, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two numbers that the epoch's record tells as means over the images; their sum is minimised."""
        raise NotImplementedError

    def start_epoch(self, number: int) -> None:
        """Make an epoch ready; every random number of it follows from the seed and the epoch's number."""
        shuffle = torch.Generator().manual_seed(_mix(self.config.seed, number, 0))
        order = torch.randperm(len(self.source), generator=shuffle)
        self.order.copy_(order)
        self.generator.manual_seed(_mix(self.config.seed, number, 1))
        self.rate_table.copy_(learning_rates(self.config, number, len(self.sizes)))
        for count in (self.images_done, self.steps_done, self.loss_sums):
            count.zero_()
        self.encoder.train()
        self.feed.start(order.split(self.sizes))

    def run(self, size: int) -> None:
        """Do one step on the next ``size`` images of the order."""
        self.rates.copy_(self.rate_table.index_select(0, self.steps_done)[0])
        index_B = self.order.index_select(0, self.images_done + self.places[:size])
        losses = torch.stack(self.losses(self.feed.pixels(index_B), index_B))
        self.optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()
        self.optimizer.step()
        self.loss_sums += size * losses.detach()
        self.images_done += size
        self.steps_done += 1

    def autocast(self) -> torch.autocast:
        """Return the context of the encoder's arithmetic: bfloat16 on CUDA, if the config allows it."""
        enabled = self.config.optim.mixed_precision and self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def mean_losses(self) -> tuple[float, float]:
        """Return the epoch's mean losses; reading them waits for the device."""
        first, second = (self.loss_sums / len(self.source)).tolist()
        return first, second

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the step alone holds between epochs: the momentum of every weight."""
        return {str(number): buffer for number, buffer in enumerate(self._momentum())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up the momentum of an earlier run, in place: a captured graph may hold on to it."""
        for number, buffer in enumerate(self._momentum()):
            buffer.copy_(state[str(number)])

    def _momentum(self) -> list[Tensor]:
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return [self.optimizer.state[weight]["momentum_buffer"] for weight in weights]


class ClusterStep(Step):
    """SeCu's step: two views, embeddings, labels for all heads, both losses.

    With a weak and a strong view and a clustering that teaches (teaching.py) it is the step of self-labeling as the
    paper has it: one encoder labels the weak views and learns from the strong ones, which share a batch's statistics.
    """

    def __init__(
        self,
        config: Config,
        source: ImageSource,
        augmentation: Augmentation,
        encoder: Encoder,
        clustering: Clustering,
        device: torch.device,
        *,
        compiled: bool = False,
        feed: ResidentFeed | None = None,
    ) -> None:
        super().__init__(config, source, self.learner(encoder), clustering.centers, device, feed)
        self.augmentation, self.clustering = augmentation, clustering
        self._parts = self.functions()
        self._compiled = [compile_part(part) for part in self._parts] if compiled else self._parts

    def learner(self, encoder: Encoder) -> Encoder:
        """Return the encoder that is trained."""
        return encoder

    def functions(self) -> list[Callable[..., Any]]:
        """Return augmentation, encoder and clustering."""
        return [self.augmentation.apply, self.encoder, self.clustering.step]

    def start_epoch(self, number: int) -> None:
        """Make an epoch ready: the encoder learns against the centers as they stand now."""
        super().start_epoch(number)
        self.clustering.start_epoch(number / self.config.optim.total_epochs)

    def losses(self, pixels: Tensor, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Assign a batch, and return the losses of the representation and of the centers."""
        augment, encode, assign = self.parts(len(index_B))
        views = augment(pixels, self.augmentation.draw(len(index_B), self.generator))
        with self.autocast():
            embeddings_SBD = encode(views.flatten(0, 1))
        losses: Losses = assign(embeddings_SBD, index_B)
        return losses

    def parts(self, size: int) -> list[Callable[..., Any]]:
        """Return the functions for a batch of this size.

        An epoch has one odd batch, its last: compiling everything again for that one would not pay.
        """
        return self._compiled if size == self.sizes[0] else self._parts


class TeachStep(ClusterStep):
    """Self-labeling's step with two encoders: one labels weak views, the other learns the labels from strong views.

    The first one, the teacher, is the model that the run ends with, and labels images as it will do then. Its weights
    and the statistics of its batch-norms follow those of the second, the student, as a moving average: labels hold
    still while the student jumps about.
    """

    def learner(self, encoder: Encoder) -> Encoder:
        """Keep the encoder as the teacher, and let a copy of it learn."""
        student = copy.deepcopy(encoder)
        self.teacher = encoder.requires_grad_(False)
        return student

    def functions(self) -> list[Callable[..., Any]]:
        """Return augmentation, student, teaching and teacher."""
        return [self.augmentation.apply, self.encoder.embed, self.clustering.step, self.teacher.embed]

    def start_epoch(self, number: int) -> None:
        """Make an epoch ready; before the first one the student is the teacher."""
        if number == 0:
            self.encoder.load_state_dict(self.teacher.state_dict())
        super().start_epoch(number)
        self.teacher.eval()

    def losses(self, pixels: Tensor, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Label the weak views, and return the loss of the strong views; there is no other."""
        augment, learn, assign, label = self.parts(len(index_B))
        weak, strong = augment(pixels, self.augmentation.draw(len(index_B), self.generator))
        with self.autocast():
            with torch.no_grad():
                weak_BD = label(weak)
            strong_BD = learn(strong)
        losses: Losses = assign(torch.stack([weak_BD, strong_BD]), index_B)
        return losses

    def run(self, size: int) -> None:
        """Do one step, and let the teacher follow."""
        super().run(size)
        assert self.config.selflabel is not None
        pace = 1 - self.config.selflabel.decay
        with torch.no_grad():
            torch._foreach_lerp_(values_of(self.teacher), values_of(self.encoder), pace)

    def state_dict(self) -> dict[str, Tensor]:
        """Return momentum and student."""
        student = {f"student.{name}": value for name, value in self.encoder.state_dict().items()}
        return super().state_dict() | student

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up momentum and student."""
        super().load_state_dict(state)
        student = {name: value for name, value in state.items() if name.startswith("student.")}
        self.encoder.load_state_dict({name.removeprefix("student."): value for name, value in student.items()})


def step_of(config: Config) -> type[ClusterStep]:
    """Return the kind of step that a config asks for."""
    return TeachStep if config.selflabel and config.selflabel.decay else ClusterStep


def values_of(encoder: Encoder) -> list[Tensor]:
    """Return weights and statistics."""
    return [*encoder.parameters(), *encoder.buffers()]


def compile_part(part: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors whose shapes never change within a training.

    Every training of other shapes in the same process is compiled anew, however many there are.
    """
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 100_000
    for advice in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):  # not for people who have images
        warnings.filterwarnings("ignore", advice, UserWarning, r"torch\._inductor\.")
    return torch.compile(part, fullgraph=True, dynamic=False)


def _mix(seed: int, epoch: int, purpose: int) -> int:
    """Return a seed of its own for each use in each epoch, so that resuming needs no stored generator."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:7], "little")

"""One training step; the code is the same for all engines (engine.py).

A step keeps everything it needs on the device (the order of the images, the position in it, the learning rates, the
random generator), so that a graph can be replayed for a whole epoch without synchronizing with the host.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from secu.base import collectives, processes
from secu.data import Images
from secu.methods.base import Method, call_directly
from secu.train.compiled import CompiledCall
from secu.train.feed import Feed, build_feed
from secu.train.gradients import GradientSum
from secu.train.optim import build_optimizer, learning_rates
from secu.train.precision import convolutions, divide_gradients, loss_scale


def batch_sizes(images: int, batch: int) -> list[int]:
    """Return the sizes of an epoch's batches, including the smaller last one.

    A last batch of one image would have no variance for batch-norm, so the image joins the previous batch.
    """
    full, rest = divmod(images, batch)
    sizes = [batch] * full + [rest] * (rest > 0)
    if len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


class Step:
    """One training step of a method, from image indices to updated weights; the sum of its losses is minimized.

    ``feed`` are inputs that are already on the device, shared with another run.
    """

    def __init__(
        self,
        method: Method,
        images: Images,
        device: torch.device,
        *,
        compiled: bool = False,
        feed: Feed | None = None,
    ) -> None:
        self.method = method
        self.config = method.config
        self.images = images
        self.sizes = batch_sizes(len(images), self.config.optim.batch_size)
        self.rates = torch.zeros(3, device=device)
        encoder_weights, center_weights = method.trained_parameters()
        encoder_lr, center_lr, backbone_lr = self.rates.unbind()
        apart = [] if self.config.optim.backbone_lr is None else list(method.encoder.backbone.parameters())
        heads = self.config.heads if self.config.centers.optimizer == "lars" else None
        self.optimizer = build_optimizer(
            self.config.optim, encoder_weights, center_weights, encoder_lr, center_lr, apart, backbone_lr, heads
        )
        self.loss_scale = loss_scale(self.config, device)
        weights = [*encoder_weights, *center_weights]
        self.gradients = GradientSum(weights) if processes.grouped() else None
        self.generator = torch.Generator(device)
        method.generator = self.generator
        inputs = 2 if self.config.neighbors.count else 1  # of an image and its partner
        largest = max(len(range(size)[collectives.part_of(size)]) for size in self.sizes)
        self.feed = feed or build_feed(images, inputs * largest, device, method.crops)
        self.compiled_call = CompiledCall() if compiled else call_directly
        # Inputs of a step other than weights; updated in place once per epoch.
        self.order = torch.zeros(len(images), dtype=torch.int64, device=device)
        self.partners = torch.zeros(len(images), dtype=torch.int64, device=device)
        self.has_partners = False
        self.rate_table = torch.zeros(len(self.sizes), 3, device=device)
        self.images_done = torch.zeros(1, dtype=torch.int64, device=device)
        self.steps_done = torch.zeros(1, dtype=torch.int64, device=device)
        self.places = torch.arange(max(self.sizes), device=device)
        self.first = 0  # steps of the epoch that were done before the run was resumed
        # To continue in the middle of the next epoch: the method's state there, and what ``middle`` returned.
        self.resumed: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None
        self.loss_names: tuple[str, ...] = ()
        self.loss_sums = torch.zeros(0, device=device)

    def start_epoch(self, number: int) -> None:
        """Prepare for an epoch; all its random numbers are determined by the seed and the epoch number.

        If the run was resumed in the middle of this epoch, ``first`` is the number of steps that are done already.
        """
        shuffle = torch.Generator().manual_seed(_mix(self.config.seed, number, 0))
        order = torch.randperm(len(self.images), generator=shuffle)
        self.order.copy_(order)
        self.generator.manual_seed(_mix(self.config.seed, number, 1))
        self.rate_table.copy_(learning_rates(self.config, number, len(self.sizes)))
        self.first = 0
        for counter in (self.images_done, self.steps_done, self.loss_sums):
            counter.zero_()
        self.method.train()
        self.method.start_epoch(number, number / self.config.optim.total_epochs)
        partners = self._continue() if self.resumed else self.method.partners(order, shuffle)
        self.has_partners = partners is not None
        batches = [batch[collectives.part_of(len(batch))] for batch in order.split(self.sizes)]
        if partners is not None:
            self.partners.copy_(partners)
            others = [batch[collectives.part_of(len(batch))] for batch in partners.split(self.sizes)]
            batches = [torch.cat(pair) for pair in zip(batches, others, strict=True)]
        self.feed.start(batches[self.first :], _mix(self.config.seed, number, 2))

    @property
    def steps_resumed(self) -> int:
        """Number of steps of the next epoch that are done already."""
        return int(self.resumed[1]["steps_done"]) if self.resumed else 0

    def middle(self) -> dict[str, Tensor]:
        """Return a copy of what resuming in the middle of an epoch needs besides the method's state and momentum."""
        copies = {name: tensor.clone() for name, tensor in self._counters().items()}
        copies |= {f"buffer.{name}": buffer.clone() for name, buffer in self._passing_buffers().items()}
        copies["generator"] = self.generator.get_state()
        if self.has_partners:
            copies["partners"] = self.partners.clone()
        return copies

    def _continue(self) -> Tensor | None:
        """Restore the middle of an epoch that was started as usual, and return its partners."""
        assert self.resumed is not None
        state, middle = self.resumed
        self.first = self.steps_resumed
        self.resumed = None
        self.method.load_state_dict(dict(state))
        if self.loss_sums.shape != middle["loss_sums"].shape:
            self.loss_sums = torch.zeros_like(middle["loss_sums"], device=self.order.device)
        for name, tensor in self._counters().items():
            tensor.copy_(middle[name])
        for name, buffer in self._passing_buffers().items():
            buffer.copy_(middle[f"buffer.{name}"])
        state_there = middle["generator"].cpu()
        if state_there.shape == self.generator.get_state().shape:
            self.generator.set_state(state_there)
        else:  # written on another kind of device, which draws other numbers anyway
            self.generator.manual_seed(_mix(self.config.seed, self.first, 3))
        return middle.get("partners")

    def fits(self, middle: Mapping[str, Tensor]) -> bool:
        """Return whether a checkpoint, which may come from a damaged file, is one in the middle of an epoch."""
        buffers = {f"buffer.{name}": buffer for name, buffer in self._passing_buffers().items()}
        expected = {*self._counters(), *buffers, "generator"}
        if not expected <= middle.keys() <= expected | {"partners"}:
            return False
        counters = [middle[name] for name in ("steps_done", "images_done")]
        partners = middle.get("partners", torch.zeros(len(self.images)))
        shapes = all(middle[name].shape == buffer.shape for name, buffer in buffers.items())
        if not (shapes and all(counter.numel() == 1 for counter in counters) and len(partners) == len(self.images)):
            return False
        steps, images = map(int, counters)
        inside = bool(((partners >= 0) & (partners < len(self.images))).all())
        return 0 < steps < len(self.sizes) and images == sum(self.sizes[:steps]) and inside

    def _counters(self) -> dict[str, Tensor]:
        return {"images_done": self.images_done, "steps_done": self.steps_done, "loss_sums": self.loss_sums}

    def _passing_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the method that its state between two epochs does not contain."""
        lasting = self.method.state_dict().keys()
        return {name: buffer for name, buffer in self.method.named_buffers() if name not in lasting}

    def run(self, size: int) -> None:
        """Run one step on the next ``size`` images, of which every process computes a part."""
        self.rates.copy_(self.rate_table.index_select(0, self.steps_done)[0])
        with convolutions(self.config), collectives.shared_batch(size) as batch:
            places = self.images_done + self.places[batch.own]
            index_B = self.order.index_select(0, places)
            # Only the last batch of an epoch may have a different size; recompiling for it is not worthwhile.
            self.method.call = self.compiled_call if size == self.sizes[0] else call_directly
            losses = self.method.losses(self._inputs(index_B, places), index_B)
            self.optimizer.zero_grad(set_to_none=True)
            values = self._backward(torch.stack(list(losses.values())), batch)
        self.optimizer.step()
        self.method.after_step()
        if not self.loss_names:
            self._name_losses(losses)
        self.loss_sums += size * values
        self.images_done += size
        self.steps_done += 1

    def _backward(self, values: Tensor, batch: collectives.Batch) -> Tensor:
        """Compute the gradients of the losses, each a mean over the whole batch, and return these means."""
        total = values.sum() if self.loss_scale == 1 else self.loss_scale * values.sum()
        if self.gradients is None:
            means = values.detach()
            total.backward()
        else:
            means = batch.share * values.detach()
            self.gradients.begin(means)
            (batch.share * total).backward()
            self.gradients.finish()
        if self.loss_scale != 1:
            divide_gradients(self.optimizer, self.loss_scale)
        return means

    def _inputs(self, index_B: Tensor, places: Tensor) -> Tensor:
        """Return the inputs of a step (B, …), or those of the images and of their partners (2, B, …)."""
        if not self.has_partners:
            return self.feed.inputs(index_B)
        both = torch.cat([index_B, self.partners.index_select(0, places)])
        pairs: Tensor = self.feed.inputs(both).unflatten(0, (2, -1))
        return pairs

    def _name_losses(self, losses: dict[str, Tensor]) -> None:
        """Allocate the sums of the losses at the first step, which is never captured in a graph."""
        self.loss_names = tuple(losses)
        if len(self.loss_sums) != len(losses):  # otherwise they were restored
            self.loss_sums = torch.zeros(len(losses), device=self.order.device)

    def equalize(self) -> None:
        """Make all processes equal if each computed the last batch as a whole: on a GPU each rounds differently."""
        apart = self.sizes[-1] < processes.world()
        if apart and self.order.device.type != "cpu":
            collectives.copy_from_main({**self.method.state_dict(), **self.momentum()})

    def mean_losses(self) -> dict[str, float]:
        """Return the epoch's mean losses; this synchronizes with the device."""
        means = (self.loss_sums / len(self.images)).tolist()
        return dict(zip(self.loss_names, means, strict=True))

    def momentum(self) -> dict[str, Tensor]:
        """Return the optimizer's momentum buffers, numbered by weight."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return {str(number): self.optimizer.state[weight]["momentum_buffer"] for number, weight in enumerate(weights)}

    def load_momentum(self, state: dict[str, Tensor]) -> None:
        """Restore the momentum of a checkpoint in place, since a captured graph may refer to the buffers."""
        for number, buffer in self.momentum().items():
            buffer.copy_(state[number])


def _mix(seed: int, epoch: int, purpose: int) -> int:
    """Derive a separate seed for each purpose and epoch; a checkpoint between epochs needs no generator state."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:7], "little")

"""The losses, as pure functions of float32 tensors.

Shapes: S embeddings per image (its views), B images, H heads, K clusters of the largest head, D dimensions.
Smaller heads are padded to K. A mask adds −PADDING to the logits of padded clusters, so that their probability is
exactly zero. PADDING is finite because 0 · (−∞) would make the loss NaN.
"""

import torch
from torch import Tensor

from secu.base import collectives

PADDING = 1e4


def log_probabilities(cosines_SBHK: Tensor, mask_HK: Tensor, temperature: float) -> Tensor:
    """Eqn. 2: log p_ij = x_i·w_j/λ − log Σ_k exp(x_i·w_k/λ)."""
    return torch.log_softmax(cosines_SBHK / temperature + mask_HK, dim=-1)


def at_label(values_SBHK: Tensor, labels_BH: Tensor) -> Tensor:
    """Return each image's value at its label: (…, B, H, K) → (…, B, H)."""
    index = labels_BH[..., None].expand(*values_SBHK.shape[:-1], 1)
    return values_SBHK.gather(-1, index).squeeze(-1)


def secu_loss(
    embeddings_SBD: Tensor, centers_HKD: Tensor, log_p_SBHK: Tensor, labels_BH: Tensor, temperature: float
) -> Tensor:
    """Eqn. 3: −log p_{i,y}, where w_k of every other cluster k ≠ y is held constant.

    With log p treated as a constant, the gradient is the paper's: (p_{i,y} − 1)·x_i/λ for the assigned center and zero
    for all others. It is therefore computed directly, without differentiating a softmax over all clusters.
    """
    log_p_SBH = at_label(log_p_SBHK.detach(), labels_BH)
    heads_H = torch.arange(centers_HKD.shape[0], device=labels_BH.device)
    assigned_BHD = centers_HKD[heads_H, labels_BH]
    logit_SBH = torch.einsum("sbd,bhd->sbh", embeddings_SBD.detach(), assigned_BHD) / temperature
    hardness_SBH = -torch.expm1(log_p_SBH)  # 1 − p
    return (hardness_SBH * (logit_SBH.detach() - logit_SBH) - log_p_SBH).mean()


def cross_entropy(log_p_SBHK: Tensor, labels_BH: Tensor) -> Tensor:
    """Eqn. 1: −log p_{i,y}, including the gradient of the negatives; the paper's ablation."""
    return -at_label(log_p_SBHK, labels_BH).mean()


def soft_label_loss(log_p_SBHK: Tensor, labels_BH: Tensor, hard_label_weight: float) -> Tensor:
    """Eqn. 7: cross-entropy with τ·y^{t−1} + (1 − τ)·p of the other view, which is held constant.

    The first two of S are the projections of the views, which also provide the soft labels. If there are two more, they
    are the predictions, which are trained on the projection of the other view in the same way.
    """
    teacher_SBHK = log_p_SBHK[:2].detach().exp().flip(0).repeat(log_p_SBHK.shape[0] // 2, 1, 1, 1)
    hard = at_label(log_p_SBHK, labels_BH).mean()
    soft = (teacher_SBHK * log_p_SBHK).sum(-1).mean()
    return -(hard_label_weight * hard + (1 - hard_label_weight) * soft)


def balanced_cross_entropy(logits_BK: Tensor, targets_BK: Tensor) -> Tensor:
    """Return the mean cross-entropy with given targets, with equal weight for every cluster.

    Each row of targets sums to 1, or to 0 for an image without a target. A target is divided by the total of its
    cluster over the batch. A cluster whose total is less than one image has proportionally less weight. If no image has
    a target, the loss is 0.

    If processes share the batch, totals are those of all of them, and so is the mean of their losses.
    """
    counts_K = collectives.add_up(targets_BK.sum(0))
    weights_BK = targets_BK / counts_K.clamp(min=1)
    loss = -(weights_BK * torch.log_softmax(logits_BK, -1)).sum() / counts_K.clamp(max=1).sum().clamp(min=1)
    return loss * (collectives.whole(len(logits_BK)) / len(logits_BK)) if collectives.divided() else loss

"""Ways of giving pages a weight, for the study: the library's own, simpler ones, finer ones, and the truth.

Each takes a `Scene` and returns ``[G, B, N]``: what each block of queries of each KV head makes of each page. The
heaviest ``top_k`` pages of a row are selected.

Suffixes as in `scene`; R pooled query rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.sparsity.scene import Scene
from oomb_accel.plan.sizes import parts_of
from oomb_accel.selection import POOLED_TOKENS as POOLED
from oomb_kernels import page_centroids, page_mass, pool_queries

Variant = Callable[[Scene], Tensor]


def product(scene: Scene) -> Tensor:
    """The library's selection."""
    parts = parts_of(scene.page_tokens)
    pooled_HRD = pool_queries(scene.q_HTD, POOLED)
    centroids_GCD = page_centroids(scene.keys_GND, scene.page_tokens // parts)
    return page_mass(pooled_HRD, centroids_GCD, parts=parts, scale=scene.scale, block_rows=scene.q_block // POOLED)


@dataclass(frozen=True, slots=True)
class Sketch:
    """The library's idea with other grains: means of ``query`` queries against means of ``key`` keys. The library's own
    is ``Sketch(16, 16, 2)``."""

    query: int = POOLED
    key: int = 0
    """0: one mean per page."""
    power: int = 1
    """Of each row's weights before they are summed: above 1, a page that few queries need much counts for more than
    one that all need a little."""
    local: bool = False
    """Whether the local keys stand in the softmax too: queries that look nearby then have less of a say."""

    def __call__(self, scene: Scene) -> Tensor:
        grain = min(self.key or scene.page_tokens, scene.page_tokens)
        query = min(self.query, scene.q_block)
        keys_GKD = scene.keys_GND.float().unflatten(1, (-1, grain)).mean(2)
        scores_GERK = _pooled(scene, query) @ keys_GKD.mT.unsqueeze(1) * scene.scale
        sums_GERN = scores_GERK.unflatten(-1, (scene.num_pages, -1)).logsumexp(-1) + math.log(grain)
        weights_GERN = _with_local(scene, sums_GERN, query) if self.local else sums_GERN.softmax(-1)
        return _blocks(scene, weights_GERN**self.power, query)


@dataclass(frozen=True, slots=True)
class Bound:
    """Quest's upper bound of the scores of ``key`` keys, from the smallest and largest value of each channel."""

    query: int = POOLED
    key: int = 0
    power: int = 1

    def __call__(self, scene: Scene) -> Tensor:
        grain = min(self.key or scene.page_tokens, scene.page_tokens)
        keys_GKPD = scene.keys_GND.float().unflatten(1, (-1, grain))
        low_G1DK, high_G1DK = keys_GKPD.amin(2).mT.unsqueeze(1), keys_GKPD.amax(2).mT.unsqueeze(1)
        q_GERD = _pooled(scene, self.query) * scene.scale
        bound_GERK = q_GERD.clamp(min=0) @ high_G1DK + q_GERD.clamp(max=0) @ low_G1DK
        sums_GERN = bound_GERK.unflatten(-1, (scene.num_pages, -1)).logsumexp(-1)
        return _blocks(scene, sums_GERN.softmax(-1) ** self.power, self.query)


def mean_and_variance(scene: Scene) -> Tensor:
    """The log of a page's mean weight to second order: score of the mean key, plus half the variance of the scores,
    taken channel by channel."""
    pages_GNPD = scene.keys_GND.float().unflatten(1, (-1, scene.page_tokens))
    mean_GDN, variance_GDN = pages_GNPD.mean(2).mT, pages_GNPD.var(2, unbiased=False).mT
    q_GERD = _pooled(scene) * scene.scale
    scores_GERN = q_GERD @ mean_GDN.unsqueeze(1) + 0.5 * (q_GERD**2 @ variance_GDN.unsqueeze(1))
    return _blocks(scene, scores_GERN.softmax(-1))


def outlier(scene: Scene) -> Tensor:
    """Two vectors per page: the mean key with the weight of all tokens, and the one key that points away most from it.

    Keys of a head share a large common direction that most queries turn away from; a token whose key lacks it draws
    attention from everywhere, and the mean hides it.
    """
    pages_GNPD = scene.keys_GND.float().unflatten(1, (-1, scene.page_tokens))
    mean_GND = pages_GNPD.mean(2)
    least_GN = (pages_GNPD @ mean_GND[..., None]).squeeze(-1).argmin(-1)
    index = least_GN[..., None, None].expand(-1, -1, 1, pages_GNPD.shape[-1])
    outlier_GND = pages_GNPD.gather(2, index).squeeze(2)
    q_GERD = _pooled(scene) * scene.scale
    from_mean = q_GERD @ mean_GND.mT.unsqueeze(1) + math.log(scene.page_tokens)
    return _blocks(scene, torch.logaddexp(from_mean, q_GERD @ outlier_GND.mT.unsqueeze(1)).softmax(-1))


def causal(scene: Scene) -> Tensor:
    """The library's causal variant: each block is scored by the queries of the one before it."""
    assert scene.before_HTD is not None
    shifted_HTD = torch.cat([scene.before_HTD, scene.q_HTD], 1)[:, : scene.q_HTD.shape[1]]
    return product(replace(scene, q_HTD=shifted_HTD))


def per_layer(scene: Scene) -> Tensor:
    """One selection for all heads of a layer."""
    mass_GBN = product(scene)
    return mass_GBN.sum(0, keepdim=True).expand_as(mass_GBN)


def nearest(scene: Scene) -> Tensor:
    """No selection at all: the latest candidates, as a sliding window has them."""
    num_blocks = -(-scene.q_HTD.shape[1] // scene.q_block)
    order = torch.arange(1, scene.num_pages + 1, device=scene.q_HTD.device, dtype=torch.float32)
    return order.expand(scene.keys_GND.shape[0], num_blocks, -1).contiguous()


def oracle(scene: Scene) -> Tensor:
    """The truth: each page's share of the exact softmax."""
    return scene.in_blocks(scene.exact_masses()[0])


def oracle_squared(scene: Scene) -> Tensor:
    """The truth, squared before it is summed: what few queries need much counts for more than what all need little."""
    return scene.in_blocks(scene.exact_masses()[0].square_())


def oracle_largest(scene: Scene) -> Tensor:
    """The largest share that any query of the block gives a page."""
    masses_GETN = scene.exact_masses()[0]
    return torch.stack([rows.amax((1, 2)) for rows in masses_GETN.split(scene.q_block, dim=2)], 1)


VARIANTS: dict[str, tuple[Variant, str]] = {
    "product": (product, "the library's: means of 16 queries against means of 16 keys, softmax, squared, summed"),
    "q16": (Sketch(16), "means of 16 queries against one mean key per page, not squared"),
    "q128": (Sketch(128), "one mean query per block"),
    "q4": (Sketch(4), "means of 4 queries"),
    "q1": (Sketch(1), "every query for itself"),
    "q16-k64": (Sketch(16, 64), "means of 64 keys"),
    "q16-k16": (Sketch(16, 16), "means of 16 keys"),
    "q16-k1": (Sketch(16, 1), "all keys"),
    "q1-k16": (Sketch(1, 16), "every query against means of 16 keys"),
    "q1-k1": (Sketch(1, 1), "every query against all keys"),
    "q16-squared": (Sketch(16, power=2), "one mean key per page, squared"),
    "q16-k64-squared": (Sketch(16, 64, 2), "means of 64 keys, squared"),
    "q16-k4-squared": (Sketch(16, 4, 2), "means of 4 keys, squared"),
    "q4-k16-squared": (Sketch(4, 16, 2), "means of 4 queries against means of 16 keys, squared"),
    "q4-k4-squared": (Sketch(4, 4, 2), "means of 4 queries against means of 4 keys, squared"),
    "q1-k16-squared": (Sketch(1, 16, 2), "every query against means of 16 keys, squared"),
    "q4-k1-squared": (Sketch(4, 1, 2), "means of 4 queries against all keys, squared"),
    "q1-k1-squared": (Sketch(1, 1, 2), "every query against all keys, squared"),
    "q16-local": (Sketch(16, local=True), "as q16, local keys in the softmax too"),
    "min-max": (Bound(), "bound by each channel's smallest and largest key"),
    "min-max-q1": (Bound(1), "the same for every query, as Quest"),
    "min-max-q1-squared": (Bound(1, power=2), "the same, squared"),
    "min-max-k16": (Bound(16, 16), "bounds of 16 keys"),
    "min-max-q1-k16-squared": (Bound(1, 16, 2), "bounds of 16 keys for every query, squared"),
    "variance": (mean_and_variance, "mean key and variance of each channel"),
    "outlier": (outlier, "mean key, and the key that points away most from it"),
    "causal": (causal, "`causal_selection`: queries of the block before"),
    "per-layer": (per_layer, '`select_per="layer"`'),
    "nearest": (nearest, "no selection: the latest pages"),
    "oracle": (oracle, "the truth: pages by their exact softmax weight"),
    "oracle-squared": (oracle_squared, "the truth, squared before it is summed"),
    "oracle-largest": (oracle_largest, "the truth, the largest share that any query gives"),
}
"""By name: the function, and its meaning in a few words. All but `per-layer` have a KV head as their unit."""


def _pooled(scene: Scene, query: int = POOLED) -> Tensor:
    """fp32 ``[G, E, R, D]``."""
    return pool_queries(scene.q_HTD, query).float().unflatten(0, (scene.keys_GND.shape[0], -1))


def _with_local(scene: Scene, log_sums_GERN: Tensor, query: int) -> Tensor:
    """Softmax over pages, given by the log of their softmax sums, and the local keys, whose part is known exactly: a
    mean over the pooled queries of the log of their sum."""
    local_HR1 = pool_queries(scene.local_lse()[..., None], query)
    local_GER1 = local_HR1.unflatten(0, (log_sums_GERN.shape[0], -1))
    return torch.cat([log_sums_GERN, local_GER1.to(log_sums_GERN)], -1).softmax(-1)[..., :-1]


def _blocks(scene: Scene, weight_GERN: Tensor, query: int = POOLED) -> Tensor:
    rows = scene.q_block // query
    return torch.stack([part.sum((1, 2)) for part in weight_GERN.split(rows, dim=2)], 1)

"""Choosing pages: pooled queries, mean keys, softmax mass and the heaviest pages against formulas written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oomb_kernels import page_centroids, page_mass, page_select, pool_queries, top_pages
from oomb_kernels.page_select import launch_page_mass, launch_top_pages, page_mass_reference, top_pages_reference
from tests.kernels.pairwise import pairwise
from tests.kernels.reference import (
    ON_GPU,
    TRITON_PLACES,
    assert_close_in,
    assert_equal_by_definition,
    assert_twice_plain,
    token_major,
)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

MassFunction = Callable[..., Tensor]
TopFunction = Callable[[Tensor, int], Tensor]


def expected_mass(
    pooled: Tensor, centroids: Tensor, *, parts: int = 1, scale: float, block_rows: int, softcap: float | None = None
) -> Tensor:
    """Row by row in fp64."""
    num_heads, num_rows, _ = pooled.shape
    num_groups, num_parts, _ = centroids.shape
    mass = torch.zeros(
        num_groups, -(-num_rows // block_rows), num_parts // parts, dtype=torch.float64, device=pooled.device
    )
    for head in range(num_heads):
        group = head * num_groups // num_heads
        for row in range(num_rows):
            scores = scale * (centroids[group].double() @ pooled[head, row].double())
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.max())
            of_page = (weights / weights.sum()).unflatten(0, (-1, parts)).sum(1)
            mass[group, row // block_rows] += of_page * (of_page + 1e-6)
    return mass


def expected_top(mass: Tensor, k: int) -> Tensor:
    """Row by row with Python's sort."""
    lists = [sorted(sorted(range(len(row)), key=lambda n: (-row[n], n))[:k]) for row in mass.flatten(0, 1).tolist()]
    return torch.tensor(lists, dtype=torch.int32, device=mass.device).unflatten(0, mass.shape[:2])


def bank_view(num_groups: int, num_parts: int, dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random centroids [G, C, D] as the cache hands them out: a piece of one layer of a bank [L, parts, G, D]."""
    bank = torch.full((3, num_parts + 4, num_groups, dim), torch.nan, dtype=dtype, device=device)
    bank[1, 3:-1] = torch.randn(num_parts, num_groups, dim, device=device).to(dtype)
    return bank[1, 3:-1].transpose(0, 1)


MASS_CASES: list[dict[str, Any]] = pairwise(
    {
        "groups": [1, 2],
        "group": [1, 2, 3, 4, 5, 6, 7, 8],
        "dim": [64, 80, 96, 128, 256],
        "rows": [1, 5, 8, 11],
        "block_rows": [1, 4, 8],
        "pages": [1, 2, 33, 128, 150],
        "parts": [1, 2, 8],
        "softcap": [None, 3.0],
    }
)


def check_mass(
    mass: MassFunction,
    device: str,
    dtype: torch.dtype,
    *,
    groups: int = 1,
    group: int = 2,
    dim: int = 64,
    rows: int = 5,
    block_rows: int = 4,
    pages: int = 40,
    parts: int = 1,
    softcap: float | None = None,
) -> None:
    torch.manual_seed(0)
    pooled = token_major(groups * group, rows, dim, dtype, device)
    centroids = bank_view(groups, pages * parts, dim, dtype, device)
    call: dict[str, Any] = {"parts": parts, "scale": 2 * dim**-0.5, "block_rows": block_rows, "softcap": softcap}
    ours, wanted = mass(pooled, centroids, **call), expected_mass(pooled, centroids, **call)
    # The inputs are taken as they are and all sums are in fp32, so the rule of fp32 holds for every dtype.
    assert_equal_by_definition(ours / wanted.max(), wanted / wanted.max(), "mass")
    assert ours.is_contiguous() and torch.equal(ours, mass(pooled, centroids, **call)), "not the same bits again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mass", [page_mass, page_mass_reference])
def test_mass_reference(mass: MassFunction, dtype: torch.dtype) -> None:
    for case in MASS_CASES[::4]:
        check_mass(mass, "cpu", dtype, **case)


@pytest.mark.parametrize("case", MASS_CASES, ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_mass_kernel(device: str, dtype: torch.dtype, case: dict[str, Any]) -> None:
    check_mass(launch_page_mass, device, dtype, **case)


@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_mass_of_more_rows_than_one_program_takes(device: str, dtype: torch.dtype) -> None:
    check_mass(launch_page_mass, device, dtype, group=35, rows=10, block_rows=8)


@pytest.mark.parametrize("parts", [1, 2, 4, 16, 32, 64])
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_mass_of_pages_that_fill_no_tile_or_just_one(device: str, dtype: torch.dtype, parts: int) -> None:
    """Also of parts that no thread holds together."""
    for pages in {1, 2, 128 // parts - 1, 128 // parts, 128 // parts + 1, 256 // parts} - {0}:
        check_mass(launch_page_mass, device, dtype, pages=pages, parts=parts, dim=16)


@pytest.mark.parametrize("programs", [1, 4, 9, 10**6])
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_mass_with_pages_split_over_programs(
    device: str, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_select, "_PROGRAMS_WANTED", programs)
    check_mass(launch_page_mass, device, dtype, pages=5 * 128 + 3)
    check_mass(launch_page_mass, device, dtype, pages=81, parts=8)


@pytest.mark.parametrize("pages", [8192, 32768 + 77])
@pytest.mark.parametrize(("device", "dtype"), [place for place in TRITON_PLACES if place.values[0] == "cuda"])
def test_mass_of_long_documents(device: str, dtype: torch.dtype, pages: int) -> None:
    check_mass(
        launch_page_mass, device, dtype, groups=4, group=7, dim=128, rows=61, block_rows=8, pages=pages // 8, parts=8
    )


@pytest.mark.parametrize("mass", [page_mass_reference, launch_page_mass])
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_huge_scores_do_not_overflow(device: str, dtype: torch.dtype, mass: MassFunction) -> None:
    """Scores from -90,000 to 90,000, thousands apart: all weight goes to the best page of each row."""
    pooled = torch.ones(2, 5, 64, dtype=dtype, device=device)
    pooled[1] = -1
    pooled[:, 4] = 0
    steps = torch.tensor([-3.0, 1.0, 30.0, 2.0, -20.0, 29.0], device=device)
    centroids = steps[None, :, None].expand(1, 6, 64).contiguous().to(dtype)
    ours = mass(pooled, centroids, parts=1, scale=50.0, block_rows=2)
    wanted = torch.zeros(1, 3, 6, device=device)
    wanted[:, :2, 2] = wanted[:, :2, 4] = 2.0 * (1 + 1e-6)
    wanted[:, 2] = 2 / 6 * (1 / 6 + 1e-6)
    # A GPU rounds the exponent once or twice, as the compiler chose: half a unit of 2**17 in fp32, 0.5 % of a weight.
    torch.testing.assert_close(ours, wanted, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("mass", [page_mass_reference, launch_page_mass])
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_pages_far_below_the_best_are_ranked(device: str, dtype: torch.dtype, mass: MassFunction) -> None:
    """Their squares are zero in fp32, and among zeros the oldest page would win."""
    pooled = torch.ones(1, 1, 16, dtype=dtype, device=device)
    scores = torch.tensor([-80.0, -79.0, -78.0, -77.0, -63.0, -61.0, -60.0, 0.0], device=device)
    centroids = (scores / 16)[None, :, None].expand(1, 8, 16).contiguous().to(dtype)
    ours = mass(pooled, centroids, parts=1, scale=1.0, block_rows=1)
    assert top_pages(ours, 4).flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize(("device", "dtype"), TRITON_PLACES)
def test_equal_pages_have_equal_mass_and_the_lowest_are_taken(device: str, dtype: torch.dtype, parts: int) -> None:
    """To the bit, in whole tiles and in the last one."""
    pooled = token_major(2, 9, 80, dtype, device)
    centroids = torch.randn(1, 1, 80, device=device).to(dtype).repeat(1, 150 * parts, 1)
    mass = launch_page_mass(pooled, centroids, parts=parts, scale=1.0, block_rows=4)
    wanted = torch.full_like(mass, 8 / 150 * (1 / 150 + 1e-6))
    wanted[:, 2] /= 4
    assert_equal_by_definition(mass / wanted.max(), wanted / wanted.max(), "mass")
    assert torch.equal(mass, mass[:, :, :1].expand_as(mass))
    lowest = torch.arange(7, dtype=torch.int32, device=device).expand(1, 3, 7)
    assert torch.equal(launch_top_pages(mass, 7), lowest)


# [device] of the Triton kernel that has no dtype to choose.
TOP_PLACES = [place for place in TRITON_PLACES if place.values[1] == torch.float32]


def random_mass(num_groups: int, num_blocks: int, num_pages: int, values: int | None, device: str) -> Tensor:
    """Non-negative; with ``values`` so many different ones, so that there are ties."""
    generator = torch.Generator().manual_seed(num_pages)
    if values is None:
        return torch.rand(num_groups, num_blocks, num_pages, generator=generator).to(device) * 50
    return torch.randint(values, (num_groups, num_blocks, num_pages), generator=generator).float().to(device)


@pytest.mark.parametrize("values", [None, 1, 2, 5])
@pytest.mark.parametrize(
    ("pages", "k"), [(1, 1), (7, 1), (7, 3), (7, 7), (64, 63), (300, 64), (1300, 1200), (9000, 64)]
)
@pytest.mark.parametrize(("device", "dtype"), TOP_PLACES)
def test_top_pages(device: str, dtype: torch.dtype, pages: int, k: int, values: int | None) -> None:
    mass = random_mass(2, 1, pages, values, device)
    wanted = expected_top(mass, k)
    for top in (top_pages_reference, launch_top_pages):
        ours = top(mass, k)
        assert ours.dtype == torch.int32 and torch.equal(ours, wanted), top.__name__
    assert torch.equal(ours, launch_top_pages(mass, k)), "not the same bits again"


@pytest.mark.parametrize("k", [3, 1100])
@pytest.mark.parametrize(("device", "dtype"), TOP_PLACES)
def test_ties_in_several_tiles_fill_the_list_and_no_more(device: str, dtype: torch.dtype, k: int) -> None:
    """All pages are equal, and more than one tile holds some: the list ends where it is full."""
    pages = torch.full((k + 5000,), -1, dtype=torch.int32, device=device)
    mass = torch.ones(1, 3000, device=device)
    page_select._top_pages_kernel[(1,)](mass, pages, 3000, k, SEARCH=1024, EMIT=1024)
    assert torch.equal(pages[:k], torch.arange(k, dtype=torch.int32, device=device))
    assert (pages[k:] == -1).all()


@pytest.mark.parametrize("k", [1, 16, 64, 5000])
@pytest.mark.parametrize("pages", [8192, 8193, 40000])
@pytest.mark.parametrize(("device", "dtype"), [p for p in TOP_PLACES if p.values[0] == "cuda"])
def test_top_pages_of_long_documents(device: str, dtype: torch.dtype, pages: int, k: int) -> None:
    for values in (None, 3):
        mass = random_mass(4, 64, pages, values, device)
        assert torch.equal(launch_top_pages(mass, k), top_pages_reference(mass, k))


def test_more_pages_asked_for_than_there_are() -> None:
    for k in (5, 6, 1000):
        assert torch.equal(top_pages(torch.rand(2, 3, 5), k), torch.arange(5, dtype=torch.int32).expand(2, 3, 5))


@pytest.mark.parametrize("top", [top_pages_reference, launch_top_pages])
@pytest.mark.parametrize(("device", "dtype"), TOP_PLACES)
def test_lists_are_whole_whatever_the_mass(device: str, dtype: torch.dtype, top: TopFunction) -> None:
    """A model that has diverged still gets distinct pages that exist. Tiny and infinite values are ordered, too."""
    nan, inf = float("nan"), float("inf")
    mass = torch.tensor([[[nan] * 6, [0.0, nan, -nan, 2.0, nan, 1.0], [1e-45, inf, 3e38, 0, inf, 1e-40]]])
    lists = top(mass.to(device), 3)[0]
    assert lists.tolist() == [[0, 1, 2], [0, 3, 5], [1, 2, 4]]


@pytest.mark.parametrize("top", [top_pages_reference, launch_top_pages])
@pytest.mark.parametrize(("device", "dtype"), TOP_PLACES)
def test_masses_next_to_each_other_are_told_apart(device: str, dtype: torch.dtype, top: TopFunction) -> None:
    """Values that differ in the last bit only, around a power of two."""
    one = torch.tensor(1.0)
    below, above = torch.nextafter(one, torch.tensor(0.0)), torch.nextafter(one, torch.tensor(2.0))
    mass = torch.stack([below, above, one, below, above, one])[None, None].to(device)
    for k, wanted in [(1, [1]), (2, [1, 4]), (3, [1, 2, 4]), (4, [1, 2, 4, 5]), (5, [0, 1, 2, 4, 5])]:
        assert top(mass, k).tolist() == [[wanted]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "sub_tokens"), [(1, 16), (16, 16), (15, 16), (33, 16), (32, 8), (13, 4), (3, 1)])
def test_pooled_queries(dtype: torch.dtype, tokens: int, sub_tokens: int) -> None:
    q = token_major(3, tokens, 24, dtype)
    runs = q.split(sub_tokens, 1)
    truth = torch.stack([run.double().mean(1) for run in runs], 1)
    plain = torch.stack([run.sum(1) / run.shape[1] for run in runs], 1)
    ours = pool_queries(q, sub_tokens)
    assert ours.dtype == dtype
    assert_close_in(dtype, ours, plain, truth, "pooled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_page_centroids(dtype: torch.dtype) -> None:
    k = token_major(2, 36, 80, dtype)
    ours = page_centroids(k, 12)
    truth = torch.stack([k[:, start : start + 12].double().mean(1) for start in (0, 12, 24)], 1)
    assert ours.dtype == dtype and ours.shape == (2, 3, 80)
    assert_close_in(dtype, ours, truth.to(dtype), truth, "centroids")
    with pytest.raises(AssertionError, match="no whole parts"):
        page_centroids(k[:, :35], 12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_means_are_summed_in_fp32(device: str) -> None:
    """256 + 1 is 256 in bf16: a sum in bf16 would lose all but the first token."""
    x = torch.ones(1, 256, 64, dtype=torch.bfloat16, device=device)
    x[:, 0] = 256
    truth = torch.full((1, 1, 64), (256 + 255) / 256, device=device)
    plain = truth.bfloat16()
    assert_twice_plain(page_centroids(x, 256), plain, truth, "centroids")
    assert_twice_plain(pool_queries(x, 256), plain, truth, "pooled")

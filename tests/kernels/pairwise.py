"""Few combinations of many settings: every pair of values of two settings occurs in at least one of them."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations that cover all pairs, the same ones each time.

    Each starts with a pair that is still missing and takes, setting by setting, the value that covers the most
    missing pairs with what is chosen already; of equal ones the value used least so far.
    """
    names = list(settings)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i in range(len(settings[a]))
        for j in range(len(settings[b]))
    }
    uses = {(name, i): 0 for name in names for i in range(len(settings[name]))}
    rows = []
    while missing:
        start = min(missing, key=lambda pair: (uses[pair[0]] + uses[pair[1]], str(pair)))
        row = dict(start)
        for name in names:
            if name in row:
                continue
            ranked = []
            for i in range(len(settings[name])):
                gain = sum(_pair(names, (name, i), chosen) in missing for chosen in row.items())
                ranked.append((-gain, uses[name, i], i))
            row[name] = min(ranked)[2]
        missing -= {_pair(names, a, b) for a, b in combinations(row.items(), 2)}
        for item in row.items():
            uses[item] += 1
        rows.append({name: settings[name][row[name]] for name in names})
    return rows


def _pair(names: list[str], a: tuple[str, int], b: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return (a, b) if names.index(a[0]) < names.index(b[0]) else (b, a)

"""The report as one HTML file: plots and tables inside, nothing fetched, light and dark by the reader's setting."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from oomb_accel.cli.report_tables import Table

FILE = "report.html"

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #23272e; --faint: #68707c; --rule: #dde1e7;
  --tile: #f5f7f9; --forward: transparent; --backward: #eef1f5; --evaluation: #fbf7ea; --update: #dfe4ea; }
@media (prefers-color-scheme: dark) { :root { --ground: #16191d; --text: #dfe3e8; --faint: #98a1ad; --rule: #333a43;
  --tile: #1f242a; --backward: #20262e; --evaluation: #2b2817; --update: #303842; } }
body { background: var(--ground); color: var(--text); margin: 2rem auto; max-width: 68rem; padding: 0 1.2rem;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.45rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { color: var(--faint); margin: .2rem 0 1rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0; }
.tile { background: var(--tile); border-radius: 6px; padding: .55rem .9rem; }
.tile b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--faint); font-size: .82rem; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
svg text { fill: currentColor; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .28rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--faint); font-weight: 500; }
.words th:first-child, .words td:first-child { text-align: left; }
pre { font-size: .84rem; line-height: 1.45; background: var(--tile); border-radius: 6px; padding: .8rem 1rem; }
"""


def page_of(
    title: str,
    subtitle: str,
    tiles: Mapping[str, str],
    plots: Sequence[tuple[str, str]],
    tables: Sequence[tuple[str, Table]],
    texts: Sequence[tuple[str, str]] = (),
) -> str:
    """The page.

    Args:
        tiles: the most important figures, by name.
        plots: heading and SVG of each.
        tables: heading and rows of each.
        texts: heading and lines of each, in a fixed width.
    """
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1><p>{_text(subtitle)}</p>",
    ]
    if tiles:
        boxes = (
            f'<div class="tile"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for name, value in tiles.items()
        )
        parts.append(f'<div class="tiles">{"".join(boxes)}</div>')
    parts += [f'<h2>{_text(head)}</h2><div class="wide">{svg}</div>' for head, svg in plots]
    parts += [f'<h2>{_text(head)}</h2><div class="wide">{_table(table)}</div>' for head, table in tables]
    parts += [f'<h2>{_text(head)}</h2><div class="wide"><pre>{_text(lines)}</pre></div>' for head, lines in texts]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _table(table: Table) -> str:
    heads, *rows = table
    first = "".join(f"<th>{_text(cell)}</th>" for cell in heads)
    rest = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    kind = "" if heads[0] == "step" else ' class="words"'
    return f"<table{kind}><thead><tr>{first}</tr></thead><tbody>\n{rest}</tbody></table>"


def _text(words: str) -> str:
    return html.escape(words)

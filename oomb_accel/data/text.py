"""Reading text files: UTF-8, strictly, in pieces."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 1 << 20

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32LE",
    codecs.BOM_UTF32_BE: "UTF-32BE",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_PDF = b"%PDF-"
_PACKED = {
    _PDF: ("a PDF", "Take the text out of it, for example: pdftotext FILE NEW_FILE.txt."),
    b"PK\3\4": (
        "a zip archive, as .docx and .epub are",
        "Unpack it, or for these: pandoc FILE -o NEW_FILE.txt.",
    ),
    b"\x1f\x8b": ("compressed by gzip", "Unpack it: gunzip FILE."),
}
"""How files begin that hold text for other programs, what they are, and how to get at it."""
MINIFIED_BYTES = 64 << 10
MINIFIED_LINE_BYTES = 2000


def text_chunks(path: Path) -> Iterator[str]:
    """The text of a file. A byte order mark is left out, and lines end in a single newline.

    Raises:
        ValueError: no UTF-8 text, a binary file, or nothing but white space.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position, held, blank = 0, "", True
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK_BYTES)
            check_block(path, block, position)
            try:
                text = held + decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise not_utf8(str(path), str(error), block if position == 0 else b"") from None
            position += len(block)
            held = "\r" if block and text.endswith("\r") else ""  # its newline may begin the next block
            text = text[: len(text) - len(held)].replace("\r\n", "\n").replace("\r", "\n")
            blank = blank and not text.strip()
            if text:
                yield text
            if not block:
                break
    if blank:
        raise ValueError(f"{path} is empty.\n  Got no text.\n  Give a file or folder with text.")


def check_block(path: Path, block: bytes, position: int) -> None:
    """Refuse a binary file.

    Raises:
        ValueError: the block begins a file that some program has to unpack, or holds a zero byte and does not begin
            like another encoding of text.
    """
    for beginning, (kind, remedy) in _PACKED.items():
        if position == 0 and block.startswith(beginning):
            raise ValueError(f"{str(path)!r} is no plain text.\n  It begins as {kind}.\n  {remedy}")
    at = block.find(b"\0")
    if at >= 0 and not (position == 0 and encoding_of_mark(block)):
        raise ValueError(
            f"{str(path)!r} is a binary file, no text.\n  Got a zero byte at {position + at:,}.\n"
            "  Give text, a .jsonl, .csv or .parquet file, or a folder."
        )


def encoding_of_mark(data: bytes) -> str | None:
    """The encoding that a byte order mark announces, if it is not UTF-8."""
    return next((name for mark, name in _MARKS.items() if data.startswith(mark)), None)


def not_utf8(name: str, reason: str, beginning: bytes = b"") -> ValueError:
    """The error for text in another encoding.

    Args:
        beginning: of the file; it may say which encoding.
    """
    encoding = encoding_of_mark(beginning)
    guess = f" It begins as {encoding} text does." if encoding else ""
    return ValueError(
        f"{name!r} is not UTF-8 text.\n  {reason}.{guess}\n"
        f"  Convert it, for example: iconv -f {(encoding or 'latin1').lower()} -t utf-8 FILE > NEW_FILE."
    )


def why_skipped(data: bytes) -> str | None:
    """Why a file of a folder does not become part of its document; None when it does."""
    if not data.strip():
        return "empty"
    if data.startswith(_PDF):
        return "PDF"
    if b"\0" in data and encoding_of_mark(data) is None:
        return "binary"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    if len(data) > MINIFIED_BYTES and len(data) / (data.count(b"\n") + 1) > MINIFIED_LINE_BYTES:
        return "minified"
    return None

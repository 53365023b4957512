"""From settings to documents: find, tokenise once, cut to length, pack."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from oomb_accel.data.cache import cached
from oomb_accel.data.chat import Notes
from oomb_accel.data.examples import row_example, text_example
from oomb_accel.data.lengths import fit, leave_out_untrained
from oomb_accel.data.meter import Meter
from oomb_accel.data.pack import pack
from oomb_accel.data.settings import DataSettings
from oomb_accel.data.sources import Source, find_sources
from oomb_accel.data.store import FORMAT, Corpus, StoredDocuments, StoreWriter, TokenStore, TrainingSequence
from oomb_accel.data.tokenise import Named, TextEncoder, UnprovenCut, description_of

RULES = 1
"""Version of how texts become tokens; a change makes every cached result be built anew."""

UNCUT = "a text was tokenised in one piece, as cutting it might have changed tokens"


def load(settings: DataSettings, tokenizer: Any) -> Corpus:
    """Read, tokenise, cut to length and pack.

    Raises:
        ValueError: as :func:`read` and :func:`arrange`.
    """
    return arrange(read(settings, tokenizer), settings)


def read(settings: DataSettings, tokenizer: Any) -> TokenStore:
    """The token ids of all documents as they are, from the cache or tokenised now.

    Args:
        tokenizer: of transformers.

    Raises:
        ValueError: nothing to read, a row that is not understood, or a cache that cannot be written.
        RuntimeError: another process builds the same for too long, or one that tokenises was killed.
    """
    sources = find_sources(settings)
    key = _key(sources, settings, tokenizer)
    folder = cached(settings.cache_folder(), key, lambda place: _build(place, sources, settings, tokenizer))
    store = TokenStore(folder, [source.label for source in sources])
    store.notes[:0] = [source.note for source in sources if source.note]
    return store


def arrange(store: TokenStore, settings: DataSettings) -> Corpus:
    """Apply ``max_length``, ``truncation`` and ``packing``, and leave out what has no target.

    Raises:
        ValueError: a document that is too long, or nothing left to train on.
    """
    borders = store.offsets.tolist()
    everything = [
        TrainingSequence(name, ((start, end),))
        for name, start, end in zip(store.names, borders[:-1], borders[1:], strict=True)
    ]
    fitted = fit(everything, settings)
    trained = leave_out_untrained(fitted.sequences, store)
    sequences, notes = trained.sequences, [*store.notes, *fitted.notes, *trained.notes]
    if not sequences:
        details = "; ".join(notes) or f"Got {len(store.names)} documents."
        raise ValueError(
            f"{settings.shown_paths} holds nothing to train on.\n  {details}\n"
            "  A document needs two tokens or more, and a target behind its first token."
        )
    if settings.packing and settings.max_length is not None:
        sequences, note = pack(sequences, settings.max_length)
        notes.append(note)
    return Corpus(StoredDocuments(store, sequences), notes)


def _key(sources: Sequence[Source], settings: DataSettings, tokenizer: Any) -> str:
    """Name of the result in the cache: a digest of all that it depends on, but not of where the data lies."""
    rules = {
        "versions": [FORMAT, RULES, version("transformers"), version("tokenizers")],
        "settings": [settings.text_field, settings.train_on],
        "sources": [[source.digest, source.chunks is None] for source in sources],
        "tokenizer": [
            type(tokenizer).__name__,
            description_of(tokenizer) or _files_of(tokenizer),
            str(tokenizer.chat_template),
            str(tokenizer.special_tokens_map),
            tokenizer.eos_token_id,
        ],
    }
    return hashlib.sha256(json.dumps(rules).encode()).hexdigest()[:40]


def _files_of(tokenizer: Any) -> str:
    """What makes up a tokenizer that is not a fast one: its words, and the files that it came from."""
    digest = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode())
    for key, value in sorted(tokenizer.init_kwargs.items()):
        path = Path(value) if isinstance(value, str) and len(value) < 4096 else None
        digest.update(f"{key}={value}".encode() if path is None or not path.is_file() else path.read_bytes())
    return digest.hexdigest()


def _build(folder: Path, sources: Sequence[Source], settings: DataSettings, tokenizer: Any) -> None:
    """Tokenise everything into a folder."""
    try:
        _write(folder, sources, settings, tokenizer, cut=True)
    except UnprovenCut:
        _write(folder, sources, settings, tokenizer, cut=False)


def _write(folder: Path, sources: Sequence[Source], settings: DataSettings, tokenizer: Any, *, cut: bool) -> None:
    counts: Notes = Counter()
    encoder = TextEncoder(tokenizer)
    writer = StoreWriter(folder)
    meter = Meter(sum(source.num_bytes for source in sources))
    try:
        encoder.write(_examples(sources, settings, tokenizer, counts), writer, meter, cut=cut)
        notes = [f"{count:,} {'row' if count == 1 else 'rows'}: {note}" for note, count in counts.items()]
        writer.close([*notes, *([] if cut else [UNCUT])])
    finally:
        writer.abandon()
        meter.close()


def _examples(sources: Sequence[Source], settings: DataSettings, tokenizer: Any, counts: Notes) -> Iterator[Named]:
    for number, source in enumerate(sources):
        if source.chunks is not None:
            yield Named(number, "", text_example(source.label, source.chunks, settings.train_on))
        if source.rows is not None:
            for suffix, row in source.rows():
                yield Named(number, suffix, row_example(source.label + suffix, row, settings, tokenizer, counts))

"""Byte-level BPE tokenizers trained on the spot, and reading with a cache of the test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from oomb_accel.data.load import load
from oomb_accel.data.settings import DataSettings
from oomb_accel.data.store import Corpus

END = "<|end|>"
CORPUS = [
    "the quick brown fox jumps over the lazy dog\n\n  and the other fox said: 'it's 12345!'\n",
    "def forward(self, x):\n    return self.layer(x) + self.bias\n\n\nclass Model:\n\tpass\r\n",
    "Grüße aus Köln, 你好 мир  \n   \n\n x ==> y;\n",
] * 4
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The expression of Qwen's tokenizers; Llama 3 and others use the like."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Load = Callable[..., Corpus]


def train_bpe(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of three kinds: ``gpt2``, ``qwen``, or ``joined``, which makes tokens across newlines."""
    made = Tokenizer(models.BPE())
    level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    if kind == "qwen":
        made.normalizer = normalizers.NFC()
        level = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), level])
    made.pre_tokenizer = level
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[END, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=END, chat_template=CHATML, clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="session", params=["gpt2", "qwen"])
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return train_bpe(request.param)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe("qwen")


@pytest.fixture
def load_paths(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Load:
    def load_with(*paths: Path | str, **changes: Any) -> Corpus:
        settings = {"cache": str(tmp_path / "cache"), "paths": tuple(map(str, paths)), **changes}
        return load(DataSettings(**settings), tokenizer)

    return load_with

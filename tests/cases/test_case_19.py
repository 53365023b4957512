"""Case 19, as far as it is about one block of settings: an error names place, key and the nearest valid one."""

from __future__ import annotations

from typing import Any

import pytest

import oomb_accel
from oomb_accel import OombConfig
from tests.harness.batches import documents_of, padded
from tests.harness.models import tiny_model
from tests.harness.parity import config


@pytest.mark.parametrize(
    ("block", "texts"),
    [
        ({"chunk_tokenz": 64}, ("'chunk_tokenz'", "'chunk_tokens'")),
        ({"chunk_tokens": "64"}, ("chunk_tokens='64'", "str", "whole number")),
        ({"chunk_tokens": 4, "page_tokens": 8}, ("chunk_tokens=4", "page_tokens=8", "Set chunk_tokens=8")),
    ],
)
def test_a_block_that_does_not_fit(block: dict[str, Any], texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        OombConfig.from_dict(block, place="ds.json, block 'oomb'")
    for text in ("ds.json, block 'oomb'", *texts):
        assert text in str(caught.value)


def test_enabled_false_leaves_the_model_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = oomb_accel.enable(tiny_model(), config(enabled=False))
    assert "forward" not in vars(model)
    assert "enabled=False" in caplog.text
    with pytest.raises(ValueError, match="not on for this model"):
        oomb_accel.banner(model)


def test_an_unknown_input_is_refused_by_name() -> None:
    model = oomb_accel.enable(tiny_model(), config())
    with pytest.raises(ValueError, match=r"(?s)does not know: attention_maks.*disable"):
        model(**padded(documents_of(30)).batch, attention_maks=1)


def test_a_label_that_is_no_token_id_is_an_error() -> None:
    """Plain transformers refuses it too; a kernel would read somebody else's memory."""
    model = oomb_accel.enable(tiny_model(), config())
    for wrong in (128, -1):
        layout = padded(documents_of(30))
        layout.batch["labels"][0, 20] = wrong
        with pytest.raises(ValueError, match=rf"(?s)label.*{wrong}"):
            model(**layout.batch)


def test_a_batch_on_another_device_is_an_error() -> None:
    """As replicas of DataParallel would get it."""
    model = oomb_accel.enable(tiny_model(), config())
    batch = {name: value.to("meta") for name, value in padded(documents_of(30)).batch.items()}
    with pytest.raises(ValueError, match=r"(?s)batch is on meta, the model on cpu.*accelerate launch"):
        model(**batch)


def test_a_model_on_several_devices_is_refused() -> None:
    model = tiny_model()
    vars(model)["hf_device_map"] = {"model.embed_tokens": 0, "model.layers.0": 1}
    with pytest.raises(ValueError, match=r"(?s)spread over 0, 1.*device_map"):
        oomb_accel.enable(model, config())

"""The learning rate over a run."""

import pytest

from oomb_accel.training.learning_rate import learning_rate_factor


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1.0, 0.8536, 0.5, 0.1464]),
    ],
)
def test_shapes(kind: str, factors: list[float]) -> None:
    made = [learning_rate_factor(step, kind=kind, warmup_steps=2, num_steps=6) for step in range(6)]  # type: ignore[arg-type]
    assert made == pytest.approx(factors, abs=1e-4)
    assert learning_rate_factor(6, kind="linear", warmup_steps=2, num_steps=6) == 0.0

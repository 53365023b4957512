"""What `zero3_release` saves in place of tensors: views are read where the parameter lies then, and changes in place
are found out as autograd finds them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oomb_accel.integrations.zero3_release import _views_read_again


def gathered(values: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values)
    parameter.ds_id = 0  # type: ignore[attr-defined]  # as DeepSpeed marks it
    return parameter


def test_a_parameter_that_comes_back_elsewhere() -> None:
    values = torch.randn(3, 4, 5, dtype=torch.float64)
    parameter = gathered(values.clone())
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    with _views_read_again():
        out = x @ parameter[1]
    parameter.data = torch.empty(0, dtype=torch.float64)
    parameter.data = torch.cat([torch.zeros(7, dtype=torch.float64), values.flatten()])[7:].view(3, 4, 5)
    (dx,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(dx, values[1].sum(1).expand(2, 4))


def test_a_change_in_place_is_an_error() -> None:
    a = torch.randn(3, requires_grad=True)
    with _views_read_again():
        b = a.exp()
        with torch.no_grad():
            b.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        b.sum().backward()

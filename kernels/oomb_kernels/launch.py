"""Sizes of a launch. Triton's own functions of these names are made for kernels, and take the host 2 us a call."""


def cdiv(size: int, step: int) -> int:
    """Steps that cover a size."""
    return -(-size // step)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not below a size of at least 1."""
    return 1 << (size - 1).bit_length()

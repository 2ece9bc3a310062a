"""Arithmetic with sizes."""


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most ``most``, and at least 1."""
    return max(size for size in range(1, max(1, min(number, most)) + 1) if number % size == 0)

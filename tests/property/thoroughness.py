"""How many random cases a test tries: few in `make test`, all in `make test-all` (--hypothesis-profile=thorough)."""

from hypothesis import settings

_ALL = 100
"""Examples of a property that names no number, in the profile that tries all."""


def scaled(n_cases: int) -> int:
    """Return the part of `n_cases` that the profile in force tries, 5 at least."""
    n_examples = settings.default.max_examples if settings.default else _ALL
    return max(5, n_cases * n_examples // _ALL)

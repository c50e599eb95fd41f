"""Make keys that are no strings again from the texts under which a checkpoint has them."""

import ast
from typing import Final

__all__ = ["is_literal", "parse_literal"]

_MOST_CHARACTERS: Final = 1000
_KINDS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, tuple})


def is_literal(key: object, text: str) -> bool:
    """Tell whether `parse_literal` makes an equal key from this text. Numpy's integers become those of Python."""
    try:
        parsed = parse_literal(text)
    except ValueError:
        return False
    if type(parsed) is not type(key):
        return type(parsed) is int and bool(parsed == key)
    return repr(parsed) == repr(key)


def parse_literal(text: str) -> object:
    """Parse the text of a key: None, a number, bytes, or a tuple of these and strings. The text may be hostile.

    Raises:
        ValueError: the text is none of these.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError("too long for a key")
    try:
        # Also "inf" and "nan", which are no literals.
        return float(text) if not text.removeprefix("-").isdecimal() else int(text)
    except ValueError:
        pass
    try:
        parsed = ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("no literal") from error
    _check_kind(parsed)
    return parsed


def _check_kind(key: object) -> None:
    if type(key) not in _KINDS:
        raise ValueError(f"a {type(key).__name__} is no key")
    for part in key if isinstance(key, tuple) else ():
        _check_kind(part)

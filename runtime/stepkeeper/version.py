"""State the version of the library, of the command and of the operator's chart."""

__all__ = ["__version__"]

__version__ = "0.2.0"

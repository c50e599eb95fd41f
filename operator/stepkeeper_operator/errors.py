"""All errors that the operator raises.

OperatorError
└── GenerationError (ValueError)        the CRD can't be generated from the types
"""

__all__ = ["GenerationError", "OperatorError"]


class OperatorError(Exception):
    """Base of all."""


class GenerationError(OperatorError, ValueError):
    """A type has no place in a structural schema, or a rule names a field that isn't there."""

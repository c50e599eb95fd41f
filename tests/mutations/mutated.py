"""Run pytest on a runtime that a patch has changed: python mutated.py RUNTIME PYTEST-ARGUMENT…"""

import sys

import pytest

runtime, *arguments = sys.argv[1:]
sys.path.insert(0, runtime)
sys.dont_write_bytecode = True
import stepkeeper  # noqa: E402  # not before its path is the first

assert stepkeeper.__file__.startswith(runtime), stepkeeper.__file__
sys.exit(pytest.main(arguments))

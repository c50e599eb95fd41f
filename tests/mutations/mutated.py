"""Run pytest on a package that a patch has changed: python mutated.py FOLDER PACKAGE PYTEST-ARGUMENT…"""

import importlib
import sys

import pytest

folder, package, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
sys.dont_write_bytecode = True
imported = importlib.import_module(package)
assert imported.__file__ is not None
assert imported.__file__.startswith(folder), imported.__file__
sys.exit(pytest.main(arguments))

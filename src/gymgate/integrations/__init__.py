"""Adapters, one package per SDK; each is an extra and imports its SDK when used.

A new one also needs a module `gymgate.NAME` that exports it, and in pyproject.toml an extra and its names in the contracts of
import-linter.
"""

"""Adapters, one package per SDK; each is an extra and imports its SDK when used."""

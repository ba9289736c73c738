"""Imported before anything else of verl: what it imports warns, and in this suite warnings are errors."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.trainer.main_ppo
    import verl.trainer.ppo.v1  # noqa: F401

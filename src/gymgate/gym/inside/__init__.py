"""All code that runs in NeMo Gym's own interpreter, where gymgate is not installed.

Two programs load this package by its path: `forkserver/__main__.py` and `preparation/__main__.py`. There it goes by another
name, so nothing here imports anything of gymgate but its siblings, relatively, and the standard library. What it uses of
`nemo_gym` stands in `names`.
"""

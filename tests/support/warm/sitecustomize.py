"""Lets a stack's daemon take its fork server from a warm one. On `PYTHONPATH` of the tests that ask for `warm_fork_servers`."""

import sys

if "gymgate.stack.daemon" in sys.orig_argv:
    import from_warm

    from_warm.install()

"""Wrapping a method of somebody else's object for a while."""

import contextlib


@contextlib.contextmanager
def replaced(owner, name, wrapper):
    """For a while, owner.name(...) is wrapper(owner.name, ...).  Past __setattr__, which would track it."""
    original = getattr(owner, name)
    before = vars(owner).get(name)
    vars(owner)[name] = lambda *args, **kwargs: wrapper(original, *args, **kwargs)
    try:
        yield
    finally:
        if before is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before

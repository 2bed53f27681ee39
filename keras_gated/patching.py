"""Wrapping a method of somebody else's object for a while.

Hidden here: that several wrappers may lie round one method at a time and may go in any order, and that nothing of them
stays behind.
"""

import contextlib
import functools

ABSENT = object()


class _Wrapped:
    """What stands in the place of owner.name: the wrappers so far, the last one outermost."""

    def __init__(self, owner, name):
        self.original = getattr(owner, name)
        self.before = vars(owner).get(name, ABSENT)  # what was set on the object, not on its class
        self.wrappers = []
        self.__wrapped__ = self.original  # keeps the signature

    def __call__(self, *args, **kwargs):
        call = self.original
        for wrapper in self.wrappers:
            call = functools.partial(wrapper, call)
        return call(*args, **kwargs)


@contextlib.contextmanager
def replaced(owner, name, wrapper):
    """For a while, owner.name(...) is wrapper(owner.name, ...).  Past __setattr__, which would track it.

    Contexts on one method may overlap and may be left in any order, also by an exception.  What somebody else sets on
    the object in between is theirs and stays.
    """
    attributes, entry = vars(owner), functools.partial(wrapper)  # one wrapper may be entered twice, an entry only once
    if not isinstance(attributes.get(name), _Wrapped):
        attributes[name] = _Wrapped(owner, name)
    wrapped = attributes[name]
    wrapped.wrappers.append(entry)
    try:
        yield
    finally:
        wrapped.wrappers.remove(entry)
        if not wrapped.wrappers and attributes.get(name) is wrapped:
            if wrapped.before is ABSENT:
                del attributes[name]
            else:
                attributes[name] = wrapped.before

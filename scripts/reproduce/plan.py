"""Which claims are held against published numbers, and in which runs."""

import json

from reproduce import adding, copying, counting, future, grammar, long_lag, tagging, temporal_order

FAMILIES = (future, copying, temporal_order, long_lag, grammar, counting, adding, tagging)
TUNED = "Settings were tuned on seeds from 100 on; reported are the seeds from 0 on."


def claims(quick, names=None):
    """All claims, or those whose names contain one of these texts."""
    planned = [claim for family in FAMILIES for claim in family.claims(quick)]
    return [c for c in planned if not names or any(name.lower() in c.name.lower() for name in names)]


def runs(planned):
    """The runs of these claims, the longest first, each once though two claims rest on it."""
    different = {json.dumps([r.family, r.setting, r.seed], sort_keys=True): r for c in planned for r in c.runs}
    return sorted(different.values(), key=lambda run: -run.seconds)

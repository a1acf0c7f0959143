"""A fault of a machine: the run ends with exit code 17 and saves nothing."""


class MachineFault(Exception):
    """Raised on all ranks: a machine computes or holds wrong numbers; the text names its rank and host."""

"""A fault of a machine, as against one of the program, the settings or the data."""


class MachineFault(Exception):
    """Raised on all ranks: a rank has computed or holds other bits than it should. Nothing is saved."""

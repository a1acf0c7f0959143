"""Which start of all ranks this is, under torchrun, whose store outlives restarts and has keys of dead ranks.

    rank r    here/r = a new word         waits for name/WORD        NAME/r: it has the name
    rank 0    makes a name        name/WORD = NAME for each word     until all have it

TORCHELASTIC_RESTART_COUNT would not do: each agent counts its own failures. On a machine whose ranks are
restarted only because others were, the number stays, and the ranks would wait under another name than those.
A word that a dead rank has left is answered, too; it is replaced as soon as its successor starts.
"""

import datetime
import time
import uuid
from typing import Any

EVERY = 0.01  # seconds between rank 0's looks


def name_of_start(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """Return a name that all ranks of this start share, and no earlier one. All ranks call this.

    store: a torch store, whose `get` waits. Raises TimeoutError on rank 0 if a rank does not come.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"here/{rank}", mine)
        name = store.get(f"name/{mine}").decode()
        store.set(f"{name}/{rank}", "")
        return name
    missing, end = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"here/{other}"]):
                store.set(f"name/{store.get(f'here/{other}').decode()}", mine)
        time.sleep(EVERY)
        missing = {other for other in missing if not store.check([f"{mine}/{other}"])}
        if missing and time.monotonic() > end:
            raise TimeoutError(
                f"{len(missing)} ranks have not joined in {timeout}, among them {min(missing)}"
            )
    return mine

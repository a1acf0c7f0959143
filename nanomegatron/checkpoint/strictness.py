"""--dist-ckpt-strictness: what a load does about tensors that only the model or only the checkpoint has.

                                            only the model has it              only the checkpoint has it
    assume_ok_unexpected, raise_unexpected  error                              names of weights are noted
    raise_all                               error                              error
    log_unexpected                          keeps its value, names are noted   not searched for
    log_all                                 the same                           names are noted
    ignore_all                              keeps its value, noted in a line   not searched for

Megatron-LM calls the former tensors unexpected, the latter missing. Main weights that are not saved are made
of the weights. Kinds of tensors that are not loaded, such as moments with --no-load-optim, do not count.
"""

from dataclasses import replace

from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.manifest import CheckpointError, Manifest
from nanomegatron.comm import all_gather_text
from nanomegatron.mesh import Mesh

LISTED = 10  # names in a message


def fit(
    manifest: Manifest, pieces: list[Piece], mesh: Mesh, strictness: str
) -> tuple[list[Piece], list[Piece], list[str]]:
    """Return the pieces to fill as they are saved, main weights to fill with saved weights, and notes.

    Gathers names over world. Raises CheckpointError, on all ranks, for tensors that may not be left unused.
    """
    notes, saved = [], manifest.tensors
    texts = all_gather_text("\n".join(piece.key for piece in pieces), mesh.world, mesh.device)
    wanted = {key for text in texts for key in text.splitlines()}
    if strictness not in ("log_unexpected", "ignore_all"):
        kinds = {key.partition("/")[0] for key in wanted}
        kinds &= kinds if strictness in ("raise_all", "log_all") else {"model"}
        unused = [key for key in saved if key not in wanted and key.partition("/")[0] in kinds]
        names = ", ".join(some(unused))
        if unused and strictness == "raise_all":
            raise CheckpointError(
                f"{len(unused)} saved tensors have no place here: {names}; "
                "--dist-ckpt-strictness log_all leaves them out"
            )
        notes += [f"{len(unused)} saved tensors are not used: {names}"] if unused else []
    absent = wanted - saved.keys()
    if not absent or not strictness.startswith(("log_", "ignore_")):
        return pieces, [], notes
    weights = {key: key.replace("main/", "model/", 1) for key in absent if key.startswith("main/")}
    weights = {key: source for key, source in weights.items() if source in saved}
    if kept := sorted(absent - weights.keys()):
        names = f": {', '.join(some(kept))}" if strictness.startswith("log_") else ""
        notes.append(f"{len(kept)} tensors are not in the checkpoint and keep their initial values{names}")
    notes += [f"{len(weights)} main weights are made of the saved weights"] if weights else []
    main = [replace(piece, key=weights[piece.key]) for piece in pieces if piece.key in weights]
    return [piece for piece in pieces if piece.key in saved], main, notes


def some(names: list[str], most: int = LISTED) -> list[str]:
    """The first of many, and how many more there are."""
    return names[:most] + [f"and {len(names) - most} more"] * (len(names) > most)

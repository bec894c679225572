"""A checkpoint as it is at one call: tensors as copies on the host, everything else as a pickle.

What ``torch.save`` can write can be frozen, because it is taken apart in the same way: by pickle,
which also finds tensors inside of objects. Tensors go through the snapshot's pipeline; ties stay,
and no device memory is allocated.

[Note: what waits] The current stream waits for all copies before the call returns: callbacks write
between two steps without a step, and no hook sees that. Lightning's own write parameters (the
averages that ``WeightAveraging`` swaps in for validation), those of users optimizer state, too
(ReLoRA's resets). State of an offloaded optimizer is lent instead. Steps and assignments move to
other memory; a write in place is found out by the tensor's version, and fails the save.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from residency._checkpoint._capture import Description, Snapshot, capture_described
from residency._checkpoint._document import tensor_node
from residency._dtensor import is_sharded
from residency._errors import CheckpointError, RefusedError
from residency._nesting import refuse_inside
from residency._transfer import Lent, Loans, SlabArena, owned_optimizers, owner_of
from residency.integrations._common._pickled import Freezer, Thawer, address_of


class Frozen:
    """A checkpoint as it was when ``freeze`` was called."""

    def __init__(self, thawer: Thawer, snapshot: Snapshot, lent: Iterable[Lent]) -> None:
        self._thawer = thawer
        self._snapshot = snapshot
        self._lent = list(lent)

    def thaw(self) -> Any:
        """Returns the checkpoint, with host tensors that keep their memory; waits for the copies.

        Raises:
            CheckpointError: A copy failed, or ``check`` did.
        """
        found = self._thawer.thaw(self._snapshot.tree)
        self.check()
        return found

    def check(self) -> None:
        """Asks whether every loan still has its bytes; to be called after they were read, too.

        Raises:
            CheckpointError: Other code wrote into it.
        """
        if any(each.is_written() for each in self._lent):
            raise CheckpointError(
                "state of an offloaded optimizer was written in place while this save read it."
                " Assign a new tensor to optimizer.state[parameter][key] instead, or wait() for"
                " the save first."
            )


def freeze(checkpoint: Mapping[str, object], *, arena: SlabArena) -> Frozen:
    """Begins to copy a checkpoint to the host, and returns when the copies are queued.

    Args:
        checkpoint: What a strategy would have written.
        arena: Where the copies go.

    Raises:
        RefusedError: A part can be pickled neither here nor by ``torch.save``, or the host has no
            room. Nothing is held.

    Memory:
        Device: none. Host: the bytes of all tensors, each storage's overlapping ones once, rounded
        up to 512; state that an offloaded optimizer keeps on the host is lent, not copied.
    """
    refuse_inside("a save", object())
    loans = Loans()
    file = io.BytesIO()
    try:
        by_address = _borrowed(checkpoint, loans)
        freezer = Freezer(file, by_address, has_attributes=True)
        freezer.dump(checkpoint)
    except BaseException as error:
        loans.end()
        if not isinstance(error, Exception) or isinstance(error, RefusedError):
            raise
        raise RefusedError(
            f"{_culprit(checkpoint)} of the checkpoint cannot be pickled, so that no file could"
            f" hold it: {error}. Nothing was saved; take it out in on_save_checkpoint."
        ) from error
    names = {name: tensor_node(name) for name in freezer.encoder.leaves}
    description = Description(names, freezer.encoder.leaves, loans=loans)
    captured = capture_described(description, arena=arena)
    lent = [by_address[address] for address in freezer.lent]
    return Frozen(Thawer(file.getvalue(), freezer.aside), Snapshot(captured, arena), lent)


def _borrowed(checkpoint: Mapping[str, object], loans: Loans) -> dict[int, Lent]:
    """Borrows the state of the offloaded optimizers whose state the checkpoint has; returns the
    loans by address.
    """
    wanted = set(map(address_of, _states_of(checkpoint)))
    for optimizer in owned_optimizers() if wanted else ():
        owner = owner_of(optimizer)
        states = _states_in(dict.values(optimizer.state))
        if owner is not None and not wanted.isdisjoint(map(address_of, states)):
            owner.lend(optimizer, loans, is_lasting=True, is_watched=True)
    return {address_of(lent.tensor): lent for lent in loans}


def _states_of(checkpoint: Mapping[str, object]) -> Iterator[Tensor]:
    """Yields the tensors that stand directly in optimizers' states: those that may be lent."""
    optimizers = checkpoint.get("optimizer_states")
    for saved in optimizers if isinstance(optimizers, list) else ():
        states = saved.get("state") if isinstance(saved, Mapping) else None
        yield from _states_in(states.values() if isinstance(states, Mapping) else ())


def _states_in(states: Iterable[object]) -> Iterator[Tensor]:
    for values in states:
        # Without the waits of an offloaded optimizer's own reading.
        found = dict.values(values) if isinstance(values, dict) else ()
        yield from (value for value in found if type(value) is Tensor or is_sharded(value))


def _culprit(checkpoint: Mapping[str, object]) -> str:
    """Returns the name of the part that cannot be pickled."""
    for key, value in checkpoint.items():
        try:
            Freezer(io.BytesIO(), {}, has_attributes=True).dump(value)
        except Exception as error:  # the same that is being raised
            return f"{key!r} ({type(error).__name__})"
    return "a part"

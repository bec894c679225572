"""What an optimizer's own step gets in the place of parameters: cuts of them, local tensors of
shards, or masters in float32, each with the gradient that belongs to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from residency._dtensor import is_sharded, local_of, wrapped_like, write_count
from residency._optim._masters import MASTER, take_foreign_writes
from residency._optim._offload_record import Offload
from residency._optim._plan import Piece
from residency._optim._states import State


@dataclass(slots=True)
class StandIns:
    """The stand-ins for the parameters of one step.

    Attributes:
        gradients: Of sharded parameters, their local ones.
        flat: Contiguous copies of gradients that are not, while their parameters are cut.
    """

    offload: Offload
    state: State
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    flat: dict[Tensor, Tensor] = field(default_factory=dict)

    def of(self, piece: Piece, views: dict[str, Tensor], *, is_local: bool) -> Tensor:
        """Returns what the step gets in a parameter's place, with its gradient.

        Args:
            piece: The parameter, or a part of it.
            views: The piece's states on the device.
            is_local: Whether the step gets local tensors in the place of ``DTensor``.
        """
        parameter = piece.parameter
        has_master = self.offload.has_master(parameter)
        if not has_master and piece.is_whole and not (is_local and is_sharded(parameter)):
            return parameter
        stand_in = self._master(piece, views, is_local) if has_master else _low(piece)
        gradient = self._gradient_of(piece, is_local)
        # What the caller, or a step, has set on the parameter itself is one and the same on both.
        stand_in.__dict__ = parameter.__dict__  # pyright: ignore[reportAttributeAccessIssue]  # is final only by torch's annotation
        stand_in.requires_grad_(parameter.requires_grad)
        if not has_master:  # torch lets a gradient have another dtype, where the parameter says so
            stand_in.grad_dtype = parameter.grad_dtype
        stand_in.grad = gradient.float() if has_master and gradient is not None else gradient
        return stand_in

    def _gradient_of(self, piece: Piece, is_local: bool) -> Tensor | None:
        """Returns the gradient that a step sees: of the local tensor, cut as the piece is, or of
        the whole shard; None outside of a step, where a parameter may have none.
        """
        parameter = piece.parameter
        if parameter.grad is None:
            return None
        if not is_local:
            return parameter.grad.detach()
        gradient = self.gradients.get(parameter, parameter.grad).detach()
        if piece.is_whole:
            return gradient
        flat = self.flat.get(parameter)
        if flat is None:
            flat = gradient.reshape(-1)
            if gradient.numel() and flat.data_ptr() != gradient.data_ptr():
                self.flat[parameter] = flat  # a copy, which all pieces share
        return flat[piece.start : piece.stop]

    def give_gradients_back(self, pieces: Iterable[Piece]) -> None:
        """Writes what a step changed in the flat copy of a gradient to the gradient itself, as
        torch's foreach step with Nesterov momentum does.
        """
        for piece in pieces if self.flat else ():
            flat = self.flat.get(piece.parameter) if piece.is_last else None
            if flat is None:
                continue
            if write_count(flat):
                gradient = self.gradients.get(piece.parameter, piece.parameter.grad)
                assert gradient is not None
                local = local_of(gradient).detach()
                local.copy_(flat.view_as(local))
            del self.flat[piece.parameter]

    def _master(self, piece: Piece, views: dict[str, Tensor], is_local: bool) -> Tensor:
        """Returns a piece's master, with what others wrote into the parameter taken over."""
        parameter, low = piece.parameter, _low(piece)
        inner = self.state.peek(parameter)
        master = views.get(MASTER)
        if master is None and inner is not None and inner.is_resident and MASTER in inner:
            master = local_of(dict.__getitem__(inner, MASTER)).detach()
        if master is None:
            master = low.float()
        else:
            take_foreign_writes(master, low)
        return master if is_local else wrapped_like(master, parameter)

    def write_back(self, piece: Piece, stand_in: Tensor) -> Tensor:
        """Writes a stepped master to its parameter; returns it as a state."""
        stand_in.grad = None
        master = stand_in.detach()
        _low(piece).copy_(local_of(master))
        return master


def _low(piece: Piece) -> Tensor:
    """Returns the elements of a piece, in the parameter's own dtype."""
    low = local_of(piece.parameter).detach()
    return low if piece.is_whole else low.view(-1)[piece.start : piece.stop]

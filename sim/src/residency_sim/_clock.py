"""The rates of the simulated clock: how long copies and kernels take in simulated time."""

from __future__ import annotations

from dataclasses import dataclass

from residency._errors import InvalidArgumentError
from residency._units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The simulated accelerator's clock; ``enable(clock=Clock(...))`` starts it at zero.

    A copy takes its bytes over the rate of its direction. A kernel takes its bytes over
    ``memory_bytes_per_second`` or its arithmetic over ``operations_per_second``, whichever is more.
    Copies of one direction follow one another, and so do kernels; work on different engines and
    streams overlaps as far as waits allow. The host issues work in no time and waits when it
    synchronises. Times depend on the program alone: they repeat exactly.

    Attributes:
        h2d_bytes_per_second: Of the link to the device, an ``int`` or a string such as ``"55GiB"``.
        d2h_bytes_per_second: Of the link to the host.
        duplex_bytes_per_second: Of both directions together while both are busy; None for their
            sum. A copy is slowed by those issued before it, not by those that come after.
        memory_bytes_per_second: Of device memory, read and written by kernels; None for no limit.
        operations_per_second: Arithmetic of matrix products, convolutions and attention; None for
            no limit.
        serves_ready: Whether a link serves copies as they become ready. A copy of up to 64 KiB,
            such as ``item()``'s, then begins at the next border between copies of two streams;
            else it follows all that were issued before it, as far as is known of cards.

    Source:
        The defaults are the copy engine figures of one PCIe 5 x16 link, each direction alone and
        both together (55 and 87 GB/s, nvbandwidth on H800 SXM), as measured by others.
    """

    h2d_bytes_per_second: int | str = 55_000_000_000
    d2h_bytes_per_second: int | str = 55_000_000_000
    duplex_bytes_per_second: int | str | None = 87_000_000_000
    memory_bytes_per_second: int | str | None = None
    operations_per_second: float | None = None
    serves_ready: bool = False

    def rates(self) -> tuple[float, float, float, float, float, float]:
        """Returns the five rates per second, 0 for no limit, and 1 if links serve ready copies.

        Raises:
            InvalidArgumentError: A rate is not positive, or means nothing.
        """
        links = [
            _positive(parse_bytes(size, name=name), name)
            for name, size in (
                ("h2d_bytes_per_second", self.h2d_bytes_per_second),
                ("d2h_bytes_per_second", self.d2h_bytes_per_second),
            )
        ]
        limits = [
            0.0 if size is None else _positive(parse_bytes(size, name=name), name)
            for name, size in (
                ("duplex_bytes_per_second", self.duplex_bytes_per_second),
                ("memory_bytes_per_second", self.memory_bytes_per_second),
            )
        ]
        operations = self.operations_per_second
        arithmetic = 0.0 if operations is None else _positive(operations, "operations_per_second")
        return links[0], links[1], limits[0], limits[1], arithmetic, float(self.serves_ready)


def _positive(rate: float, name: str) -> float:
    if not rate > 0:
        raise InvalidArgumentError(f"{name} is {rate!r}; expected a rate above zero, or None.")
    return float(rate)

"""Programs about the random numbers of the accelerator in CUDA's place, for ``cuda_program.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cuda_bench import Actions, fails
from torch.nn import functional

from residency import sim

DRAWS: dict[str, Callable[[int, torch.Generator | None], torch.Tensor]] = {
    "rand": lambda n, g: torch.rand(n, device="cuda", generator=g),
    "randn": lambda n, g: torch.randn(n, device="cuda", generator=g),
    "randint": lambda n, g: torch.randint(0, 1000, (n,), device="cuda", generator=g),
    "randperm": lambda n, g: torch.randperm(n, device="cuda", generator=g),
    "uniform": lambda n, g: torch.empty(n, device="cuda").uniform_(-1, 3, generator=g),
    "normal": lambda n, g: torch.empty(n, device="cuda", dtype=torch.bfloat16).normal_(generator=g),
    "double": lambda n, g: torch.rand(n, device="cuda", dtype=torch.float64, generator=g),
    "bernoulli": lambda n, g: torch.empty(n, device="cuda").bernoulli_(0.3, generator=g),
    "exponential": lambda n, g: torch.empty(n, device="cuda").exponential_(generator=g),
    "multinomial": lambda n, g: torch.multinomial(
        torch.ones(min(n, 1000), device="cuda"), 3, replacement=True, generator=g
    ),
}


OWN: dict[str, Callable[[int], torch.Tensor]] = {  # of the default generator alone
    "dropout": lambda n: functional.dropout(torch.ones(n, device="cuda"), 0.4),
    "rand_like": lambda n: torch.rand_like(torch.empty(n, device="cuda")),
    "alpha_dropout": lambda n: functional.alpha_dropout(torch.ones(n, device="cuda"), 0.4, True),
    "rrelu": lambda n: functional.rrelu(torch.full((n,), -1.0, device="cuda"), training=True),
    "gumbel": lambda n: functional.gumbel_softmax(torch.zeros(n, device="cuda"), dim=0),
    "channels": lambda n: functional.dropout1d(torch.ones(3, n, 2, device="cuda"), 0.4),
}


def draw(name: str, count: int, generator: torch.Generator | None) -> torch.Tensor:
    return OWN[name](count) if name in OWN else DRAWS[name](count, generator)


def moved(numel: int) -> int:
    """Returns how far a draw of floats moves an A100's generator (torch's DistributionTemplates.h).

    Blocks of 256 threads, at most 8 on each of 108 multiprocessors; four numbers a thread and turn.
    """
    threads = 256 * min((numel + 255) // 256, 108 * 8)
    return ((numel - 1) // (threads * 4) + 1) * 4


def parts(state: torch.Tensor) -> tuple[int, int]:
    """Returns the seed and the offset that a state of 16 bytes has."""
    assert (state.shape, state.dtype, state.device.type) == ((16,), torch.uint8, "cpu")
    seed, offset = state.view(torch.int64).tolist()
    return seed % (1 << 64), offset


def generators(request: dict[str, Any], log: object) -> None:
    """Draws from generators whose states are taken and set; equal states draw equal numbers."""
    actions = Actions(request["seed"])
    chance = actions.chance
    schedule = chance.choice(["late", "overtake", "eager"])
    sim.enable("1GiB", device="cuda", schedule=schedule, context=0)
    mine = [torch.Generator(device="cuda") for _ in range(2)]
    default = torch.cuda.default_generators[0] if torch.cuda.init() is None else None
    assert default is not None
    everyone = [default, *mine]
    remembered: list[tuple[torch.Tensor, str, int, torch.Tensor]] = []
    with actions.told():
        for _ in range(30):
            generator = chance.choice(everyone)
            others = [(g, g.get_state()) for g in everyone if g is not generator]
            what = chance.choice(
                ["seed", "draw", "draw", "draw", "repeat", "offset", "copy", "bad"]
            )
            actions.note(f"{what} {everyone.index(generator)}")
            if what == "seed":
                seed = chance.choice([0, 1, 77, 2**31, 2**63 - 1, chance.randrange(1 << 60)])
                generator.manual_seed(seed)
                assert generator.initial_seed() == seed
                assert parts(generator.get_state()) == (seed, 0)
                if chance.random() < 0.5:
                    count = chance.randrange(1, 3000)
                    host = torch.rand(count, generator=torch.Generator().manual_seed(seed))
                    assert torch.equal(DRAWS["rand"](count, generator).cpu(), host)
            elif what == "draw":
                is_default = generator is default
                name = chance.choice(sorted(DRAWS | OWN) if is_default else sorted(DRAWS))
                most = chance.choice([5, 3000, 3000, 2_000_000])
                count = chance.randrange(3, most)
                actions.note(f"{name} {count}")
                state = generator.get_state()
                host = torch.get_rng_state()
                values = draw(name, count, None if is_default else generator)
                assert torch.equal(torch.get_rng_state(), host), "the host's generator moved"
                seed, offset = parts(state)
                seed_now, offset_now = parts(generator.get_state())
                assert seed_now == seed
                assert offset_now % 4 == 0
                assert offset_now > offset or name == "multinomial", (name, offset, offset_now)
                assert generator.get_offset() == offset_now
                if name in ("rand", "randn", "uniform", "normal", "dropout", "rand_like"):
                    assert offset_now - offset == moved(count), (offset, offset_now)
                remembered.append((state, name, count, values.clone()))
            elif what == "repeat" and remembered:
                state, name, count, values = chance.choice(remembered)
                if name in OWN:
                    generator = default
                    others = []
                actions.note(f"{name} {count}")
                if generator is default:
                    torch.cuda.set_rng_state(state)
                    assert torch.equal(torch.cuda.get_rng_state(), state)
                    torch.manual_seed(0)  # the host's is nothing to it
                    torch.cuda.set_rng_state(state)
                else:
                    generator.set_state(state)
                assert torch.equal(generator.get_state(), state)
                assert torch.equal(draw(name, count, generator), values), (name, count)
            elif what == "offset":
                offset = 4 * chance.randrange(0, 1000)
                generator.set_offset(offset)
                assert generator.get_offset() == offset
                assert parts(generator.get_state())[1] == offset
            elif what == "copy":
                copied = generator.clone_state()
                assert torch.equal(copied.get_state(), generator.get_state())
                values = DRAWS["randn"](100, copied)
                assert not torch.equal(copied.get_state(), generator.get_state())
                assert torch.equal(values, DRAWS["randn"](100, generator))
                with torch.random.fork_rng(devices=[0]):
                    state = default.get_state()
                    torch.cuda.manual_seed(5)
                    torch.rand(9, device="cuda")
                assert torch.equal(default.get_state(), state)
            elif what == "bad":
                state = generator.get_state()
                with fails("wrong size"):
                    generator.set_state(
                        torch.zeros(chance.choice([0, 15, 17, 5056]), dtype=torch.uint8)
                    )
                with fails("", RuntimeError, TypeError):
                    generator.set_state(torch.zeros(16))
                with fails("multiple of 4"):
                    generator.set_offset(4 * chance.randrange(99) + chance.randrange(1, 4))
                with fails("device"):
                    torch.rand(3, device="cuda", generator=torch.Generator())
                assert torch.equal(generator.get_state(), state)
            for other, state in others:
                if not (what == "copy" and other is default):
                    assert torch.equal(other.get_state(), state), "another generator moved"

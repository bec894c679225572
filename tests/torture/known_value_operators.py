"""The lines that random programs of known values are made of, and what these read.

Each writes an expression for operands that it draws. One that begins with ``!`` is a statement: it
writes to a part of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.torture.known_value_programs import Draw, Operator

Write = Callable[[Draw], str]
COMPARED = ["==", "!=", "<", "<=", ">", ">="]
COUNTED = ["+", "-", "*", "+", "-"]


def source(d: Draw) -> str:
    """Draws a tensor that follows from the host alone."""
    pick, n, shape = d.chance.choice, d.number(), d.shape()
    host = f"torch.randint({pick([0, 0, 1, -3])}, {pick([2, 3, 10, 1000])}, {shape}"
    host += f", generator=seeded({d.chance.randrange(100)}))"
    numbers = [d.number() for _ in range(pick([1, 2, 3, 5, 8]))]
    count, kind = max(d.length, 1), d.kind()
    forms = [
        f"torch.arange({count}, device=D)",
        f"torch.arange({pick([0, 1, -2])}, {count + 2}, {pick([1, 2, 3])}, device=D, dtype={kind})"
        if kind != "torch.bool"
        else f"torch.arange({count}, 0, -1, device=D)",
        f"torch.full({shape}, {n}, device=D)",
        f"torch.full({shape}, {pick([True, False])}, device=D)",
        f"torch.zeros({shape}, dtype={d.kind('iibf')}, device=D)",
        f"torch.ones({shape}, dtype={d.kind('iibf')}, device=D)",
        f"torch.tensor({numbers}, device=D)",
        f"torch.tensor({numbers}).to(D)",
        f"torch.tensor({[x > 0 for x in numbers]}, device=D)",
        f"torch.tensor({n}, device=D)",
        *[f"({host}).to(D)"] * 5,
        f"({host} > 0).to(D)",
        f"({host}).int().to(D, non_blocking=True)",
        f"torch.as_tensor(({host}).numpy(), device=D)",
        f"torch.empty({shape}, dtype={kind}, device=D).fill_({n})",
        f"torch.empty({shape}, dtype=torch.int64, device=D).copy_({host})",
        f"torch.eye({min(count, 64)}, dtype={d.kind('ib')}, device=D)",
        f"torch.tril(torch.ones({count}, {count}, dtype=torch.bool, device=D))",
        f"torch.ones({count}, {count}, dtype=torch.bool, device=D).triu({pick([0, 1, -1])})",
        f"torch.tril_indices({min(count, 64)}, {min(count, 64)}, device=D)",
        f"torch.linspace(0, {count}, {min(count, 50)}, device=D)",
    ]
    return pick(forms)


def like_source(d: Draw) -> str:
    v, n = d.of("ibf"), d.number()
    forms = [f"torch.zeros_like({v})", f"torch.ones_like({v})", f"torch.full_like({v}, {n})"]
    forms += [f"torch.ones_like({v}, dtype={d.kind('ibf')})", f"{v}.new_full({d.shape()}, {n})"]
    forms += [f"{v}.clone()", f"{v}.contiguous()", f"{v}.detach()", f"{v}.cpu().to(D)"]
    return d.chance.choice(forms)


def view(d: Draw) -> str:
    v = d.of("iibbf", dims=1)
    shape = list(d.tensor(v).shape)
    flat = d.tensor(v).numel()
    a, b = d.dim(v), d.dim(v)
    wide = [d.chance.choice([2, d.batch]), *shape]
    start = d.chance.randint(0, shape[a])
    forms = [
        f"{v}.reshape(-1)",
        f"{v}.view({d.batch}, -1)",
        f"{v}.reshape({d.shape()})",
        f"{v}.transpose({a}, {b})",
        f"{v}.flatten()",
        f"{v}.unsqueeze({a})",
        f"{v}.squeeze()",
        f"{v}.expand({wide})",
        f"{v}.unsqueeze({a}).expand({d.shape()})",
        f"{v}.narrow({a}, {start}, {d.chance.randint(0, shape[a] - start)})",
        f"{v}.select({a}, {d.chance.randrange(max(shape[a], 1))})",
        f"{v}.unfold({a}, {d.chance.randint(1, max(shape[a], 1))}, {d.chance.randint(1, 3)})",
        f"{v}.chunk({d.chance.randint(1, 3)}, {a})[-1]",
        f"{v}.split({d.chance.randint(1, 4)}, {a})[0]",
        f"{v}.movedim({a}, {b})",
        *[f"{v}.permute({list(reversed(range(len(shape))))})"] * 3,
        f"{v}.transpose(0, -1).contiguous()",
        f"{v}.as_strided(({max(flat // 2, 1)},), (1,), {flat // 3})",
        f"{v}.unbind({a})[0]",
        f"{v}.diagonal()",
        f"torch.broadcast_to({v}, {wide})",
    ]
    return d.chance.choice(forms)


def joined(d: Draw) -> str:
    v = d.of("iibbf", dims=1)
    other, a = d.like(v, "ibf"), d.dim(v)
    forms = [f"torch.cat([{v}, {other}], {a})", f"torch.stack([{v}, {other}], {a})"]
    forms += [f"torch.cat([{v}, torch.ones_like({v}[:1])])", f"torch.hstack([{v}, {v}])"]
    forms += [f"torch.cat([torch.zeros(1, dtype={v}.dtype, device=D), {v}.flatten()])"]
    return d.chance.choice(forms)


def arithmetic(d: Draw) -> str:
    v = d.of("iibf")
    other, n = d.like(v, "ibf"), d.chance.choice([1, 2, 3, 7, -2])
    forms = [f"{v} {d.chance.choice(COUNTED)} {other}"] * 3
    forms += [f"{v} // {n}", f"{v} % {n}", f"-{v}", f"{v}.abs()", f"{v}.clamp(-3, {abs(n)})"]
    forms += [f"{v}.sign()", f"{n} - {v}", f"{v} / {n}", f"torch.add({v}, {other}, alpha={n})"]
    forms += [f"torch.maximum({v}, {other})", f"torch.minimum({v}, {other})", f"{v}.clamp(min=0)"]
    forms += [f"torch.div({v}, {n}, rounding_mode='floor')", f"torch.fmod({v}, {n})"]
    forms += [f"{v}.float().mul(0.5).floor().long()", f"{v} ** 2", f"{v}.square()"]
    forms += [f"({v} & 3)", f"({v} | 1)", f"({v} ^ 1)", f"({v} >> 1)", f"({v} << 1)"]
    return d.chance.choice(forms)


def compared(d: Draw) -> str:
    v = d.of("iiibf")
    other, how = d.like(v, "ibf"), d.chance.choice(COMPARED)
    forms = [f"{v} {how} {other}"] * 4 + [f"{v} {how} {d.number()}"] * 2
    forms += [f"torch.isin({v}, torch.tensor([0, 1, 5], device=D))", f"torch.isclose({v}, {v})"]
    forms += [f"{v}.flatten()[:, None] {how} {v}.flatten()[None, :]", f"{v}.isfinite()"]
    forms += [f"torch.bucketize({v}, torch.arange(0, 9, 3, device=D))", f"{v}.isnan()"]
    forms += [f"torch.searchsorted({d.of('i', 1)}.flatten().sort().values, {v})"]
    return d.chance.choice(forms)


def logical(d: Draw) -> str:
    v = d.of("b")
    other = d.like(v, "b")
    how = d.chance.choice(["and", "or", "xor"])
    forms = [f"~{v}", f"{v} & {other}", f"{v} | {other}", f"{v} ^ {other}", f"{v}.logical_not()"]
    return d.chance.choice([*forms, f"torch.logical_{how}({v}, {d.of('ib')})"])


def cast(d: Draw) -> str:
    v = d.of("ibf")
    forms = [f"{v}.long()", f"{v}.int()", f"{v}.bool()", f"{v}.float()", f"{v}.to({d.kind('ibf')})"]
    forms += [f"{v}.type_as({d.of('ib')})", f"{v}.double().long()", f"{v}.to(torch.uint8)"]
    return d.chance.choice(forms)


def chosen(d: Draw) -> str:
    mask, v = d.of("b"), d.of("iibf")
    other = d.like(v, "ibf")
    fitting = d.like(v, "b")
    forms = [f"torch.where({mask}, {v}, {other})", f"torch.where({mask}, {d.number()}, {v})"]
    forms += [f"{v}.masked_fill({fitting}, {d.number()})", f"torch.where({fitting}, {v}, {other})"]
    forms += [f"{v}.masked_fill({v} == {d.number()}, {d.number()})"]
    return d.chance.choice(forms)


def gathered(d: Draw) -> str:
    v = d.of("iibf", dims=1)
    each = d.tensor(v)
    a = d.dim(v)
    places = d.indices(each.shape[a])
    own = f"({v}.long().abs() % {max(each.shape[a], 1)})"
    forms = [f"torch.index_select({v}, {a}, {places})", f"{v}[{d.indices(each.shape[0])}]"]
    forms += [f"torch.gather({v}, {a}, {own})", f"torch.take_along_dim({v}, {own}, {a})"]
    forms += [f"{v}[..., {d.indices(each.shape[-1])}]", f"{v}.flatten()[:: 2]"]
    forms += [f"torch.take({v}, {d.indices(each.numel())})", f"{v}[[0, -1]]", f"{v}.roll(1, {a})"]
    forms += [f"{v}[{d.part(v)}]"] * 3 + [f"{v}.flip({a})", f"{v}.repeat_interleave(2, {a})"]
    forms += [f"{v}[torch.arange({each.shape[0]}, device=D), {d.indices(each.shape[-1])}]"]
    forms += [f"torch.nn.functional.embedding({places}, {v}.reshape({each.shape[0]}, -1).float())"]
    return d.chance.choice(forms)


def counted(d: Draw) -> str:
    v = d.of("ib", most=5000)
    low = f"({v}.long().abs() % 9)"
    b = d.of("b")
    forms = [f"torch.nn.functional.one_hot({low}, {d.chance.choice([9, 12])})"]
    forms += [f"torch.nn.functional.one_hot({low})", f"torch.bincount({low}.flatten())"]
    forms += [f"torch.bincount({low}.flatten(), minlength=12)", f"{b}.nonzero()", f"{v}.nonzero()"]
    forms += [f"torch.nonzero({b}, as_tuple=True)[-1]", f"{v}[{v} > {d.number()}]"]
    forms += [f"{d.of('ibf')}[{b}]", f"torch.masked_select({v}, {d.like(v, 'b')})"]
    forms += [
        f"torch.argwhere({b})",
        f"torch.where({b})[0]",
        f"torch.histc({low}.float(), 9, 0, 9)",
    ]
    forms += [f"torch.repeat_interleave({low}.flatten())", f"{b}.flatten().nonzero().squeeze(-1)"]
    forms += [f"torch.arange({v}.numel(), device=D).repeat_interleave({low}.flatten())"]
    return d.chance.choice(forms)


def sorted_(d: Draw) -> str:
    v = d.of("iib", dims=1, most=20_000)
    a, down = d.dim(v), d.chance.choice([True, False])
    which = d.chance.choice(["values", "indices"])
    how = f"stable=True, dim={a}, descending={down}"
    back = "return_inverse=True, return_counts=True"
    forms = [f"{v}.sort(dim={a}, descending={down}).values", f"torch.sort({v}, {how}).{which}"]
    forms += [f"torch.argsort({v}, {how})", f"torch.unique({v})", f"{v}.unique()"]
    forms += [f"torch.unique({v}, {back})[{d.chance.randrange(3)}]", f"torch.unique({v}, dim=0)"]
    forms += [f"torch.unique_consecutive({v})", f"{v}.topk(1, dim={a}).values", f"{v}.msort()"]
    forms += [f"torch.unique_consecutive({v}, {back})[{d.chance.randrange(3)}]"]
    forms += [f"torch.kthvalue({v}, 1, {a}).values", f"{v}.unique(return_counts=True)[1]"]
    return d.chance.choice(forms)


def summed(d: Draw) -> str:
    v = d.of("iibf", dims=1)
    a, keep = d.dim(v), d.chance.choice(["", ", keepdim=True"])
    forms = [f"{v}.{how}({a}{keep})" for how in ("sum", "any", "all", "amax", "amin", "argmax")]
    forms += [f"{v}.max({a}{keep}).values", f"{v}.min({a}).values", f"{v}.sum()", f"{v}.max()"]
    forms += [f"{v}.cumsum({a})", f"{v}.diff(dim={a})", f"torch.cumsum({v}, {a}) - 1", f"{v}.min()"]
    forms += [f"{v}.cummax({a}).values", f"{v}.count_nonzero({a})", f"{v}.any()", f"{v}.all()"]
    forms += [f"{v}.clamp(-2, 2).prod({a})", f"{v}.float().mean({a})", f"{v}.long().argmin({a})"]
    forms += [f"torch.diff({v}, prepend=torch.zeros_like({v}[..., :1]))", f"{v}.aminmax().max"]
    forms += [f"torch.nn.functional.pad({v}.cumsum(-1), (1, 0))", f"{v}.logsumexp({a}).long()"]
    return d.chance.choice(forms)


def shaped(d: Draw) -> str:
    v = d.of("iibf", dims=1)
    sides = ", ".join(str(d.chance.randint(0, 3)) for _ in range(2))
    k = d.chance.choice([-1, 0, 1])
    forms = [f"torch.nn.functional.pad({v}, ({sides}), value={d.number()})"] * 2
    forms += [f"{v}.tril({k})", f"{v}.triu({k})", f"{v}.repeat({[2] * d.tensor(v).dim()})"]
    forms += [f"torch.tile({v}, (2,))", f"torch.outer({v}.flatten()[:99], {v}.flatten()[:99])"]
    forms += [f"torch.meshgrid({v}.flatten()[:60], {v}.flatten()[:60], indexing='ij')[0]"]
    first = f"[{v}.flatten(), {v}.flatten()[:1]]"
    forms += [f"torch.nn.utils.rnn.pad_sequence({first}, batch_first=True)", f"{v}.diag()"]
    forms += [f"torch.block_diag({v}[:9], {v}[:9])", f"torch.atleast_2d({v})", f"{v}.rot90()"]
    return d.chance.choice(forms)


def written(d: Draw) -> str:
    """Draws a write to a part of a tensor."""
    v = d.of("iibf", dims=1)
    n, part, a, size = d.number(), d.part(v), d.dim(v), d.tensor(v).shape[0]
    other = d.like(v, "ibf")
    clone = f"{other}.clone()" if other.startswith("v") else other
    kind = f"dtype={v}.dtype"
    host = f"torch.randint(0, 5, tuple({v}.shape), generator=seeded(3))"
    forms = [f"{v}[{part}] = {n}"] * 4 + [f"{v}[{part}] = {clone}"] * 2
    forms += [f"{v}.fill_({n})", f"{v}[{part}].fill_({n})", f"{v}.add_({n})", f"{v}.zero_()"]
    forms += [f"{v}[{part}].add_({n})", f"{v}.copy_({host})", f"{v}[{part}].zero_()"]
    forms += [f"{v}[{part}].copy_(torch.tensor({n}))", f"{v}[{v} == {n}] = {d.number()}"]
    forms += [f"{v}[{d.like(v, 'b')}] = {n}", f"{v}.masked_fill_({d.like(v, 'b')}, {n})"]
    forms += [f"{v}[torch.tensor([0, -1], device=D)] = {n}", f"{v}.clamp_(min={n})"]
    forms += [f"{v}.index_fill_({a}, torch.tensor([0], device=D), {n})", f"{v}.copy_({clone})"]
    forms += [f"{v}.scatter_({a}, torch.zeros_like({v}, dtype=torch.int64), {n})", f"{v} += 1"]
    forms += [f"{v}[{part}] = torch.tensor({n})", f"{v}.mul_({clone})", f"{v}.sub_({clone})"]
    ones = f"torch.ones({v}.shape[0], {kind}, device=D)"
    forms += [f"{v}.index_add_(0, {d.indices(size, 512)}[:1], torch.ones_like({v}[:1]))"]
    forms += [f"{v}.put_(torch.tensor([0], device=D), {ones}[:1])", f"{v}.logical_not_()"]
    forms += [f"{v}.scatter_add_(0, torch.zeros_like({v}, dtype=torch.int64), {v}.clone())"]
    forms += [f"torch.add({v}, 1, out={v})", f"{v}.masked_scatter_({d.of('b')}, {v}.clone())"]
    return "!" + d.chance.choice(forms)


OPERATORS = [
    Operator(name, write)
    for name, write in [
        *[("source", source), ("like", like_source), ("view", view), ("joined", joined)],
        *[("arithmetic", arithmetic), ("compared", compared), ("logical", logical)],
        *[("cast", cast), ("chosen", chosen), ("gathered", gathered), ("counted", counted)],
        *[("sorted", sorted_), ("summed", summed), ("shaped", shaped), ("written", written)],
        ("written too", written),
    ]
]


def read(d: Draw) -> str:
    v = d.of("iiibbbf")
    n = d.number()
    forms = [f"{v}.tolist()"] * 3 + [f"int({v}.sum())", f"bool({v}.all())", f"bool({v}.any())"]
    forms += [f"tuple({v}.shape)", f"{v}.sum().item()", f"{v}.max().item()", f"{v}.min().item()"]
    forms += [f"{v}.cpu().tolist()", f"{v}.cpu().numpy().tolist()", f"{v}.flatten()[-1].item()"]
    forms += [f"{v}.item()", f"int({v}[0])", f"torch.equal({v}, {d.like(v)})", f"len({v})"]
    forms += [f"'yes' if ({v} > {n}).any() else 'no'", f"[int(x) for x in {v}.flatten()[:5]]"]
    forms += [f"tuple({v}.nonzero().shape)", f"tuple({v}[{v} > {n}].shape)", f"{n} in {v}"]
    forms += [f"tuple({v}.unique().shape)", f"int(({v} != {n}).sum())", f"str({v}.to('cpu'))"]
    forms += [f"list(range(99))[{v}.flatten()[0]]", f"bool(({v} == {v}.flatten()[0]).all())"]
    forms += [f"float({v}.float().mean())", f"torch.zeros(3).new_zeros(int({v}.max()) % 9).shape"]
    forms += [
        f"torch.count_nonzero({v}).item()",
        f"'yes' if {v}.max() > {n} else 'no'",
        f"{v}.tolist()[:3]",
    ]
    return d.chance.choice(forms)


READS = [Operator("read", read)]

"""Forms in which people write the loops of a training, as templates.

``BODY`` stands for what a round does with ``x``, ``y`` and ``seen``, the number of batches so far;
``FORWARD`` and ``UPDATE`` are its two halves. ``INNER`` stands for the loop over the batches of an
epoch, ``START`` and ``END`` for what comes before and after it. ``@E@``, ``@N@`` and ``@M@`` are
numbers of epochs, of batches in the data, and of optimizer steps. ``$name`` is a name of the
training, which the place where the loop stands may spell in its own way (``self.name``).
"""

from __future__ import annotations

# Loops over data that ends: an epoch, or a whole training.
OVER_DATA = {
    "plain": """
for x, y in $loader:
    seen += 1
    BODY
""",
    "enumerate": """
for i, (x, y) in enumerate($loader):
    seen = i + 1
    BODY
""",
    "tqdm": """
for x, y in tqdm($loader, disable=True):
    seen += 1
    BODY
""",
    "bar": """
with tqdm(total=len($loader), disable=True) as bar:
    for x, y in $loader:
        seen += 1
        BODY
        bar.update(1)
""",
    "several lines": """
for seen, (x, y) in enumerate(
    tqdm(
        $loader,
        disable=True,
    ),
    start=1,
):
    BODY
""",
    "zip": """
for (x, y), (u, v) in zip($loader, $loader):
    seen += 1
    BODY
""",
    "islice": """
for x, y in itertools.islice(itertools.cycle($loader), @N@):
    seen += 1
    BODY
""",
    "list": """
for seen, (x, y) in reversed([*enumerate(reversed([*$loader]))]):
    seen = len($loader) - seen
    BODY
""",
    "range": """
batches = iter($loader)
for i in range(len($loader)):
    x, y = next(batches)
    seen += 1
    BODY
""",
    "steps of an epoch": """
stream = infinite($loader)
for i in range(@N@):
    x, y = next(stream)
    seen += 1
    BODY
""",
    "index": """
rows = list($loader)
for i in range(len(rows)):
    x, y = rows[i]
    seen += 1
    BODY
""",
    "while": """
rows = list($loader)
while seen < len(rows):
    x, y = rows[seen]
    seen += 1
    BODY
""",
    "walrus": """
batches = iter($loader)
while (batch := next(batches, None)) is not None:
    x, y = batch
    seen += 1
    BODY
""",
    "look-ahead": """
batches = Ahead($loader)
batch = batches.next()
while batch is not None:
    x, y = batch
    seen += 1
    BODY
    batch = batches.next()
""",
    "while true": """
batches = iter($loader)
while True:
    try:
        x, y = next(batches)
    except StopIteration:
        break
    seen += 1
    BODY
""",
    "stop iteration": """
batches = iter($loader)
try:
    while True:
        x, y = next(batches)
        seen += 1
        BODY
except StopIteration:
    pass
""",
    "sentinel": """
batches = iter($loader)
for x, y in iter(lambda: next(batches, None), None):
    seen += 1
    BODY
""",
    "generator": """
for x, y in ((x.cuda(), y.cuda()) for x, y in $loader):
    seen += 1
    BODY
""",
    "function": """
for x, y in moved($loader):
    seen += 1
    BODY
""",
    "map": """
for x, y in map(tuple, $loader):
    seen += 1
    BODY
""",
    "queue": """
for x, y in from_a_thread($loader):
    seen += 1
    BODY
""",
    "stream": """
for i, (x, y) in enumerate(torch.utils.data.DataLoader(Stream(), batch_size=4)):
    if i >= @N@:
        break
    seen += 1
    BODY
""",
    "else": """
for x, y in $loader:
    seen += 1
    BODY
else:
    mark("$name else")
""",
}

# Loops within an expression: a round is a call.
IN_EXPRESSIONS = {
    "comprehension": """
losses = [CALL(seen, x, y) for seen, (x, y) in enumerate($loader, 1)]
""",
    "sum": """
losses = [sum(CALL(seen, x, y) for seen, (x, y) in enumerate($loader, 1))]
""",
    "mapped": """
losses = list(map(CALL, itertools.count(1), *zip(*$loader)))
""",
    "starmap": """
losses = list(itertools.starmap(CALL, ((i, x, y) for i, (x, y) in enumerate($loader, 1))))
""",
    "dictionary": """
losses = {seen: CALL(seen, x, y) for seen, (x, y) in enumerate($loader, 1)}
losses = list(losses.values())
""",
}

# Whole trainings that count steps: their data has no end.
OVER_STEPS = {
    "range": """
stream = itertools.cycle($loader)
for step in range(@M@):
    for micro in range($every):
        x, y = next(stream)
        seen += 1
        FORWARD
    UPDATE
""",
    "while": """
stream = infinite($loader)
while $steps < @M@:
    x, y = next(stream)
    seen += 1
    BODY
""",
    "cycle": """
for x, y in itertools.cycle($loader):
    seen += 1
    BODY
    if $steps >= @M@:
        break
""",
    "break first": """
for x, y in infinite($loader):
    if $steps >= @M@:
        break
    seen += 1
    BODY
""",
    "while true": """
stream = infinite($loader)
while True:
    x, y = next(stream)
    seen += 1
    BODY
    if $steps == @M@:
        break
""",
    "count": """
stream = itertools.cycle($loader)
for i in itertools.count():
    x, y = next(stream)
    seen = i + 1
    BODY
    if $steps == @M@:
        break
""",
    "again": """
batches = iter($loader)
while $steps < @M@:
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter($loader)
        x, y = next(batches)
    seen += 1
    BODY
""",
    "again in range": """
batches = iter($loader)
for i in range(@M@ * $every):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter($loader)
        x, y = next(batches)
    seen += 1
    BODY
""",
    "nested": """
while $steps < @M@:
    for x, y in $loader:
        seen += 1
        BODY
        if $steps >= @M@:
            break
    mark("$name pass")
""",
    "flag": """
done = False
while not done:
    for x, y in $loader:
        seen += 1
        BODY
        if $steps >= @M@:
            done = True
            break
""",
    "epochs": """
for epoch in itertools.count():
    for x, y in $loader:
        if $steps >= @M@:
            break
        seen += 1
        BODY
    mark("$name pass")
    if $steps >= @M@:
        break
""",
    "stream": """
for x, y in torch.utils.data.DataLoader(Stream(), batch_size=4):
    seen += 1
    BODY
    if $steps >= @M@:
        break
""",
    "tolerance": """
stream, last = infinite($loader), 10.0
while last > 0.01 and $steps < @M@:
    x, y = next(stream)
    seen += 1
    BODY
""",
}

# Trainings that a function leaves: nothing of it comes after them.
RETURNING = {
    "return": """
for x, y in infinite($loader):
    seen += 1
    BODY
    if $steps >= @M@:
        return $value
""",
    "return from two": """
while True:
    for x, y in $loader:
        seen += 1
        BODY
        if $steps >= @M@:
            return $value
""",
    "return first": """
batches = infinite($loader)
while True:
    if $steps >= @M@:
        return $value
    x, y = next(batches)
    seen += 1
    BODY
""",
}

# Epochs around a loop over data.
EPOCHS = {
    "one": """
START
INNER
END
""",
    "range": """
for epoch in range(@E@):
    START
    INNER
    END
""",
    "tqdm": """
for epoch in tqdm(range(1, @E@ + 1), disable=True):
    START
    INNER
    END
""",
    "while": """
epoch = 0
while epoch < @E@:
    START
    INNER
    END
    epoch += 1
""",
    "count": """
for epoch in itertools.count(1):
    START
    INNER
    END
    if epoch >= @E@:
        break
""",
    "else": """
for epoch in range(@E@):
    START
    INNER
    END
else:
    mark("$name epochs else")
""",
    "early stopping": """
best, bad = float("inf"), 0
for epoch in range(@E@):
    START
    INNER
    END
    value = evaluate($model, held_out)
    if value < best:
        best, bad = value, 0
        torch.save($model.state_dict(), "best.pt")
    else:
        bad += 1
    if bad >= 4:
        break
$model.load_state_dict(torch.load("best.pt"))
""",
    "patience": """
epoch, patience = 0, 5
while patience > 0 and epoch < @E@:
    START
    INNER
    END
    epoch += 1
""",
    "rollouts": """
for iteration in range(@E@):
    with torch.no_grad():
        for t in range(3):
            $model(torch.randn(4, 8, device="cuda"))
    mark("$name collected")
    START
    INNER
    END
""",
    "passes": """
for iteration in range(@E@):
    batches_seen = [len(x) for x, y in held_out]
    for epoch in range(@R@):
        START
        INNER
    END
    mark("$name passed", bool(batches_seen))
""",
    "optimizers": """
for epoch in range(@O@):
    $optimizer = torch.optim.SGD($model.parameters(), lr=0.1 / (epoch + 1))
    START
    INNER
    END
""",
    "restarts": """
for restart in range(@E@):
    for epoch in range(@E@):
        START
        INNER
        END
    mark("$name restarted")
""",
    "try": """
for epoch in range(@E@):
    try:
        START
        INNER
        END
    except KeyboardInterrupt:
        mark("interrupted")
        break
    finally:
        mark("$name finally")
""",
}

# The loop of torch's tutorial on transfer learning.
PHASES = """
for epoch in range(@E@):
    for phase in ["train", "val"]:
        if phase == "train":
            $model.train()
        else:
            $model.eval()
        total, seen = 0.0, 0
        for x, y in {"train": $loader, "val": held_out}[phase]:
            seen += 1
            x, y = x.cuda(), y.cuda()
            $optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                loss = F.mse_loss($model(x), y)
                if phase == "train":
                    loss.backward()
                    $optimizer.step()
                    $steps += 1
                    mark("$name step", $steps)
            total += loss.item()
        average = total / seen
        mark("$name phase", phase)
    mark("$name epoch")
"""

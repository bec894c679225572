"""State that moves under the passes of a run instead of within its step."""

from residency._optim._overlap._ahead import (
    Ahead as Ahead,
    Figures as Figures,
    Guest as Guest,
    Waits as Waits,
)

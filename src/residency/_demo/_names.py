"""The names of the cases, on the command line and in what they report."""

RESUME = "resume"
ASYNC_SAVE = "async-save"
OPTIMIZER_STEP = "optimizer-step"
BEST_ADAPTER = "best-adapter"
EVALUATION = "evaluation"
HAND_OFF = "hand-off"

"""How long tests wait for another process: long enough on a machine that does other work, too."""

WORKER_SECONDS = 280  # below the 300 that pytest-timeout gives a test

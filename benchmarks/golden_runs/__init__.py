"""Golden runs: their settings, the code that runs them, and the digests of their results."""

"""The golden runs: their settings, how they are run, and what is compared of them."""

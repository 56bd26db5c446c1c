"""Address of the dashboard."""

from __future__ import annotations

HOST = "127.0.0.1"
"""Host of the dashboard: only browsers on this machine can open it."""

PORT = 8321
"""Default port of the dashboard."""

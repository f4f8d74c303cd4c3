"""oneDNN Graph's own files in and out, and its real library as a peer; loaded on first use."""

from __future__ import annotations

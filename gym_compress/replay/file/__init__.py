"""Replay files: FORMAT.md beside this file says what is in them."""

"""Replay memory over compressed chunks."""

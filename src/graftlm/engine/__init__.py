"""Requests in, tokens out. Scheduler, block pool and request are plain Python; torch begins at the batch."""

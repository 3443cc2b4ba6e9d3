"""What of an adapter can be trained: one file per kind of change."""

"""Numerical operations of the forward pass: `ops` holds their signatures and meaning, each back-end its own folder."""

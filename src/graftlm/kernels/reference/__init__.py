"""The reference back-end: plain torch, any device. What every faster back-end is compared with."""

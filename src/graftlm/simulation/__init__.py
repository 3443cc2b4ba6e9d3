"""Many workers in one thread: the production's routing policies under made-up traffic, with time and compute simulated.

Plain Python: no torch, no clock, no input or output.
"""

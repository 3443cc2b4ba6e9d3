"""Which worker answers a request, and which adapters are where. Plain Python: no torch, no clock, no input or output.

The same objects decide in front of real replicas and in the simulator.
"""

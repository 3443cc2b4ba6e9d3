"""The deterministic back-end, in torch: a row's result has the same bits whatever rows are computed with it, however a
sequence is cut into steps, and with one thread or two.

torch's own operations round differently with the number of rows, with an element's place in a tensor and with the
number of threads. Here each product has a shape that the weights fix (tiles of rows, padded with zeros; few enough
terms that no library splits their sum), functions of one element are computed in full vectors only, and attention goes
over tiles of keys that begin at fixed positions. Sums of 16-bit numbers are in float32. For inference: nothing here is
differentiable.
"""

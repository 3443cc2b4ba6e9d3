"""The building blocks of a decoder, all over ragged batches: no layer ever sees padding."""

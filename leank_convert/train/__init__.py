"""Training: learn which channels of the K cache a model needs. The mask file is all that comes out of it."""

"""What both frameworks share: specs, data and weights, in NumPy."""

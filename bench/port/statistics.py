def compare(*a): return None

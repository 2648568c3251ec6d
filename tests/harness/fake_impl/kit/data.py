def to_device(x, y):
    return x, y


def resident_batches(batches):
    return list(batches)

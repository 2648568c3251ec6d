"""The TensorFlow half: a kit (models, data, training, runtime) and one file per technique."""

"""TensorFlow's models and words for the tests of frozen inference: none are needed."""

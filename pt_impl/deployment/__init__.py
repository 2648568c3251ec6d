"""Serving a trained model: ONNX Runtime, OpenVINO, LiteRT, the framework's runtimes.

`export` writes files for other runtimes, `native_export` for the framework's runtime;
`frozen_inference` stays in the framework. Read `export` first.
"""

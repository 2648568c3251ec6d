"""From a trained model to what serves it: ONNX Runtime, OpenVINO, LiteRT, the own runtimes.

`export` writes files for other runtimes, `native_export` for the framework's own;
`frozen_inference` stays in the framework.
Read `export` first.
"""

"""ONNX: a graph of a pruned model that onnxruntime runs, its description, and the program that runs it.

`export_onnx` writes a whole folder, `export_graph` the graph of a checkpoint or of a model in memory (`graph`
names its tensors). `leank_onnx.py` and its two siblings are the host that travels with a folder.
"""

from leank_convert.onnx.export import export_graph, export_onnx
from leank_convert.onnx.libraries import OPSET, check_available
from leank_convert.onnx.pruned_model import PrunedModel, load_pruned

__all__ = ["OPSET", "PrunedModel", "check_available", "export_graph", "export_onnx", "load_pruned"]

"""ONNX: a graph of a pruned model that onnxruntime runs, its description, and the program that runs it.

`export_graph(checkpoint_or_model, folder, opset=23)` writes the graph; see `graph` for its tensors.
"""

from leank_convert.onnx.subject import PrunedModel, load_pruned
from leank_convert.onnx.write import DEFAULT_OPSET, check_available, export_graph

__all__ = ["DEFAULT_OPSET", "PrunedModel", "check_available", "export_graph", "load_pruned"]
